"""The protocol for the first accelerator: all that must be measured on one machine with GPUs or TPUs, unattended, in 25 minutes.

    python -m benchmarks.accelerator [key=value ...] [--out accelerator] [--minutes 25] [--retry] [--small]

Nothing but the trainer is needed: no Ray, no MLflow. Each measurement runs in a process of its own with a limit of its own; one
that fails, or runs out of memory, is recorded as that, and the next one begins. `OUT/results.json` has each result as soon as it
is there. The same command goes on with what is missing, `--retry` also with what failed. The table at the end, which is
`OUT/table.md` too, is for docs/benchmarks.md. `key=value` changes the configuration of every run, such as `model.remat=full`.
`--small` is the same with a tiny model, for a test on a CPU.
Exit status: 0 all is measured; 1 something failed, or no time was left for it; 2 the results in OUT are of something else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import accelerator_table
from benchmarks.accelerator_measures import Context, Measurement, measurements
from gangway.foreign_errors import OUT_OF_MEMORY_SIGNS
from gangway.storage.documents import read_json, write_json, write_text
from gangway.surroundings import end_with_parent

EXIT_DONE, EXIT_MISSING, EXIT_REFUSED = 0, 1, 2
DONE, FAILED, OUT_OF_MEMORY, TIMED_OUT = "done", "failed", "out of memory", "timed out"
ERROR_SHOWN = 2000
SAME_DEVICE = ("kind", "count", "versions", "xla_flags", "commit")
"""What must be alike of all starts whose results are in one table."""
GPU_MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
"""Of a GPU that JAX may have; its default, 0.75, is for machines with a screen."""
LEAST_S = 20.0
"""No measurement begins with less time left."""
PATIENCE_WITH_TESTS = 10
"""By how much limits are longer with `--small`: tests run on machines that are busy with others."""
Record = dict[str, Any]


class OfSomethingElse(Exception):
    """The results that are there were measured with other settings, or on another machine."""


class Results:
    """What was measured, in a file that is written after each measurement."""

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        self.path, self.settings = path, dict(settings)
        self.records: dict[str, Record] = {}
        if path.exists():
            found: dict[str, Any] = read_json(path) or {}
            if found["settings"] != self.settings:
                raise OfSomethingElse(
                    f"{path} has results of {found['settings']}, and these would be of {self.settings}: take another --out"
                )
            self.records = found["measurements"]

    def add(self, name: str, record: Record) -> None:
        self.records[name] = record
        write_json(self.path, {"settings": self.settings, "measurements": self.records})

    def add_device(self, record: Record) -> None:
        """Adds what was found of the device at this start. Raises OfSomethingElse if the other results are of another one."""
        before = self.device
        if before is not None and record["status"] == DONE:
            now = record["result"]
            for name in SAME_DEVICE:
                if now[name] != before[name]:
                    raise OfSomethingElse(
                        f"{self.path} has results of {name} = {before[name]!r}, and here it is {now[name]!r}: take another --out"
                    )
        self.add("device", record)

    def forget_failed(self) -> None:
        self.records = {name: record for name, record in self.records.items() if record["status"] == DONE}

    @property
    def device(self) -> dict[str, Any] | None:
        record = self.records.get("device", {})
        return record["result"] if record.get("status") == DONE else None


def main() -> int:
    options = parse(sys.argv[1:])
    if options.measure is not None:
        end_with_parent()
        return measure_here(options)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        results = Results(options.out / "results.json", {"small": options.small, "overrides": options.overrides})
    except OfSomethingElse as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    if options.retry:
        results.forget_failed()

    def run(measurement: Measurement, limit_s: float) -> Record:
        answer = ["--measure", measurement.name, "--out", str(options.out), *options.overrides]
        command = [sys.executable, "-m", "benchmarks.accelerator", *answer, *(["--small"] if options.small else [])]
        return in_child(command, options.out, limit_s)

    try:
        left = measure_all(options.small, results, run, deadline_s=time.monotonic() + 60 * options.minutes)
    except OfSomethingElse as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    table = accelerator_table.table(results.records)
    write_text(options.out / "table.md", table)
    print(f"\n{table}")
    if left:
        print(f"\nno time was left for: {', '.join(left)}; the same command goes on with it")
    failed = any(record["status"] != DONE for record in results.records.values())
    return EXIT_MISSING if left or failed else EXIT_DONE


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every run, such as model.remat=full")
    parser.add_argument("--out", type=Path, default=Path("accelerator"), help="the folder of the results")
    parser.add_argument("--minutes", type=float, default=25.0, help="nothing goes on for longer; default: 25")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--small", action="store_true", help="a tiny model, for a test on a CPU")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(argv)
    if wrong := [word for word in options.overrides if "=" not in word]:
        parser.error(f"{wrong[0]}: expected settings as key=value")
    return options


def measure_all(
    small: bool,
    results: Results,
    run: Callable[[Measurement, float], Record],
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Measures what the results do not have. Returns the names of those for which there was no time."""
    # At each start: the results that are there may be of another machine.
    (of_device,) = measurements(small, None)
    results.add_device(told(of_device, run, of_device.limit_s * (PATIENCE_WITH_TESTS if small else 1)))
    left = []
    # Without the device nothing else can be asked for.
    for measurement in measurements(small, results.device) if results.device is not None else ():
        if measurement.name in results.records:
            continue
        time_left_s = deadline_s - clock()
        if time_left_s < LEAST_S:
            left.append(measurement.name)
            continue
        own_s = measurement.limit_s * (PATIENCE_WITH_TESTS if small else 1)
        limit_s = min(own_s, time_left_s)
        record = told(measurement, run, limit_s)
        if record["status"] == TIMED_OUT and limit_s < own_s:
            left.append(measurement.name)  # not its own limit: it is measured anew at the next start
        else:
            results.add(measurement.name, record)
    return left


