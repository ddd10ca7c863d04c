"""Draws charts: a specification of Vega-Lite becomes SVG for the page, or PNG for other programs. Needs no network.

The colours of a chart are names (`TEXT`, `SERIES`): in the page they are variables of its style sheet (`VARIABLES`), so that one
picture serves light and dark; a PNG gets those of the light page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

TEXT, MUTED, GRID, SURFACE = "#0a0a01", "#0a0a02", "#0a0a03", "#0a0a04"
SERIES = ("#0b0b01", "#0b0b02", "#0b0b03", "#0b0b04", "#0b0b05", "#0b0b06")
"""The lines of runs, and of training and held-out data: the colours of Okabe and Ito, which the colour-blind tell apart."""
GOOD, STARTING, SAVING, TROUBLE, WAITING = "#0c0c01", "#0c0c02", "#0c0c03", "#0c0c04", "#0c0c05"
"""What the time of a run is spent on."""
VARIABLES = {
    TEXT: "--text",
    MUTED: "--muted",
    GRID: "--grid",
    SURFACE: "--surface",
    **{color: f"--series-{number}" for number, color in enumerate(SERIES, 1)},
    GOOD: "--good",
    STARTING: "--starting",
    SAVING: "--saving",
    TROUBLE: "--trouble",
    WAITING: "--waiting",
}
"""What the page's style sheet calls each colour: `page.html` and the pictures use these names, and none else."""
LIGHT = {
    TEXT: "#1c2430",
    MUTED: "#5c6673",
    GRID: "#e4e8ec",
    SURFACE: "#ffffff",
    SERIES[0]: "#0072b2",
    SERIES[1]: "#d55e00",
    SERIES[2]: "#009e73",
    SERIES[3]: "#cc79a7",
    SERIES[4]: "#b07d00",
    SERIES[5]: "#56b4e9",
    GOOD: "#2f8f6b",
    STARTING: "#6f9fd8",
    SAVING: "#b07d00",
    TROUBLE: "#d1495b",
    WAITING: "#a9b2bc",
}
DARK = {
    **LIGHT,
    TEXT: "#e6eaef",
    MUTED: "#9aa5b1",
    GRID: "#2b343f",
    SURFACE: "#161b22",
    SERIES[0]: "#4aa8e0",
    SERIES[1]: "#ff8c42",
    SERIES[2]: "#2fc79a",
    SERIES[3]: "#e29ac4",
    SERIES[4]: "#e0b040",
    SERIES[5]: "#8fd0f5",
    GOOD: "#3fae85",
    STARTING: "#5b86bd",
    SAVING: "#d8a52f",
    TROUBLE: "#f0707f",
    WAITING: "#55606c",
}
FONT = "system-ui, sans-serif"
CONFIG: Mapping[str, Any] = {
    "background": None,
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED,
        "titleColor": MUTED,
        "titleFontWeight": "normal",
        "gridColor": GRID,
        "domain": False,
        "ticks": False,
        "labelPadding": 6,
        "labelFontSize": 11,
        "titleFontSize": 11,
    },
    "title": {"anchor": "start", "color": TEXT, "fontSize": 13, "subtitleColor": MUTED, "subtitleFontSize": 11, "offset": 8},
    "legend": {"labelColor": MUTED, "titleColor": MUTED, "labelFontSize": 11},
}
SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
"""Names the language; nothing is fetched."""


def style(colors: Mapping[str, str]) -> str:
    """Returns the variables of a style sheet."""
    return "; ".join(f"{VARIABLES[name]}: {value}" for name, value in colors.items())


def svg(chart: Mapping[str, Any]) -> str:
    """Returns a picture whose colours are variables of the page, and which is as wide as its place."""
    text = _svg(chart, {color: f"var({variable})" for color, variable in VARIABLES.items()})
    return re.sub(r'<svg ([^>]*?)width="([\d.]+)" height="([\d.]+)"', r'<svg \1style="max-width:\2px"', text, count=1)


def png(chart: Mapping[str, Any], scale: float = 2.0) -> bytes:
    """Returns the picture on white."""
    import vl_convert

    text = _svg(chart, LIGHT)
    return vl_convert.svg_to_png(
        re.sub(r"(<svg [^>]*>)", r'\1<rect width="100%" height="100%" fill="white"/>', text, count=1), scale
    )


def _svg(chart: Mapping[str, Any], colors: Mapping[str, str]) -> str:
    import vl_convert

    made = vl_convert.vegalite_to_svg(json.dumps({"$schema": SCHEMA, **chart, "config": CONFIG}))
    return re.sub("|".join(colors), lambda found: colors[found[0]], made)
