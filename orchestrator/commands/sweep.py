"""Trains a configuration with several settings:
`python -m orchestrator.commands.sweep CONFIG key=value,value [key=value,value ...] [--dry-run]`.

Trains a configuration once for each combination of the values, one run after another, and compares the runs at the end.
A list is one value: data.paths=[a.txt,b.txt],[c.txt] are two. Each run is one of `gangway run`, in STORAGE/NAME-key-value, where
what a name cannot have becomes '-', with a digest behind it.
The same command again continues where it was stopped: what has finished is not trained again. A run that fails is named, and the
others still run. Ctrl-C and SIGTERM save and stop the present run, and no further one begins.
Exit status: 0 all have finished; 1 one has failed; 2 a configuration is wrong, and nothing has begun; 3 stopped on request, state
saved.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gangway.config.yaml_source import ConfigError, shown_override
from gangway.first_line import say
from gangway.program import command, parser
from gangway.terminal import OF_AN_END, arrived, handling
from orchestrator.config.job import JobConfig, load, shown, to_dict
from orchestrator.config.locate import REFUSALS
from orchestrator.run_state.outcome import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, finished_at
from orchestrator.runs import compare

RUN = ("-m", "orchestrator.run")
"""The program of a run, for Python."""
VALUE = r"""((?:(?<!\w)(?:"[^"]*"|'[^']*')|\[(?:[^\[\]]|\[[^\[\]]*\])*\]|\{[^{}]*\}|[^,])*),"""
"""One of several values, and the comma after it: those in brackets and in quotes are parts of a value. Within a word, as in
`it's`, a quote is a letter."""
Runs = dict[tuple[str, ...], JobConfig]
"""By their overrides, of which the last is the name."""


@command(*REFUSALS)
def main(argv: Sequence[str] | None = None) -> int:
    made = parser("orchestrator.commands.sweep", __doc__, example="config.yaml optimizer.learning_rate=1e-3,3e-4 seed=1,2")
    made.add_argument("config", help="a YAML file, such as configs/tiny.yaml")
    made.add_argument("overrides", nargs="*", metavar="key=value,value", help="such as seed=1,2; one value is for all runs")
    made.add_argument("--dry-run", action="store_true", help="list the runs, take no machine")
    options = made.parse_intermixed_args(argv)
    say(f"reading {options.config}", stream=sys.stderr if options.dry_run else sys.stdout)
    runs = runs_of(options.config, options.overrides)
    if not options.dry_run:
        return train(options.config, runs)
    for overrides, config in runs.items():
        step = finished_at(config.run_dir, shown(config))
        print(config.run_dir, *map(shown_override, overrides[:-1]), "" if step is None else f"# finished at step {step:,}")
    return EXIT_FINISHED if arrived() else EXIT_FAILED


def runs_of(path: str, given: Sequence[str]) -> Runs:
    """Returns the runs of a sweep. Raises ConfigError with what is wrong with all of them."""
    choices = [choices_of(item) for item in given]
    runs, problems, seen = Runs(), dict[str, str](), set[str]()
    for combination in itertools.product(*choices):
        swept = [item for item, choice in zip(combination, choices, strict=True) if len(choice) > 1]
        wrong = ["a comma has no value beside it; write null for none"] * any(not item.partition("=")[2] for item in swept)
        try:
            overrides = (*combination, f"name={name_of(load(path, combination).training.name, swept)}")
            config = runs[overrides] = load(path, overrides)
            # Some disks do not tell capital letters from small ones.
            marks = {config.run_dir.casefold(), str({**to_dict(config), **dict.fromkeys(compare.NOT_COMPARED)})}
            wrong += ["the same settings as another run; give each value once"] * bool(marks & seen)
            seen |= marks
            wrong += ["no key has several values, such as seed=1,2; for one run there is gangway run"] * (not swept)
        except ConfigError as error:
            wrong += error.problems
        for problem in wrong:
            problems.setdefault(problem, f" (first with {' '.join(map(shown_override, swept))})" if swept else "")
    if problems:
        raise ConfigError(path, map("".join, problems.items()))
    return runs


def choices_of(item: str) -> list[str]:
    """Returns `key=value` for each value of `key=value,value`."""
    key, equals, text = item.partition("=")
    return [f"{key}{equals}{value.strip()}" for value in re.findall(VALUE, f"{text},")]


def name_of(base: str, swept: Sequence[str]) -> str:
    """Returns the name of a run of a sweep, by its values: one that a run may have. It is the same whatever the others are."""
    told = "-".join(re.sub(r"^(?:[^=]*\.)?([^=]*)=", r"\1-", shown_override(item)) for item in swept)
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", told)[:100]  # a folder's name has at most 255 bytes
    return f"{base}-{safe}" if safe == told else f"{base}-{safe}-{hashlib.sha256(' '.join(swept).encode()).hexdigest()[:8]}"


def train(path: str, runs: Runs) -> int:
    """Trains one run after another, and compares those that have finished. Returns the exit status."""
    with passing_on() as (asked, children):
        for overrides, config in runs.items():
            print(f"\nrun {len(children) + 1} of {len(runs)}: {config.training.name}", flush=True)
            # In a session of its own: it would get the Ctrl-C of a terminal twice, which ends it at once.
            children.append(subprocess.Popen([sys.executable, *RUN, path, *overrides], start_new_session=True))
            if asked:  # while it was being started
                children[-1].terminate()
            children[-1].wait()
            if asked:
                break
    # Before it had begun to train, a run that is asked to stop ends by the signal itself.
    fine = (EXIT_FINISHED, EXIT_STOPPED, *((128 + signal.SIGTERM, -signal.SIGTERM) if asked else ()))
    ended = [(config, child.returncode) for config, child in zip(runs.values(), children, strict=False)]
    finished = [config.run_dir for config, status in ended if status == EXIT_FINISHED]
    failed = [f"{config.training.name} (exit status {status})" for config, status in ended if status not in fine]
    if len(finished) > 1 and not asked:
        print(flush=True)
        compare.tell({run: settings for run_dir in finished for run, settings in compare.named(run_dir).items()})
    if failed:
        print(f"error: {len(failed)} of {len(runs)} runs failed: {', '.join(failed)}", file=sys.stderr)
        return EXIT_FAILED
    if len(finished) < len(runs):
        print(
            f"stopped: {len(finished)} of {len(runs)} runs have finished; the same command continues the others", file=sys.stderr
        )
    return EXIT_FINISHED if len(finished) == len(runs) else EXIT_STOPPED


@contextmanager
def passing_on() -> Iterator[tuple[list[int], list[subprocess.Popen]]]:
    """Passes signals that ask for an end on to the last child, as SIGTERM, by which it saves and stops. Yields the signals that
    have come, and the children."""
    asked, children = list[int](), list[subprocess.Popen]()

    def pass_on(number: int, frame: Any) -> None:
        # In a session without a terminal SIGHUP is ignored. SIGINT is an error of Python that begins, before a run can take it.
        asked.append(number)
        for child in children[-1:]:
            child.terminate()

    with handling(pass_on, *OF_AN_END):
        yield asked, children


if __name__ == "__main__":
    sys.exit(main())
