"""Curves drawn with characters."""

from __future__ import annotations

import math

from orchestrator.runs.history import chart


def test_each_point_has_its_mark_and_the_axes_have_the_numbers():
    lines = chart({"loss": [(10, 4.0), (20, 2.0), (30, 1.0)], "eval_loss": [(10, 4.0), (30, 2.5)]}, width=21, height=4)
    assert lines[0].startswith("    4.0000 ┤◆···")
    assert lines[1].index("◆") == 12 + 20
    assert lines[2][12 + 10] == "●"
    assert lines[3:] == [
        "    1.0000 ┤" + " " * 15 + "·····●",
        "           └" + "─" * 21,
        "      step  10                 30",
        "",
        "            ● loss   ◆ eval_loss",
    ]


def test_a_point_alone_a_flat_curve_and_what_is_not_finite():
    assert chart({"loss": [(5, 2.0)]}, width=5, height=2)[:2] == ["    2.0000 ┤", "    2.0000 ┤●"]
    flat = chart({"loss": [(1, 2.0), (2, 2.0), (3, math.nan)]}, width=5, height=2)
    assert flat[1] == "    2.0000 ┤●···●"
    assert chart({"loss": [(1, math.inf)]}) == []
    assert chart({}) == []


def test_more_curves_than_marks():
    assert chart({str(number): [(number, 1.0)] for number in range(6)}, width=6, height=2)[-1].count("●") == 2
