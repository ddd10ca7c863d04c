"""What training costs here beside a loop by hand, in turns on this machine: `make bench`, some 16 minutes.

    python -m benchmarks.bench [ROW ...] [--torch PYTHON] [--keep]

A row is a ratio, ours to theirs: the seconds of a step of about 2 ms, 20 ms and a second (`benchmarks.by_hand`, and with
`--torch` that of `benchmarks.by_torch`), the seconds from a command to its first step with kept programs, how long training waits
for a save (raw asynchronous Orbax), and the seconds of a recovery (to those of the first step by hand). Each is compared with
benchmarks/medians.json, which `--keep` writes. Exit status 1: a row is slower than it was.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import by_hand
from benchmarks.by_hand import FIRST_STEP, TOOK, WORKLOADS

MEDIANS = Path(__file__).with_name("medians.json")
BY_TORCH = Path(__file__).with_name("by_torch.py")
NOISE = 0.03
"""A row is named if its median is larger than the kept one by more than this share. Two runs on a quiet machine differ by 1 to 4
% in steps and first steps, and by 15 % in saves and recoveries."""
STEPS = {"2 ms": (5, 3, 1000), "20 ms": (3, 5, 200), "main": (1, 5, 20)}
"""Of each workload: pairs of processes, pairs of measurements of each, and the steps of one. How fast short steps are differs by
some percent from one process to the next."""
FIRST_STEPS, SAVES, RECOVERIES = 7, 9, 9
FOR_RECOVERIES = ("tracking.mlflow=false", "max_num_steps=1500", "publish_every_steps=50", "checkpoint.save_steps=40")


class Pair(NamedTuple):
    """Seconds of the same work."""

    theirs_s: float
    ours_s: float


class Row(NamedTuple):
    name: str
    pairs: Sequence[Pair]

    def quartiles(self) -> list[float]:
        """Returns the lower quartile, the median and the upper quartile of the ratios."""
        return statistics.quantiles((pair.ours_s / pair.theirs_s for pair in self.pairs), n=4, method="inclusive")


def main(argv: Sequence[str] | None = None) -> int:
    rows: dict[str, Callable[[Path, argparse.Namespace], list[Pair]]] = {
        **{f"step of {name}": partial(steps_of, name) for name in STEPS},
        **{f"first step of {name}": partial(first_steps_of, name) for name in ("2 ms", "main")},
        "save": saves,
        "recovery": recoveries,
    }
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default: all of {', '.join(rows)}")
    parser.add_argument("--torch", metavar="PYTHON", help="the loop by hand is in torch, which this Python has")
    parser.add_argument("--keep", action="store_true", help="write the medians into benchmarks/medians.json")
    parser.add_argument("--share", type=float, default=1.0, help="of the pairs and steps of each row; default: all")
    options = parser.parse_args(argv)
    if unknown := {*options.rows} - {*rows}:
        parser.error(f"there is no row {unknown.pop()!r}: expected some of {', '.join(rows)}")
    kept: dict[str, float] = json.loads(MEDIANS.read_text())
    found, slower = {}, False
    for name in options.rows or rows:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            row = Row(name, rows[name](Path(folder), options))
        found[name] = row.quartiles()[1]
        said, is_slower = told(row, None if options.torch else kept.get(name))
        slower |= is_slower
        print(said, flush=True)
    if options.keep:
        MEDIANS.write_text(json.dumps(kept | {name: round(ratio, 3) for name, ratio in found.items()}, indent=1) + "\n")
    return int(slower)


def told(row: Row, kept: float | None) -> tuple[str, bool]:
    """Returns a line about a row, and whether it is slower than the ratio that was kept."""
    low, middle, high = row.quartiles()
    theirs_ms, ours_ms = (1000 * statistics.median(each) for each in zip(*row.pairs, strict=True))
    said = f"{row.name:<20} {middle:.3f} ({low:.3f} to {high:.3f}): {ours_ms:,.2f} ms, theirs {theirs_ms:,.2f} ms"
    if kept is None:
        return said, False
    # The quartile too: the median of a few noisy pairs may lie anywhere among them.
    slower = middle > kept * (1 + NOISE) and low > kept
    return f"{said}; it was {kept:.3f}{', SLOWER' if slower else ''}", slower


def share_of(number: int, options: argparse.Namespace) -> int:
    return max(2, int(options.share * number))  # quartiles need two


def steps_of(workload: str, folder: Path, options: argparse.Namespace) -> list[Pair]:
    """The seconds of a step, by several pairs of processes."""
    num_processes, num_pairs, steps = STEPS[workload]
    pairs: list[Pair] = []
    for _ in range(math.ceil(options.share * num_processes)):
        pairs += turns_of(workload, folder, options, share_of(num_pairs, options), share_of(steps, options))
    return pairs


def turns_of(workload: str, folder: Path, options: argparse.Namespace, num_pairs: int, steps: int) -> list[Pair]:
    """The seconds of a step in long turns of two processes, which both wait while the other one trains."""
    with ExitStack() as ended:
        both = [
            ended.enter_context(started(command, line, folder / name))[0]
            for name, command, line in (by_hand_in(folder, workload, options.torch), ours_in(folder, workload))
        ]
        for process in both:
            seconds_of(process, by_hand.WARM_UP_STEPS)
        pairs = []
        for number in range(num_pairs):
            # Each comes first in every other pair: what a machine does besides is shared out.
            order = both[:: -1 if number % 2 else 1]
            took_s = {process.pid: seconds_of(process, steps) / steps for process in order}
            pairs.append(Pair(*(took_s[process.pid] for process in both)))
    return pairs


def first_steps_of(workload: str, folder: Path, options: argparse.Namespace) -> list[Pair]:
    """The seconds from the start of a command to the end of its first step. Programs are kept of a launch before."""
    theirs = by_hand_in(folder, workload, options.torch)
    pairs = []
    for _ in range(1 + share_of(FIRST_STEPS, options)):
        seconds = []
        for name, command, line in (theirs, ours_in(folder, workload)):
            with started(command, line, folder / name) as (_, took_s):
                seconds.append(took_s)
        pairs.append(Pair(*seconds))
    return pairs[1:]


def saves(folder: Path, options: argparse.Namespace) -> list[Pair]:
    count = share_of(SAVES, options)
    millions = 17 if options.share == 1 else 1
    asked = ["--millions", f"{millions}", "--rounds", f"{count}", "--json", str(folder / "saves.json")]
    command = [sys.executable, "-m", "benchmarks.saves", *asked]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rounds = json.loads((folder / "saves.json").read_text())
    return [Pair(each["orbax_held"], each["ours_held"]) for each in rounds]


def recoveries(folder: Path, options: argparse.Namespace) -> list[Pair]:
    name, command, line = by_hand_in(folder, "2 ms", options.torch)
    for _ in range(2):
        with started(command, line, folder / name) as (_, theirs_s):
            pass
    count = share_of(RECOVERIES, options)
    chaos = ["orchestrator.chaos", "configs/tiny.yaml", "--faults", "process", "--count", f"{count}", "--seed", "1"]
    score = folder / "score.json"
    subprocess.run(
        [sys.executable, "-m", *chaos, "--json", str(score), f"storage={folder}", *FOR_RECOVERIES],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return [Pair(theirs_s, ours_s) for ours_s in json.loads(score.read_text())["recovery_s"]["process"]]


def by_hand_in(folder: Path, workload: str, torch: str | None) -> tuple[str, list[str], str]:
    """Returns a name, a command, and how the line begins that it prints after its first step."""
    if torch is None:
        return "by hand", [sys.executable, "-m", "benchmarks.by_hand", "--workload", workload], FIRST_STEP
    by_hand.write(WORKLOADS[workload], folder)
    return "by torch", [torch, str(BY_TORCH), str(folder)], FIRST_STEP


def ours_in(folder: Path, workload: str) -> tuple[str, list[str], str]:
    load = WORKLOADS[workload]
    sections: dict[str, Mapping[str, object]] = {
        "model": load.model_settings(),
        "data": {"sequence_length": load.time},
        "optimizer": {"learning_rate": by_hand.LEARNING_RATE, "max_grad_norm": by_hand.MAX_NORM},
        "evaluation": {"max_batches": 1},
        "checkpoint": {"save_at_end": False},
    }
    settings = [f"{section}.{key}={json.dumps(value)}" for section, pairs in sections.items() for key, value in pairs.items()]
    settings += ["trainer=benchmarks.paced:PacedTrainer", f"global_batch_size={load.batch}", "max_num_steps=100000000"]
    config = folder / "config.yaml"
    config.write_text("{}\n")
    settings += [f"storage={folder / 'runs'}", f"name=launch-{time.time_ns()}"]  # no run goes on from the one before
    return "ours", [sys.executable, "-m", "trainers.run", str(config), *settings], FIRST_STEP


@contextmanager
def started(command: Sequence[str], line: str, cache: Path) -> Iterator[tuple[subprocess.Popen[str], float]]:
    """Yields a process that has printed this line, and the seconds that this took. Compiled programs are kept in `cache`."""
    env = {
        **os.environ,
        "GANGWAY_PROGRAMS": str(cache / "programs"),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    began_s = time.perf_counter()
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    ) as process:
        try:
            read_to(process, line)
            yield process, time.perf_counter() - began_s
        finally:
            process.kill()


def seconds_of(process: subprocess.Popen[str], steps: int) -> float:
    assert process.stdin is not None
    process.stdin.write(f"{steps}\n")
    return float(read_to(process, TOOK).split()[1])


def read_to(process: subprocess.Popen[str], beginning: str) -> str:
    """Returns the next line that begins so."""
    printed = []
    for line in process.stdout or ():
        printed.append(line)
        if line.startswith(beginning):
            return line
    raise SystemExit(f"{process.args!r} ended with {process.wait()}, and printed:\n{''.join(printed)}")


if __name__ == "__main__":
    sys.exit(main())
