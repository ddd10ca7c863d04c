"""Runs the tests: `python -m tests.run TIER ... [--workers 4] [pytest's options]`, as the targets of the Makefile do.

A tier says which tests: `test` is what every commit passes, `changed` the slow tests that a change can reach, and a fifth of the
others, as far as SLOW_BUDGET_S goes, `all` every test. All go through one pool of workers, one file at a time, the dearest first.
Last come the cost of the run, the files above their ceilings, and every test that failed, with its whole message."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from tests import ROOT, costs, fuzz, ledger, reach
from tests.compile_cache import MAX_BYTES, delete_oldest
from tests.environment import PYTEST, cache_folder
from tests.process_tree import Meter

RESULTS = Path("build/tests")
RESULT = RESULTS / "result.xml"
SLOW_FILES = RESULTS / "slow_files.txt"
MESSAGE_CHARACTERS = 4_000
NUM_WORKERS = 4
"""Twice the cores: tests of whole jobs wait more than they compute."""
SLOW_BUDGET_S = 1_500.0
"""What the slow tests of one change may cost, in CPU-seconds of the ceilings: with `make test`, half an hour of two cores. A
change that reaches more runs them in parts, another part at the next commit."""
ENDED = (0, 1)
"""Exit statuses of pytest with which it has run every test: all passed, some failed."""
TIERS = ("test", "changed", "all")
OF_DOCUMENTS = ("code_blocks", "docs", "links", "commands", "pages", "migrating", "troubleshooting", "documented_metrics")
"""Files of tests that read the documents, by a part of their names."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: pytest's, or 1 if a file costs more than it may."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__, allow_abbrev=False)
    parser.add_argument("tiers", nargs="+", choices=TIERS, metavar="TIER", help=" or ".join(TIERS))
    parser.add_argument("--workers", type=int, default=NUM_WORKERS, help="0: one test after the other, in one process")
    options, of_pytest = parser.parse_known_args(arguments)
    RESULTS.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(ledger.FOLDER, ignore_errors=True)
    whole = not of_pytest  # only then are there ceilings, and is anything proved
    changed = reach.changed_files() if "changed" in options.tiers else None
    selection = selected(options.tiers, changed)
    delete_oldest(cache_folder(os.environ).parent, MAX_BYTES)
    if "all" in options.tiers:
        os.environ.setdefault(fuzz.SEED, f"{date.today():%Y%m%d}")
        print(f"random cases are drawn by the seed of the day, {os.environ[fuzz.SEED]}", flush=True)
    yardstick_s = costs.measured_yardstick_s() if whole else None
    meter, started_s = Meter(), time.monotonic()
    before_s = meter.read().total()
    status = run_pytest(selection, options.workers, of_pytest)
    cpu_s, wall_s = meter.read().total() - before_s, time.monotonic() - started_s
    for line in failures(status):
        print(line, flush=True)
    if yardstick_s is None:
        return status
    print("\n".join(costs.summary(cpu_s, wall_s, yardstick_s)), flush=True)
    too_dear = [*costs.too_dear(options.tiers, cpu_s, yardstick_s)] if status == 0 else []
    for complaint in too_dear:
        print(complaint, flush=True)
    failed = failed_files(RESULT) if status else set[str]()
    if status in ENDED and options.tiers == ["all"] and not too_dear and failed is not None:
        print(reach.prove(failed), flush=True)
    return status or bool(too_dear)


def selected(tiers: Sequence[str], changed: Sequence[str] | None) -> tuple[str, ...]:
    """Returns pytest's arguments for the tiers: files, and of which of them the slow tests are run."""
    if "all" in tiers:
        return ()
    if "changed" not in tiers:
        return ("-m", "not slow")
    if reach.documents_alone(changed):
        return tuple(file for file in reach.test_files() if any(word in file for word in OF_DOCUMENTS))
    SLOW_FILES.write_text("\n".join(affordable(reach.chosen(changed), changed or (), reach.number_of_commits())))
    return (f"--slow-of={SLOW_FILES}", *(() if "test" in tiers else ("-m", "slow")))


def affordable(chosen: Sequence[str], changed: Sequence[str], turn: int) -> list[str]:
    """Returns the files of tests that have their turn, and those that have themselves been changed, or are not proved."""
    edited = {*changed, *reach.unproved()} & {*chosen}
    left_s = max(SLOW_BUDGET_S / 3, SLOW_BUDGET_S - sum(costs.slow_s(edited).values()))
    parts = costs.parts([file for file in chosen if file not in edited], left_s)
    if len(parts) > 1:
        part = f"part {turn % len(parts) + 1} of {len(parts)}"
        print(
            f"this change reaches slow tests of more than {SLOW_BUDGET_S:.0f} CPU-s: {part} is run, another at the next commit. "
            "`make test-all` runs all, and tests/proved.toml then names the commit",
            flush=True,
        )
    return sorted({*parts[turn % len(parts)], *edited})


def run_pytest(selection: Sequence[str], num_workers: int, options: Sequence[str]) -> int:
    RESULT.unlink(missing_ok=True)  # an earlier run's
    result = ("--junitxml", str(RESULT), "--override-ini", "junit_family=xunit1")  # this form names the file
    command = (*PYTEST, *result, f"--pool={num_workers}", *selection, *options)
    return wait_for(subprocess.Popen(command, cwd=ROOT, env=dict(os.environ)))


def failures(status: int) -> Iterator[str]:
    """Yields a line for each test that failed, with its whole message, and one for a run that ended otherwise than by tests."""
    if status not in (0, 5):
        yield f"\nThe tests ended with exit status {status}:"
        yield from [*failed_tests(RESULT)] or ["  no test failed; see what was written above"]


def failed_tests(result: Path) -> Iterator[str]:
    """Yields a line for each failure in a result of pytest. There is none where pytest did not reach its end."""
    if not result.exists():
        return
    for case in ElementTree.parse(result).iter("testcase"):
        for found in (*case.iter("failure"), *case.iter("error")):
            message = found.get("message", "")
            at = (found.text or "").strip().rpartition("\n")[2]
            yield f"  {case.get('file', case.get('classname'))}::{case.get('name')}: {message[:MESSAGE_CHARACTERS]} ({at})"


def failed_files(result: Path) -> set[str] | None:
    """Returns the files of the tests that failed. None: pytest did not reach its end, or a file could not be read."""
    if not result.exists():
        return None
    cases = ElementTree.parse(result).iter("testcase")
    files = {case.get("file", "") for case in cases if [*case.iter("failure"), *case.iter("error")]}
    return files if files and all(files) else None


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Returns the exit status. Ctrl-C reaches pytest from the terminal too, and it ends by itself, with what it has started."""
    while True:
        with suppress(KeyboardInterrupt):
            return process.wait()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
