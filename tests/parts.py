"""Runs the parts of the tests at once: `python -m tests.parts WORKERS [pytest's options]`, as the targets of the Makefile do.

The part without Ray takes WORKERS files at a time. The two parts with Ray run beside it, each one file after the other: they
wait more than they compute. What they write is shown when the first part has ended. With 0 workers, one part runs after the
other. Last comes every test that failed, of all the parts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

WITHOUT_RAY = ("tests/unit", "tests/multihost")
_BUCKETS, _CLUSTER = "tests/faults/test_buckets.py", "tests/ray/test_machines_of_your_own.py"
WITH_RAY = {
    "ray": ("tests/ray", _BUCKETS, f"--ignore={_CLUSTER}"),
    "faults": ("tests/faults", _CLUSTER, f"--ignore={_BUCKETS}"),
}
"""Each a part of its own, with what pytest is given. Two files have changed sides: so both end at about the same time."""
NO_HYPOTHESIS = ("-p", "no:hypothesispytest")
"""Of the parts with Ray, whose tests do not use it. Its plugin imports it when all tests have ended, and pytest then parses its
files while other threads run. A thread that prints a traceback parses too. If JAX's callback of the garbage collector lets it do
so in between, Python 3.11 raises SystemError: AST constructor recursion depth mismatch."""
FIRST = "unit"
"""The name of the part without Ray."""
RESULTS = Path("build/tests")
MESSAGE_CHARACTERS = 4_000
NO_TESTS = 5
"""Pytest's exit status where the options have chosen no test of a part."""


def main(workers: str, *options: str) -> int:
    """Returns the exit status of pytest: that of the last part that failed, else 0 if any test has run."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    without_ray = ("--numprocesses", workers, "--dist", "loadfile", "--no-loadscope-reorder", *WITHOUT_RAY, *options)
    with_ray = {name: (*files, *NO_HYPOTHESIS, *options) for name, files in WITH_RAY.items()}
    if int(workers) == 0:
        parts = {FIRST: without_ray, **with_ray}
        statuses = {name: wait_for(start(name, arguments)) for name, arguments in parts.items()}
    else:
        beside = {name: start(name, arguments, log_of(name)) for name, arguments in with_ray.items()}
        statuses = {FIRST: wait_for(start(FIRST, without_ray))}
        for name, process in beside.items():
            shown = subprocess.Popen(("tail", "-n", "+1", "-f", f"--pid={process.pid}", str(log_of(name))))
            statuses[name] = wait_for(process)
            wait_for(shown)
    for line in failures(statuses):
        print(line, flush=True)
    return status_of([*statuses.values()])


def log_of(part: str) -> Path:
    return RESULTS / f"{part}.log"


def result_of(part: str) -> Path:
    return RESULTS / f"{part}.xml"


def failures(statuses: dict[str, int]) -> Iterator[str]:
    """Yields a line for each test that failed, with its whole message, and one for a part that ended otherwise than by tests."""
    for part, status in statuses.items():
        if status in (0, NO_TESTS):
            continue
        yield f"\nThe part {part!r} ended with exit status {status}:"
        failed = [*failed_tests(result_of(part))]
        yield from failed or ["  no test of it failed; see what it wrote above"]


def failed_tests(result: Path) -> Iterator[str]:
    """Yields a line for each failure in a result of pytest. There is none where pytest did not reach its end."""
    if not result.exists():
        return
    for case in ElementTree.parse(result).iter("testcase"):
        for found in (*case.iter("failure"), *case.iter("error")):
            message = found.get("message", "")
            at = (found.text or "").strip().rpartition("\n")[2]
            yield f"  {case.get('file', case.get('classname'))}::{case.get('name')}: {message[:MESSAGE_CHARACTERS]} ({at})"


def status_of(statuses: Sequence[int]) -> int:
    """Returns the status of a run of several parts. A part that had no test to run counts only where none had."""
    failed = [status for status in statuses if status not in (0, NO_TESTS)]
    return failed[-1] if failed else min(statuses)


def start(part: str, arguments: Sequence[str], output: Path | None = None) -> subprocess.Popen[bytes]:
    """Starts pytest. It shows what it does here, or writes it into `output`."""
    result_of(part).unlink(missing_ok=True)  # an earlier run's
    result = ("--junitxml", str(result_of(part)), "--override-ini", "junit_family=xunit1")  # this form names the file
    command = (sys.executable, "-m", "pytest", "--durations", "10", *result, *arguments)
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
