"""`gangway history RUN [METRIC ...]`: the course of a run's metrics, drawn: those of training, and of its evaluations.

It reads what the run has tracked, and disturbs nothing. Without METRIC it is the loss, in training and on held-out data.
Exit status: 0; 2 when there is no such run or metric.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from gangway.config.section import did_you_mean
from gangway.program import EXIT_FINE, Parser, command
from gangway.published import SYSTEM, number
from gangway.storage import json_text
from gangway.storage.documents import DamagedDocument, Where
from gangway.storage.opening import place_of
from orchestrator.config.locate import REFUSALS, RUN_HELP, NoRunError, run_of
from orchestrator.run_state import lines
from orchestrator.tracking.spool import entry

LOSS = "loss"
Curves = dict[str, list[tuple[int, float]]]


@command(*REFUSALS, is_read=True)
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("orchestrator.runs.history", "The course of a run's metrics.", example="runs/spirals loss eval_loss")
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("metrics", nargs="*", metavar="METRIC", help="such as loss eval_loss; default: all losses")
    parser.add_argument("--list", action="store_true", help="the names of all metrics")
    parser.add_argument("--json", action="store_true", help="for programs: [step, value] by the name of the metric")
    options = parser.parse_args(argv)
    found = read(run_of(options.run))
    if options.list:
        print("\n".join(sorted(found)))
        return EXIT_FINE
    chosen = {name: found[name] for name in named(options.metrics, found)}
    print(json_text.dumps(chosen) if options.json else "\n".join(chart(chosen)))
    return EXIT_FINE


def read(run: Where) -> Curves:
    """Returns the curve of each metric that a run has tracked: (step, value) by step, of each step the newest value. Raises
    NoRunError if it has tracked nothing."""
    by_name: dict[str, dict[int, float]] = {}
    try:
        found = list(lines.metrics(place_of(run)))
    except FileNotFoundError as error:
        raise NoRunError(f"{run} has tracked no metrics yet: there is no {error.filename}") from error
    for line in found:
        try:
            record = entry(line)
        except DamagedDocument:  # half written
            continue
        for name, value in record.get("metrics", {}).items():
            # Null: it was not finite.
            by_name.setdefault(name, {})[record["step"]] = float("nan") if value is None else value
    if not by_name:
        raise NoRunError(f"{run} has tracked no metrics yet")
    return {name: sorted(points.items()) for name, points in by_name.items()}


def named(asked: Sequence[str], found: Curves) -> list[str]:
    """Returns the names of the metrics to show. Raises NoRunError for one that there is not."""
    if not asked:
        return [name for name in found if name == LOSS or (name.endswith(f"_{LOSS}") and name not in SYSTEM)]
    for name in asked:
        if name not in found:
            raise NoRunError(f"{name}: the run has no such metric{did_you_mean(name, found)}; --list shows all names")
    return list(asked)


Points = Sequence[tuple[int, float]]
"""(step, value), by step."""
MARKS = "●◆▲■"
LINE = "·"
Place = Callable[[float, float], tuple[int, int]]
"""(step, value) -> (row, column)"""
LABEL = 10
"""Columns for the values beside the axis."""


def chart(curves: Mapping[str, Points], width: int = 72, height: int = 14) -> list[str]:
    """Returns the lines of a chart of some curves, which share their axes: each point with the mark of its curve, and a line
    between two points. Values that are not finite are left out. `width` and `height` are those of the area, in characters."""
    finite = {name: [point for point in points if math.isfinite(point[1])] for name, points in curves.items()}
    shown = {name: points for name, points in finite.items() if points}
    if not shown:
        return []
    steps = [step for points in shown.values() for step, _ in points]
    values = [value for points in shown.values() for _, value in points]
    (first, last), (low, high) = (min(steps), max(steps)), (min(values), max(values))

    def place(step: float, value: float) -> tuple[int, int]:
        right = round((step - first) / (last - first or 1) * (width - 1))
        up = round((value - low) / (high - low or 1) * (height - 1))
        return height - 1 - up, right

    area = [[" "] * width for _ in range(height)]
    for points in shown.values():
        for row, column in _between(points, place, width):
            area[row][column] = LINE
    # After all lines: a mark is never hidden by one.
    for mark, points in zip(_marks(len(shown)), shown.values(), strict=True):
        for row, column in (place(*point) for point in points):
            area[row][column] = mark
    labels = {0: number(high), height - 1: number(low)}
    lines = [f"{labels.get(row, ''):>{LABEL}} ┤{''.join(cells)}".rstrip() for row, cells in enumerate(area)]
    axis = f"{first:,}{last:>{max(1, width - len(f'{first:,}'))},}" if last != first else f"{first:,}"
    legend = "   ".join(f"{mark} {name}" for mark, name in zip(_marks(len(shown)), shown, strict=True))
    return [*lines, f"{'':>{LABEL}} └{'─' * width}", f"{'step':>{LABEL}}  {axis}", "", f"{'':>{LABEL}}  {legend}"]


def _marks(count: int) -> str:
    return (MARKS * (count // len(MARKS) + 1))[:count]


def _between(points: Points, place: Place, num_parts: int) -> Iterator[tuple[int, int]]:
    """Yields the places of the lines from each point to the next."""
    for (step, value), (next_step, next_value) in pairwise(points):
        for part in range(1, num_parts):
            share = part / num_parts
            yield place(step + share * (next_step - step), value + share * (next_value - value))


if __name__ == "__main__":
    sys.exit(main())
