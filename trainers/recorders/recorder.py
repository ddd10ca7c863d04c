"""What a recorder is: where the numbers of a run go, once a publish. Free of JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class Distribution(NamedTuple):
    """Of one array: `counts` are those of equal bins from `min` to `max`."""

    mean: float
    std: float
    min: float
    max: float
    counts: tuple[int, ...]


class About(NamedTuple):
    """The run whose numbers are recorded."""

    name: str
    folder: str
    """Of the run, absolute: a recorder writes below it."""
    settings: Mapping[str, Any]
    """The configuration, section by section."""


class Recorder(Protocol):
    """Built as `Class(about: About)`. One thread of its own calls it, so it may wait; what it raises is told, and costs the
    numbers of that publish only.

    After a restart of the run, steps may come again that were recorded before it: with the same numbers, but for those that tell
    times. A recorder that keeps a file of its own should keep each number once.
    """

    def record(self, step: int, metrics: Mapping[str, float], distributions: Mapping[str, Distribution]) -> None:
        """The numbers of one publish by name; an evaluation's (`eval_...`) come apart from those of training."""

    def close(self) -> None:
        """Nothing more comes; what was recorded is to be complete when this returns."""
