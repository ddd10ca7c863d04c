"""Fewer points of a curve, for a picture: of each part the lowest and the highest value stay, so no spike is lost."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

MAX_POINTS = 600


def thinned(points: Sequence[tuple[float, float]], most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Returns at most `most` of the points, in their order; points that are not finite are left out."""
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) <= most:
        return finite
    num_parts = most // 2
    kept: list[tuple[float, float]] = []
    for part in range(num_parts):
        of_part = finite[len(finite) * part // num_parts : len(finite) * (part + 1) // num_parts]
        ends = {min(of_part, key=lambda point: point[1]), max(of_part, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def smoothed(points: Sequence[tuple[float, float]], share: float = 0.02) -> list[tuple[float, float]]:
    """Returns the running mean over so large a share of the points."""
    size = max(1, int(len(points) * share))
    if size == 1:
        return list(points)
    total, result = 0.0, []
    window: deque[float] = deque()
    for x, y in points:
        window.append(y)
        total += y
        if len(window) > size:
            total -= window.popleft()
        result.append((x, total / len(window)))
    return result
