"""Where the wall clock went: each second of a launch in exactly one category, and what each failure cost.

The clock is always in one category, so the categories sum to the wall clock by construction. What is measured inside a
category by somebody else (the training process reports seconds of data wait, checkpoint stall, evaluation) is *moved* out
of it, never added. With several hosts the driver feeds the clock from host 0, which cannot be ahead of the slowest one.

Precedence, where a second could be said to belong to several categories:

1. From a failure to its discovery it is `detection`, whatever the hosts were doing (those that hang were in `step`).
2. From there to the next go it is `recovery`; while the driver waits on purpose `idle`, while it waits for machines `schedule`.
3. While a gang starts it is the phase of its least advanced host.
4. While it trains it is `replay` up to the furthest step that was ever trained, and `step` beyond it, but for what the training
   process says it spent on `data_wait`, on the stall of a `checkpoint`, or on `evaluation`. A save that goes on beside the steps
   costs nothing: its seconds are steps.
5. While there is no driver, the gang goes on, and so does the category that it was in: see `Goodput.resume`.
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
from there to the next go; replay: steps trained again after a restore; idle: waiting on purpose (back-off); finish: from
the last step to the end. Goodput is `step`; the rest is what it cost."""


class Goodput:
    """The clock. Times are seconds of one clock (`time.time`), passed in; one that runs backwards loses nothing."""

    def __init__(self, started_at_s: float, category: str = "start"):
        self._seconds = dict.fromkeys(CATEGORIES, 0.0)
        self._category = _known(category)
        self._started_at_s = self._counted_to_s = started_at_s

    @property
    def category(self) -> str:
        return self._category

    @property
    def counted_to_s(self) -> float:
        """Up to here every second is in its category."""
        return self._counted_to_s

    @property
    def started_at_s(self) -> float:
        return self._started_at_s

    def switch(self, category: str, at_s: float) -> None:
        """What follows `at_s` belongs to `category`. An `at_s` before the last switch counts as that one."""
        category = _known(category)
        self._count_to(at_s)
        self._category = category

    def move(self, source: str, destination: str, seconds: float) -> float:
        """Counts seconds of `source` as `destination`: as many as `source` has. Returns how many it were."""
        moved = min(max(seconds, 0.0), self._seconds[_known(source)])
        self._seconds[source] -= moved
        self._seconds[_known(destination)] += moved
        return moved

    def totals(self, now_s: float) -> dict[str, float]:
        """Seconds by category up to `now_s`: they sum to `wall_s(now_s)`."""
        self._count_to(now_s)
        return dict(self._seconds)

    def wall_s(self, now_s: float) -> float:
        return max(now_s, self._counted_to_s) - self._started_at_s

    def goodput(self, now_s: float) -> float:
        """The share of the wall clock that went into steps which counted."""
        wall_s = self.wall_s(now_s)
        return self.totals(now_s)["step"] / wall_s if wall_s > 0 else 0.0

    def to_dict(self, now_s: float) -> dict[str, Any]:
        return {
            "started_at_s": self._started_at_s,
            "counted_to_s": max(now_s, self._counted_to_s),
            "category": self._category,
            "seconds": self.totals(now_s),
        }

    @classmethod
    def resume(cls, data: Mapping[str, Any]) -> Goodput:
        """Continues another driver's clock where it was last kept (`counted_to_s`), in the category that it was in.

        With the gang still at work, the driver then takes in what its hosts told meanwhile, and no second was lost by its
        absence. With the gang lost, all since then was detection: `clock.switch("detection", clock.counted_to_s)`.
        """
        clock = cls(data["started_at_s"], data["category"])
        clock._seconds |= {_known(name): float(seconds) for name, seconds in data["seconds"].items()}
        clock._counted_to_s = data["counted_to_s"]
        return clock

    def _count_to(self, at_s: float) -> None:
        elapsed_s = max(0.0, at_s - self._counted_to_s)
        self._seconds[self._category] += elapsed_s
        self._counted_to_s += elapsed_s


def check_sum(totals: Mapping[str, float], wall_s: float, tolerance: float = 1e-3) -> str:
    """What is wrong with a ledger, or nothing: its categories must sum to the wall clock within `tolerance` (a share)."""
    total_s = sum(totals.values())
    if abs(total_s - wall_s) <= tolerance * max(wall_s, 1e-9):
        return ""
    return f"the ledger's categories sum to {total_s:.3f} s, the wall clock is {wall_s:.3f} s: expected within {tolerance:.1%}"


def _known(category: str) -> str:
    if category not in CATEGORIES:
        raise ValueError(f"goodput category {category!r}: expected one of {', '.join(CATEGORIES)}")
    return category
