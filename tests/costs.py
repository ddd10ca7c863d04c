"""What the tests cost, from the ledger of the newest run, and the ceilings that hold it: `tests/costs.json`.

    python -m tests.costs             # the newest run: by cause, by file, by test
    python -m tests.costs ceilings    # writes tests/costs.json from the runs that build/tests/costs holds

Ceilings are CPU-seconds of a machine whose yardstick is that of tests/costs.json. Those of another machine are multiplied by the
ratio of the two yardsticks before they are compared."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tests import ROOT, ledger
from tests.ceilings import Raise, in_force
from tests.environment import LEDGER, PYTEST
from tests.ledger import SHARED, cpu_s, file_of
from tests.reach import test_files

CEILINGS = ROOT / "tests" / "costs.json"
KEPT = ROOT / "build" / "tests" / "costs"
"""A file for each whole run: what each file of tests cost."""
ROOM, ROOM_S = 1.25, 2.0
"""What a file may cost above the median of the runs that its ceiling was made of: noise."""
MAX_SLOWNESS = 1.5
"""So much slower than the ceilings' a machine may be, for the ceilings to hold on it as they are."""
NUM_CORES = os.cpu_count() or 1


def measured_yardstick_s() -> float:
    command = (sys.executable, "-m", "tests.yardstick")
    return float(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def read_ceilings() -> dict[str, Any]:
    return json.loads(CEILINGS.read_text())


def base_rows(table: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of tests/costs.json by row: `tier test`, and `tests/unit/test_docs.py: fast`."""
    tiers = {f"tier {tier}": seconds for tier, seconds in table["tiers"].items()}
    return tiers | {f"{file}: {which}": seconds for file, row in table["files"].items() for which, seconds in row.items()}


def raises(table: Mapping[str, Any]) -> list[Raise]:
    return [Raise(**entry) for entry in table.get("raises", ())]


def rows_in_force(table: Mapping[str, Any]) -> dict[str, float]:
    return in_force(base_rows(table), raises(table))


def factor(yardstick_s: float) -> float:
    """Returns by what a measured second is multiplied to be one of the ceilings' machine."""
    return float(read_ceilings()["yardstick_s"]) / yardstick_s


def by_file(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the seconds of each file of tests, `fast` and `slow`."""
    files: dict[str, dict[str, float]] = defaultdict(lambda: {"fast": 0.0, "slow": 0.0})
    for line in lines:
        if line["test"] != SHARED:
            files[file_of(line["test"])]["slow" if line.get("slow") else "fast"] += cpu_s(line)
    return dict(files)


def summary(run_cpu_s: float, wall_s: float, yardstick_s: float) -> Iterator[str]:
    """Yields what a run cost, and keeps it for `ceilings`."""
    lines = [*ledger.read()]
    told_s = sum(map(cpu_s, lines))
    shared_s = sum(cpu_s(line) for line in lines if line["test"] == SHARED)
    ratio = factor(yardstick_s)
    KEPT.mkdir(parents=True, exist_ok=True)
    about = {"cpu_s": run_cpu_s, "wall_s": wall_s, "yardstick_s": yardstick_s, "files": by_file(lines)}
    (KEPT / f"{time.time():.0f}.json").write_text(json.dumps(about))
    yield (
        f"\nThe run took {wall_s / 60:.1f} min and {run_cpu_s:.0f} CPU-s, {run_cpu_s * ratio:.0f} by the yardstick; "
        f"{run_cpu_s / wall_s / NUM_CORES:.0%} of {NUM_CORES} cores were in use."
    )
    yield f"The ledger has {told_s:.0f} of them, {shared_s:.0f} shared by all tests; `make costs` shows where they went."


def too_dear(tiers: Sequence[str], run_cpu_s: float, yardstick_s: float) -> Iterator[str]:
    """Yields a complaint for each file, and tier, that costs more than it may. A file has a second try, alone."""
    ceilings, ratio = rows_in_force(read_ceilings()), factor(yardstick_s)
    # On a machine that is much slower, what waits by looking costs more than the yardstick says.
    room = max(1.0, 1 / (ratio * MAX_SLOWNESS))
    ceilings = {row: ceiling_s * room for row, ceiling_s in ceilings.items()}
    for file, seconds in sorted(by_file(ledger.read()).items()):
        ceiling_s = ceilings.get(f"{file}: {'all' if seconds['slow'] else 'fast'}")
        if ceiling_s is None and not any(f"{file}: {which}" in ceilings for which in ("fast", "all")):
            yield (
                f"{file} has no line in tests/costs.json. It costs {sum(seconds.values()) * ratio:.1f} CPU-s. Can its tests join "
                "a file that has their fixtures? If not, write the line: `python -m tests.costs ceilings`"
            )
        elif ceiling_s is not None and sum(seconds.values()) * ratio > ceiling_s:
            alone_s = cost_alone(file, seconds) * ratio
            if alone_s > ceiling_s:
                yield (
                    f"{file} costs {sum(seconds.values()) * ratio:.1f} CPU-s, and {alone_s:.1f} alone; it may cost "
                    f"{ceiling_s:.4g} (tests/costs.json). Make it cheaper (CONTRIBUTING.md, What a test costs), or raise its "
                    "ceiling with an entry"
                )
    ceiling_s = ceilings.get(f"tier {' '.join(tiers)}")
    if ceiling_s is not None and run_cpu_s * ratio > ceiling_s:
        yield f"The tier {' '.join(tiers)} costs {run_cpu_s * ratio:.0f} CPU-s; it may cost {ceiling_s:.4g} (tests/costs.json)"


def expected_s(slow: Collection[str]) -> Callable[[str], float]:
    """Returns what to expect of a file of tests, for the order of a run. `slow` are the files whose slow tests are run too."""
    rows = read_ceilings()["files"]

    def of(file: str) -> float:
        return max((seconds for which, seconds in rows.get(file, {}).items() if which == "fast" or file in slow), default=0.0)

    return of


def slow_s(files: Iterable[str]) -> dict[str, float]:
    """Returns what the slow tests of each file may cost."""
    rows = rows_in_force(read_ceilings())
    return {file: max(0.0, rows.get(f"{file}: all", 0.0) - rows.get(f"{file}: fast", 0.0)) for file in files}


def parts(files: Iterable[str], budget_s: float) -> list[list[str]]:
    """Deals files of tests into as many parts as it takes for the slow tests of each to cost about the budget, or less."""
    seconds = slow_s(files)
    number = max(1, math.ceil(sum(seconds.values()) / budget_s))
    dealt: list[list[str]] = [[] for _ in range(number)]
    for index, file in enumerate(sorted(files, key=lambda file: (-seconds[file], file))):
        lap, place = divmod(index, number)
        dealt[number - 1 - place if lap % 2 else place].append(file)
    return dealt


def cost_alone(file: str, seconds: dict[str, float]) -> float:
    which = () if seconds["slow"] and seconds["fast"] else ("-m", "slow" if seconds["slow"] else "not slow")
    folder = ledger.FOLDER.with_name("ledger-alone")
    environ = {**os.environ, LEDGER: str(folder)}
    subprocess.run((*PYTEST, *which, file), cwd=ROOT, env=environ, capture_output=True, check=False)
    found = by_file(ledger.read(folder)).get(file, {"fast": float("inf")})
    for path in folder.glob("*.jsonl"):
        path.unlink()
    return sum(found.values())


def write_ceilings() -> None:
    """Makes a line for each file of the kept runs: the median, and room for noise. To raise one takes an entry."""
    runs = [json.loads(path.read_text()) for path in sorted(KEPT.glob("*.json"))]
    before = read_ceilings()
    files: dict[str, dict[str, float]] = dict(before["files"])
    for file in {file for run in runs for file in run["files"]}:
        found: dict[str, list[float]] = {"fast": [], "all": []}
        for run in runs:
            seconds, ratio = run["files"].get(file), before["yardstick_s"] / run["yardstick_s"]
            if seconds:
                found["all" if seconds["slow"] else "fast"].append(sum(seconds.values()) * ratio)
        rows = {which: with_room(each) for which, each in found.items() if each}
        old = files.get(file, {})
        files[file] = {**old, **{which: min(seconds, old.get(which, seconds)) for which, seconds in rows.items()}}
    write({**before, "files": {file: files[file] for file in test_files() if file in files}})


def with_room(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * ROOM + ROOM_S, 1)


def write(ceilings: dict[str, Any]) -> None:
    """One line a file, so that a change of one is a change of one line."""
    files = ceilings["files"]
    rest = json.dumps({name: each for name, each in ceilings.items() if name != "files"}, indent=2)
    rows = ",\n".join(f"    {json.dumps(file)}: {json.dumps(row)}" for file, row in files.items())
    CEILINGS.write_text(rest.removesuffix("\n}") + ',\n  "files": {\n' + rows + "\n  }\n}\n")


def show() -> Iterator[str]:
    """Yields the newest run's costs: by cause, then the dearest files and tests."""
    lines = [*ledger.read()]
    causes, files, waiting_s = Counter[str](), Counter[str](), 0.0
    of_files: dict[str, Counter[str]] = defaultdict(Counter)
    for line in lines:
        causes.update(line["cpu_s"])
        file = file_of(line["test"])
        files[file] += cpu_s(line)
        of_files[file].update(line["cpu_s"])
        waiting_s += max(0.0, line["wall_s"] - cpu_s(line))
    yield f"{causes.total():8.1f} CPU-s, and {waiting_s:.0f} s of waiting, by cause"
    yield from (f"{seconds:8.1f} {cause}" for cause, seconds in causes.most_common())
    yield "\nThe dearest files"
    yield from (f"{seconds:8.1f} {file}  ({told(of_files[file])})" for file, seconds in files.most_common(40))
    yield "\nThe dearest tests"
    dearest = sorted((line for line in lines if line["test"] != SHARED), key=lambda line: -cpu_s(line))
    yield from (f"{cpu_s(line):8.1f} {line['test']}  ({told(Counter(line['cpu_s']))})" for line in dearest[:60])


def told(causes: Counter[str]) -> str:
    return ", ".join(f"{cause} {seconds:.1f}" for cause, seconds in causes.most_common(3))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.costs", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("show", "ceilings"), default="show")
    if parser.parse_args().what == "ceilings":
        write_ceilings()
    else:
        print("\n".join(show()))


if __name__ == "__main__":
    main()
