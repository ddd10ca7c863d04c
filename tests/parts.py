"""Runs the parts of the tests at once: `python -m tests.parts WORKERS [pytest's options]`, as the targets of the Makefile do.

The part without Ray takes WORKERS files at a time. The two parts with Ray run beside it, each one file after the other: they
wait more than they compute. What they write is shown when the first part has ended. With 0 workers, one part runs after the
other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

WITHOUT_RAY = ("tests/unit", "tests/multihost")
_BUCKETS, _CLUSTER = "tests/faults/test_buckets.py", "tests/ray/test_machines_of_your_own.py"
WITH_RAY = {
    "ray": ("tests/ray", _BUCKETS, f"--ignore={_CLUSTER}"),
    "faults": ("tests/faults", _CLUSTER, f"--ignore={_BUCKETS}"),
}
"""Each a part of its own, with what pytest is given. Two files have changed sides: so both end at about the same time."""
SHOWN_LATER = Path("build/tests")
NO_TESTS = 5
"""Pytest's exit status where the options have chosen no test of a part."""


def main(workers: str, *options: str) -> int:
    """Returns the exit status of pytest: that of the last part that failed, else 0 if any test has run."""
    without_ray = ("--numprocesses", workers, "--dist", "loadfile", "--no-loadscope-reorder", *WITHOUT_RAY, *options)
    if int(workers) == 0:
        parts = (without_ray, *((*files, *options) for files in WITH_RAY.values()))
        return status_of([wait_for(start(part)) for part in parts])
    SHOWN_LATER.mkdir(parents=True, exist_ok=True)
    outputs = [SHOWN_LATER / f"{name}.log" for name in WITH_RAY]
    beside = [start((*files, *options), output) for files, output in zip(WITH_RAY.values(), outputs, strict=True)]
    statuses = [wait_for(start(without_ray))]
    for process, output in zip(beside, outputs, strict=True):
        shown = subprocess.Popen(("tail", "-n", "+1", "-f", f"--pid={process.pid}", str(output)))
        statuses.append(wait_for(process))
        wait_for(shown)
    return status_of(statuses)


def status_of(statuses: Sequence[int]) -> int:
    """Returns the status of a run of several parts. A part that had no test to run counts only where none had."""
    failed = [status for status in statuses if status not in (0, NO_TESTS)]
    return failed[-1] if failed else min(statuses)


def start(arguments: Sequence[str], output: Path | None = None) -> subprocess.Popen[bytes]:
    """Starts pytest. It shows what it does here, or writes it into `output`."""
    command = (sys.executable, "-m", "pytest", "--durations", "10", *arguments)
    if output is None:
        return subprocess.Popen(command)
    with output.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Returns the exit status. Ctrl-C reaches pytest from the terminal too, and it ends by itself, with what it has started."""
    while True:
        with suppress(KeyboardInterrupt):
            return process.wait()


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
