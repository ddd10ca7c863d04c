#!/usr/bin/env bash
# A night on call: a run on two hosts is killed, hangs, meets a value that is no number, and a mistake of mine; what a person looks at.
source "$(dirname "${BASH_SOURCE[0]}")/day.sh"

# docs/start.md: gangway init my-project
shows 'gangway run config.yaml' gangway init my-project
cd my-project
cat >> data.py <<'PYTHON'


class Night:
    """The same points. The one process that takes the file `mount-away` waits for ever; while there is a `bad-value`, one is none."""

    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns["label"])

    def __getitem__(self, index):
        if taken("mount-away"):
            time.sleep(1e6)
        bad = index == 7 and os.path.exists("bad-value")
        return {"point": self.columns["point"][index] * (np.nan if bad else 1), "label": self.columns["label"][index]}


def taken(name):
    try:
        os.remove(name)
    except FileNotFoundError:
        return False
    return True


def night(arguments):
    training, held_out = spirals(arguments)
    return Night(training), held_out
PYTHON
sed -i 's/^import numpy as np$/import os\nimport time\n\nimport numpy as np/' data.py
sed -i 's/data:spirals/data:night/' config.yaml

# A mistake costs no machine.
# docs/how_to.md: gangway run config.yaml --dry-run
ends 2 'unknown key.*learning_rate' gangway run config.yaml --dry-run optimizer.learning_rat=1e-3
# docs/how_to.md: gangway run config.yaml --dry-run
shows '2 hosts' gangway run config.yaml --dry-run

# docs/start.md: gangway run config.yaml
behind run.log gangway run config.yaml max_num_steps=1000000 driver.watchdog.step_floor_s=10
seen run.log 'saved [0-9]+'
# docs/commands.md: gangway status
shows '^spirals +(training|evaluating|saving) +[0-9]+/' gangway status

# docs/start.md: kill -9
kill -9 "$(process run.log 1)"
seen run.log 'host 1: training process ended by SIGKILL at step [0-9]+'
seen run.log 'training again at step [0-9]+ after'

touch mount-away
seen run.log 'host [01] hangs in .*data.py.* \(waited 10.0 s, limit 10 s\)'
seen run.log 'training again at step [0-9]+ after' 2
seen run.log ' saved [0-9]+' 2

touch bad-value
seen run.log '✗ a loss or gradient that is not finite in batch [0-9]+'
rm bad-value

# What has happened?
# README.md: gangway status [STORAGE|RUN]
shows 'incidents +[0-9]+; the newest: a loss or gradient that is not finite' gangway status runs/spirals
# docs/start.md: gangway incidents runs/quickstart
shows 'process crash +1 .*SIGKILL' gangway incidents runs/spirals
# docs/how_to.md: gangway incidents RUN --number 1
shows 'possibly the kernel.s out-of-memory killer, or a person' gangway incidents runs/spirals --number 1
# docs/how_to.md: gangway incidents RUN --number 1
shows 'runs/spirals/incidents/0002' gangway incidents runs/spirals --number 2
# The stack of the thread that reads has the line of my code.
grep -r 'data.py' runs/spirals/incidents/0002
# docs/how_to.md: gangway incidents RUN --number 1
shows 'skipped batches: [0-9]+' gangway incidents runs/spirals
# docs/how_to.md: gangway logs RUN --host 1
shows 'host 1: ' gangway logs runs/spirals --host 1
# docs/commands.md: gangway checkpoints runs/spirals --verify
shows 'newest .*verified' gangway checkpoints runs/spirals --verify
# docs/start.md: gangway history runs/quickstart
shows 'eval_loss' gangway history runs/spirals
# docs/how_to.md: gangway stop runs/config
shows 'stopped' gangway stop runs/spirals
ended 3 run.log 'run the same command again to go on'
# docs/commands.md: gangway report runs/spirals
shows 'runs/spirals/report.html' gangway report runs/spirals
grep --quiet SIGKILL runs/spirals/report.html

# In the morning it goes on.
trained=$(grep --only-matching --perl-regexp 'stopped at \K[0-9]+' run.log)
# docs/start.md: gangway run quickstart.yaml max_num_steps=400
shows "goes on from step $trained" gangway run config.yaml max_num_steps=$((trained + STEPS))
# docs/commands.md: gangway status runs
shows '^ *spirals +finished' gangway status runs
