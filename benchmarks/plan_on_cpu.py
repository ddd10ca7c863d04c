"""The time of a step that a plan predicts on this CPU, beside that of the run: `python -m benchmarks.plan_on_cpu [CONFIG ...]`.

In turns: a trial, the run, a trial again. Of the run the fastest interval between two publishes counts, and of the trials the
fastest window: whatever else the machine does makes both slower. The ratio says nothing on a machine that is busy all the time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CONFIGS = ("configs/tiny.yaml", "configs/quickstart.yaml", "configs/quickstart.yaml model.width=384 model.num_layers=6")
# Not shorter: in the first half minute the standbys import beside the training.
SHORT = (
    *("tracking.mlflow=false", "max_num_steps=1000000", "time_limit=45s", "publish_every_steps=6", "evaluation.every_steps=null"),
    *("evaluation.max_batches=1", "checkpoint.save_steps=1000", "previews=null", "driver.precompile=false"),
)
AT_LIMIT = 3
"""The exit status of a run that its time limit has ended."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="*", default=CONFIGS, help="a file, or a file and settings in one word")
    for config in parser.parse_args().configs:
        with tempfile.TemporaryDirectory() as storage:
            words = [*config.split(), *SHORT, f"storage={storage}"]
            before, times, after = predicted(words), measured(words, Path(storage)), predicted(words)
        trial, run = min(before[0], after[0]), min(times)
        print(
            f"{config}: predicted {trial:.4g} s ({before[0]:.4g} before, {after[0]:.4g} after; slowest window "
            f"{max(before[1], after[1]):.4g}), measured {run:.4g} s (median {statistics.median(times):.4g}), "
            f"ratio {trial / run:.2f}, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def predicted(words: list[str]) -> Any:
    """Returns the seconds of the fastest and of the slowest window of a trial."""
    done = subprocess.run([sys.executable, "-m", "orchestrator.plan", *words, "--json"], capture_output=True, check=True)
    return json.loads(done.stdout)["step_s_range"]


def measured(words: list[str], storage: Path) -> list[float]:
    """Returns the seconds of a step between publishes of a run, without the first two, in which programs are loaded."""
    done = subprocess.run([sys.executable, "-m", "orchestrator.run", *words], capture_output=True, check=False)
    if done.returncode != AT_LIMIT:
        raise SystemExit(done.stderr.decode() or done.stdout.decode())
    (metrics,) = storage.glob("*/tracking/metrics.jsonl")
    published = [json.loads(line).get("metrics", {}) for line in metrics.read_text().splitlines()]
    return [one["step_time_s"] for one in published if "step_time_s" in one][2:]


if __name__ == "__main__":
    main()
