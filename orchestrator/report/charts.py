"""The charts of a report, as specifications of Vega-Lite, of curves with fewer points. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from orchestrator.report.drawing import GOOD, MUTED, SAVING, SERIES, STARTING, SURFACE, TEXT, TROUBLE, WAITING
from orchestrator.report.timeline import Timeline

Chart = dict[str, Any]
Points = Sequence[tuple[float, float]]

HALF, WHOLE, NARROW = 430, 940, 290
"""Widths in pixels: two charts beside each other, one alone, and one on a telephone."""
LETTER = 7
"""Pixels of a letter of a name in a bar, at most."""
LEGEND = {"title": None, "orient": "top", "direction": "horizontal", "columnPadding": 24}
KINDS = {"training": GOOD, "starting": STARTING, "saving, evaluating": SAVING, "failed, recovering": TROUBLE, "waiting": WAITING}


def lines(
    title: str, unit: str, curves: Mapping[str, Points], *, x: str = "step", width: int = HALF, percent: bool = False
) -> Chart:
    """A line for each curve; above them their names, if there are several."""
    names = list(curves)
    colors = {name: SERIES[number % len(SERIES)] for number, name in enumerate(names)}
    drawn = {name: thinned(points) for name, points in curves.items()}
    rows = [{"x": px, "y": py, "of": name} for name, points in drawn.items() for px, py in points]
    ends = [{"x": points[-1][0], "y": points[-1][1], "of": name} for name, points in drawn.items() if points]
    largest = max((abs(y) for points in curves.values() for _, y in points), default=0.0)
    axis: dict[str, Any] = {"title": None, "tickCount": 5}
    if percent or largest >= 10_000 or 0 < largest < 0.01:
        axis["format"] = "~%" if percent else "~s" if largest >= 10_000 else "~e"
        if axis["format"] == "~e":
            axis["labelExpr"] = "datum.value === 0 ? '0' : datum.label"
    scale: dict[str, Any] = {"zero": percent}
    least = min((y for points in curves.values() for _, y in points), default=0.0)
    if 0 <= least < largest / 4:
        scale["domainMin"] = 0  # a curve that falls to almost nothing falls to the floor
    x_axis = {"title": x, "grid": False, "tickCount": 6, **({"format": "~s"} if x == "step" else {})}
    legend = {**LEGEND, "symbolType": "stroke", "columns": max(1, width // 200), "labelLimit": 180} if len(names) > 1 else None
    color = {"field": "of", "type": "nominal", "legend": legend, "scale": {"domain": names, "range": [*colors.values()]}}
    encoding = {
        "x": {"field": "x", "type": "quantitative", "axis": x_axis},
        "y": {"field": "y", "type": "quantitative", "axis": axis, "scale": scale},
        "color": color,
    }
    layers: list[dict[str, Any]] = [
        {"data": {"values": rows}, "mark": {"type": "line", "strokeWidth": 1.6, "strokeJoin": "round"}, "encoding": encoding},
        {"data": {"values": ends}, "mark": {"type": "point", "filled": True, "size": 22, "opacity": 1}, "encoding": encoding},
    ]
    return {"title": _title(title, unit), "width": width, "height": 170, "layer": layers}


def goodput_bar(seconds: Mapping[str, float], width: int = WHOLE) -> Chart:
    """One bar: how the seconds of the run were spent."""
    spent = {name: value for name, value in seconds.items() if value > 0}
    whole_s, begin_s = sum(spent.values()) or 1.0, 0.0
    rows, large = [], []
    for name, value in spent.items():
        ends = {"from": begin_s / whole_s, "to": (begin_s + value) / whole_s, "middle": (begin_s + value / 2) / whole_s}
        rows.append({"what": name.replace("_", " "), "kind": KIND_OF.get(name, "waiting"), **ends})
        large += rows[-1:] if width * value / whole_s > LETTER * (len(name) + 1) else []
        begin_s += value
    color = _kinds(width)
    x = {"type": "quantitative", "axis": {"format": ".0%", "title": None, "tickCount": 5}, "scale": {"domain": [0, 1]}}
    return {
        "title": _title("Where the time went", "share of the wall clock"),
        "width": width,
        "height": 44,
        "layer": [
            {
                "data": {"values": rows},
                "mark": {"type": "bar", "height": 30, "stroke": SURFACE, "strokeWidth": 1},
                "encoding": {"x": {**x, "field": "from"}, "x2": {"field": "to"}, "color": color},
            },
            {
                "data": {"values": large},
                "mark": {"type": "text", "fontSize": 11, "fontWeight": 600},
                "encoding": {
                    "x": {**x, "field": "middle"},
                    "text": {"field": "what"},
                    "color": {"condition": {"test": "datum.kind === 'waiting'", "value": TEXT}, "value": SURFACE},
                },
            },
        ],
    }


KIND_OF = {
    "step": "training",
    "start": "starting",
    "import": "starting",
    "join": "starting",
    "restore": "starting",
    "compile": "starting",
    "data_wait": "waiting",
    "schedule": "waiting",
    "idle": "waiting",
    "checkpoint": "saving, evaluating",
    "evaluation": "saving, evaluating",
    "finish": "saving, evaluating",
    "detection": "failed, recovering",
    "recovery": "failed, recovering",
    "replay": "failed, recovering",
}
"""The kind of a category of the goodput ledger."""


def apart(incidents: Sequence[Chart], length: float, width: int = WHOLE) -> list[Chart]:
    """Returns the incidents that have room for their names: each name as long as it is, from where the incident is."""
    found: list[Chart] = []
    for one in sorted(incidents, key=lambda one: one["x"]):
        if not found or (one["x"] - found[-1]["x"]) / length * width > LETTER * len(found[-1]["what"]):
            found.append(one)
    return found


def unit_of(length_s: float) -> tuple[float, str]:
    """Returns the unit for an axis of so many seconds: its seconds, and its name."""
    return (3600.0, "hours") if length_s > 2 * 3600 else (60.0, "minutes") if length_s > 180 else (1.0, "seconds")


def gantt(line: Timeline, width: int = WHOLE) -> Chart:
    """A row for the run and one for each host: what they did when; and a mark for each incident and each save."""
    unit_s, unit = unit_of(line.length_s)
    rows = [{"row": bar.row, "a": bar.from_s / unit_s, "b": bar.to_s / unit_s, "kind": bar.kind} for bar in line.bars]
    order = line.rows
    y = {"field": "row", "type": "nominal", "sort": order, "axis": {"title": None, "grid": False}, "scale": {"domain": order}}
    scale = {"domain": [0, line.length_s / unit_s], "nice": False}
    x = {"type": "quantitative", "axis": {"title": f"{unit} since the start", "tickCount": width // 100}, "scale": scale}
    incidents = [{"x": at_s / unit_s, "what": what} for at_s, what in line.incidents]
    saves = [{"x": at_s / unit_s, "row": order[0]} for at_s in line.saves]
    named = [
        one | {"align": _side(one, line.length_s / unit_s, width)} for one in apart(incidents, line.length_s / unit_s, width)
    ]
    return {
        "title": _title("Time line", line.about),
        "width": width,
        "height": {"step": 22},
        "layer": [
            {
                "data": {"values": rows},
                "mark": {"type": "bar", "height": 15},
                "encoding": {"x": {**x, "field": "a"}, "x2": {"field": "b"}, "y": y, "color": _kinds(width)},
            },
            {
                "data": {"values": saves},
                "mark": {"type": "tick", "color": TEXT, "thickness": 1, "size": 7, "opacity": 0.7},
                "encoding": {"x": {**x, "field": "x"}, "y": y},
            },
            {
                "data": {"values": incidents},
                "mark": {"type": "rule", "color": TROUBLE, "strokeWidth": 1.2},
                "encoding": {"x": {**x, "field": "x"}},
            },
            {
                "data": {"values": named},
                "mark": {
                    "type": "text",
                    "color": TROUBLE,
                    "align": {"expr": "datum.align"},
                    "baseline": "bottom",
                    "fontSize": 10,
                    "y": 0,
                },
                "encoding": {"x": {**x, "field": "x"}, "text": {"field": "what"}},
            },
        ],
    }


def heat(title: str, cells: Sequence[tuple[int, int, float]], about: str, width: int = WHOLE) -> Chart:
    """Rows of hosts, columns of steps: how many seconds each host worked on a step."""
    factor, unit = (1e3, "milliseconds") if max((value for *_, value in cells), default=0.0) < 1.0 else (1.0, "seconds")
    rows = [{"host": host, "step": step, "s": value * factor} for host, step, value in cells]
    return {
        "title": _title(title, f"{unit} {about}"),
        "width": width,
        "height": {"step": 16},
        "data": {"values": rows},
        "mark": {"type": "rect"},
        "encoding": {
            "x": {
                "field": "step",
                "type": "ordinal",
                "axis": {"title": "step", "labelOverlap": True, "labelSeparation": 6, "labelAngle": 0},
            },
            "y": {"field": "host", "type": "ordinal", "axis": {"title": "host"}},
            "color": {
                "field": "s",
                "type": "quantitative",
                "scale": {"scheme": "viridis"},
                "legend": {"title": None, "format": ".3~r", "gradientLength": 80},
            },
        },
    }


def phases(seconds: Mapping[str, float]) -> Chart:
    """A bar for each phase of a recovery."""
    rows = [{"phase": name.replace("_", " "), "s": value} for name, value in seconds.items()]
    y = {"field": "phase", "type": "nominal", "sort": None, "axis": {"title": None, "grid": False}}
    x = {"field": "s", "type": "quantitative", "axis": {"title": "seconds", "tickCount": 4}}
    return {
        "width": 320,
        "height": {"step": 18},
        "layer": [
            {"data": {"values": rows}, "mark": {"type": "bar", "color": TROUBLE, "height": 10}, "encoding": {"x": x, "y": y}},
            {
                "data": {"values": rows},
                "mark": {"type": "text", "align": "left", "dx": 4, "color": MUTED, "fontSize": 10},
                "encoding": {"x": x, "y": y, "text": {"field": "s", "format": ".2f"}},
            },
        ],
    }


def _title(title: str, unit: str) -> dict[str, Any]:
    return {"text": title, "subtitle": unit}


def _kinds(width: int) -> dict[str, Any]:
    """Returns the colours of what the time is spent on, with their names above the chart."""
    legend = {**LEGEND, "symbolType": "square", "columns": 2 if width < HALF else 5}
    scale = {"domain": [*KINDS], "range": [*KINDS.values()]}
    return {"field": "kind", "type": "nominal", "scale": scale, "legend": legend}


def _side(one: Chart, length: float, width: int) -> str:
    """Returns the alignment of the name of an incident: to the left of its line where the chart ends before the name does."""
    return "left" if (length - one["x"]) / length * width > LETTER * len(one["what"]) else "right"


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
    sums = [0.0, *accumulate(y for _, y in points)]
    return [(x, (sums[end] - sums[max(0, end - size)]) / min(end, size)) for end, (x, _) in enumerate(points, 1)]
