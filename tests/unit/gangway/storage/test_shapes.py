"""What JSON has to be, as a type says it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from gangway.storage import shapes


class Colour(StrEnum):
    RED = "red"


@dataclass
class Part:
    name: str
    size: float = 0.0


class Whole(TypedDict):
    step: int
    parts: list[Part]
    pair: tuple[str, int]
    scores: dict[str, float]
    colour: Colour | None
    kind: NotRequired[Literal["a", "b"]]
    rest: NotRequired[Any]


GOOD = {"step": 1, "parts": [{"name": "a"}], "pair": ["a", 1], "scores": {"x": 1}, "colour": "red"}


def test_what_fits_passes_and_so_does_a_key_that_is_not_known():
    assert shapes.problem(Whole, GOOD) == ""
    assert shapes.problem(Whole, {**GOOD, "kind": "a", "colour": None, "rest": object(), "newer": 3}) == ""


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"step": True}, "step = True: expected int"),
        ({"step": 1.5}, "step = 1.5: expected int"),
        ({"parts": {}}, "parts = {}: expected a list"),
        ({"parts": [{"size": 1.0}]}, "parts[0].name is missing"),
        ({"parts": [{"name": "a", "size": "b"}]}, "parts[0].size = 'b': expected float"),
        ({"pair": ["a"]}, "pair = ['a']: expected 2 entries"),
        ({"pair": ["a", "b"]}, "pair[1] = 'b': expected int"),
        ({"scores": {"x": None}}, "scores.x = None: expected float"),
        ({"scores": {1: 1.0}}, "a key of scores = 1: expected text"),
        ({"colour": []}, "colour = []: expected a Colour"),
        ({"colour": "x" * 99}, f"colour = '{'x' * 56}...: expected a Colour"),
        ({"kind": "c"}, "kind = 'c': expected one of 'a', 'b'"),
    ],
)
def test_what_does_not_is_said_with_its_place(change, problem):
    assert shapes.problem(Whole, {**GOOD, **change}) == problem


def test_what_is_no_object_at_all():
    assert shapes.problem(Whole, []) == "[]: expected an object"
    assert shapes.problem(Whole, {key: value for key, value in GOOD.items() if key != "step"}) == "step is missing"
