"""Curves of metrics over steps, drawn with characters. Pure text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from gangway.published import number

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
