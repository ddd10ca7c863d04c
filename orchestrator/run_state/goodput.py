"""The goodput ledger: each second of a launch is in exactly one category, which the state of the driver says.

The clock is always in one category, so the categories sum to the wall clock. Seconds that the training process measures inside a
category (data wait, checkpoint stall, evaluation) are *moved* out of it, never added. With several hosts the driver uses the
times of host 0, which cannot be ahead of the slowest host; the data wait is that of the host that waits longest for each batch.

Precedence, where a second could be said to belong to several categories:

1. From a failure to its discovery it is `detection`, whatever the hosts were doing (those that hang were in `step`).
2. From there to the next start it is `recovery`; during the restart back-off `idle`, during a wait for machines `schedule`.
3. While a gang starts it is the phase of its least advanced host.
4. While it trains it is `replay` up to the furthest step that was ever trained, and `step` beyond it, except for the seconds that
   the training process reports as `data_wait`, `checkpoint` (a stall) or `evaluation`. A save beside the steps costs nothing.
5. While there is no driver, the gang goes on in the category that it was in: see `Goodput.resume`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CATEGORIES = (
    "start",
    "schedule",
    "import",
    "join",
    "compile",
    "restore",
    "step",
    "data_wait",
    "checkpoint",
    "evaluation",
    "detection",
    "recovery",
    "replay",
    "idle",
    "finish",
)
"""start: the command and the driver; schedule: waiting for machines; detection: from a failure to its discovery; recovery:
from there to the next start; replay: steps trained again after a restore; idle: restart back-off; finish: from the last step to
the end. Goodput is the share of `step` in all but `finish` (`share`)."""


def share(seconds: Mapping[str, float]) -> float:
    """Returns the goodput of these seconds by category: the part in steps that were not repeated. What comes after the last step
    does not count, so that the number is the same for whoever is told it while a run ends."""
    whole_s = counted_s(seconds)
    return seconds.get("step", 0.0) / whole_s if whole_s > 0 else 0.0


def counted_s(seconds: Mapping[str, float]) -> float:
    """Returns the seconds up to the end of the last step: those that goodput is a share of."""
    return sum(seconds.values()) - seconds.get("finish", 0.0)


class Goodput:
    """The clock of the ledger. Times are passed in, from one clock (`time.time`). If it runs backwards, no second is lost."""

    def __init__(self, started_at_s: float, category: str = "start"):
        self._seconds = dict.fromkeys(CATEGORIES, 0.0)
        self.category = _checked(category)
        self.started_at_s = self.counted_to_s = started_at_s
        """`counted_to_s`: the time up to which all seconds are counted."""

    def switch(self, category: str, at_s: float) -> None:
        """Counts the time after `at_s` as `category`. An `at_s` before the last switch counts as the time of that switch."""
        category = _checked(category)
        self._count_to(at_s)
        self.category = category

    def move(self, source: str, destination: str, seconds: float) -> float:
        """Moves seconds from `source` to `destination`, at most as many as `source` has. Returns how many were moved."""
        moved = min(max(seconds, 0.0), self._seconds[_checked(source)])
        self._seconds[source] -= moved
        self._seconds[_checked(destination)] += moved
        return moved

    def totals(self, now_s: float) -> dict[str, float]:
        """Returns the seconds by category up to `now_s`. They sum to `wall_s(now_s)`."""
        self._count_to(now_s)
        return dict(self._seconds)

    def wall_s(self, now_s: float) -> float:
        return max(now_s, self.counted_to_s) - self.started_at_s

    def to_dict(self, now_s: float) -> dict[str, Any]:
        return {
            "started_at_s": self.started_at_s,
            "counted_to_s": max(now_s, self.counted_to_s),
            "category": self.category,
            "seconds": self.totals(now_s),
        }

    @classmethod
    def resume(cls, data: Mapping[str, Any], step_s: float = 0.0) -> Goodput:
        """Continues another driver's clock from where it was last stored (`counted_to_s`), in the category that it was in.

        If the gang still works, the driver then handles the events of the time in between, and no second was lost. If the gang is
        lost, the time since then was detection: `clock.switch("detection", clock.counted_to_s)`. `step_s`: by how much the wall
        clock was set forward since then.
        """
        clock = cls(data["started_at_s"] + step_s, data["category"])
        clock._seconds |= {_checked(name): float(seconds) for name, seconds in data["seconds"].items()}
        clock.counted_to_s = data["counted_to_s"] + step_s
        return clock

    def _count_to(self, at_s: float) -> None:
        elapsed_s = max(0.0, at_s - self.counted_to_s)
        self._seconds[self.category] += elapsed_s
        self.counted_to_s += elapsed_s


def check_sum(totals: Mapping[str, float], wall_s: float, tolerance: float = 1e-3) -> str:
    """Returns a problem text if the categories do not sum to the wall clock within `tolerance` (a share); else an empty text."""
    total_s = sum(totals.values())
    if abs(total_s - wall_s) <= tolerance * max(wall_s, 1e-9):
        return ""
    return f"the ledger's categories sum to {total_s:.3f} s, the wall clock is {wall_s:.3f} s: expected within {tolerance:.1%}"


def _checked(category: str) -> str:
    if category not in CATEGORIES:
        raise ValueError(f"goodput category {category!r}: expected one of {', '.join(CATEGORIES)}")
    return category