def told(measurement: Measurement, run: Callable[[Measurement, float], Record], limit_s: float) -> Record:
    print(f"{measurement.name} ...", end=" ", flush=True)
    began_s = time.monotonic()
    record = run(measurement, limit_s) | {"seconds": round(time.monotonic() - began_s, 1)}
    print(f"{record['status']} after {record['seconds']:.1f} s{of_error(record)}", flush=True)
    return record


def of_error(record: Record) -> str:
    """Returns the last line of an error, which says what it was."""
    lines = record.get("error", "").strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""


def in_child(command: list[str], folder: Path, limit_s: float) -> Record:
    """Runs a command that writes a JSON document to `answer.json` in the folder. Whatever it has started is ended with it."""
    answer, log = folder / "answer.json", folder / "measurement.log"
    answer.unlink(missing_ok=True)
    with open(log, "w") as printed:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=GPU_MEMORY | os.environ,
        )
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill_group(child)
    tail = log.read_text(errors="replace")[-ERROR_SHOWN:].strip()
    if status is None:
        return {"status": TIMED_OUT, "error": f"not done after {limit_s:.0f} s: {tail}"}
    if status == 0 and answer.exists():
        result = json.loads(answer.read_text())
        answer.unlink()
        return {"status": DONE, "result": result}
    ran_out = any(sign in tail.lower() for sign in OUT_OF_MEMORY_SIGNS)
    return {"status": OUT_OF_MEMORY if ran_out else FAILED, "error": f"exit status {status}: {tail}"}


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a group, and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def measure_here(options: argparse.Namespace) -> int:
    """Measures one thing in this process, and writes what was found where the parent looks for it."""
    results = Results(options.out / "results.json", {"small": options.small, "overrides": options.overrides})
    device = None if options.measure == "device" else results.device
    (measurement,) = (one for one in measurements(options.small, device) if one.name == options.measure)
    # Beside the results: /tmp may be memory.
    folder = Path(tempfile.mkdtemp(prefix="measurement-", dir=options.out))
    try:
        context = Context(options.small, tuple(options.overrides), folder, options.out, device or {})
        write_json(options.out / "answer.json", measurement.measure(context))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
