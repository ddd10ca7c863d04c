"""What the training notices of its driver's death: the time of every step before, while there is no driver, and after.

    python benchmarks/driver_failover.py [--config configs/tiny.yaml] [--kills 3]

SIGKILLs the driver of a real local job under Ray Train, several times, and compares the steps of the seconds without a driver
with those of as many seconds before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from trainers.base import BaseTrainer  # noqa: E402
from trainers.callbacks import Callback, RunInfo  # noqa: E402

TIMES_VARIABLE = "STEP_TIMES"
QUANTILES = {"median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}
SETTLE_S = 15.0
"""Between the start, or a new driver, and the next kill."""


class StepTimes(Callback):
    """Writes down when host 0 had dispatched each step; the loop runs two steps ahead at most."""

    def __init__(self) -> None:
        self.file = open(os.environ[TIMES_VARIABLE], "a", buffering=1)  # noqa: SIM115 - until the process ends

    def on_step_end(self, state: RunInfo, **kwargs: Any) -> None:
        self.file.write(f"{state.batch_index} {time.time()}\n")


class TimedTrainer(BaseTrainer):
    def train(self, *args: Any, **kwargs: Any) -> Any:
        import jax

        if jax.process_index() == 0:
            self.add_callback(StepTimes())
        return super().train(*args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "configs" / "tiny.yaml"))
    parser.add_argument("--kills", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments.config, arguments.kills, Path(folder))


def measure(config: str, kills: int, folder: Path) -> None:
    times = folder / "times"
    run_dir = folder / "failover"
    settings = [f"storage={folder}", "name=failover", "tracking.mlflow=false", "driver.supervise=true", "max_num_steps=1000000"]
    settings += [
        "checkpoint.save_steps=100000",
        "trainer=benchmarks.driver_failover:TimedTrainer",
        f"hosts.env.{TIMES_VARIABLE}={times}",
    ]
    command = [sys.executable, "-m", "orchestrator.run", config, *settings]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait(lambda: len(read(times)) > 100)
        for number in range(kills):
            time.sleep(SETTLE_S)
            killed_s = time.time()
            os.kill(json.loads((run_dir / "lease.json").read_text())["pid"], signal.SIGKILL)
            wait(lambda number=number: len(driver_losses(run_dir)) > number)
            adopted_s = time.time()
            time.sleep(2)
            show(read(times), killed_s, adopted_s, driver_losses(run_dir)[-1])
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(120)


def wait(condition: Callable[[], Any], timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit("the run did not get there in time")
        time.sleep(0.1)


def driver_losses(run_dir: Path) -> list[dict[str, Any]]:
    state = json.loads((run_dir / "launch.json").read_text())
    return [incident for incident in state["incidents"] if incident["kind"] == "driver_lost"]


def read(path: Path) -> list[tuple[int, float]]:
    if not path.exists():
        return []
    return [(int(step), float(at_s)) for step, at_s in (line.split() for line in path.read_text().splitlines())]


def show(times: list[tuple[int, float]], killed_s: float, adopted_s: float, incident: dict[str, Any]) -> None:
    steps = [step for step, _ in times]
    again = len(steps) - len(set(steps))
    gone_s = adopted_s - killed_s
    print(f"driver gone for {gone_s:.1f} s; action {incident['action']}; steps trained twice: {again}; missing: {missing(steps)}")
    for name, begin_s, end_s in (("before", killed_s - gone_s, killed_s), ("without a driver", killed_s, adopted_s)):
        taken = [b - a for (_, a), (_, b) in itertools.pairwise(times) if begin_s < b <= end_s]
        ordered = sorted(taken)
        at = {name: 1e3 * ordered[min(len(ordered) - 1, int(q * len(ordered)))] for name, q in QUANTILES.items()}
        shown = ", ".join(f"{name} {ms:.1f}" for name, ms in at.items())
        print(f"  {name:17}{len(taken):5} steps, ms: {shown}; mean {1e3 * statistics.mean(taken):.1f}")


def missing(steps: list[int]) -> int:
    return max(steps) - min(steps) + 1 - len(set(steps))


if __name__ == "__main__":
    main()
