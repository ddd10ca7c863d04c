"""Where the wall clock went: each second of a launch in exactly one category, and what each failure cost.

The clock is always in one category, so the categories sum to the wall clock by construction. What is measured inside a
category by somebody else (the training process reports seconds of data wait, checkpoint stall, evaluation) is *moved* out
of it, never added. With several hosts the driver feeds the clock from host 0, which cannot be ahead of the slowest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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
    def resume(cls, data: Mapping[str, Any], at_s: float, gap: str = "detection") -> Goodput:
        """Continues another driver's clock at `at_s`. Nobody watched in between: the gap since it was last saved goes to `gap`,
        by default `detection` (the driver had failed, and it took that long to find out and start another one)."""
        clock = cls(data["started_at_s"], gap)
        clock._seconds |= {_known(name): float(seconds) for name, seconds in data["seconds"].items()}
        clock._counted_to_s = data["counted_to_s"]
        clock._count_to(at_s)
        return clock

    def _count_to(self, at_s: float) -> None:
        elapsed_s = max(0.0, at_s - self._counted_to_s)
        self._seconds[self._category] += elapsed_s
        self._counted_to_s += elapsed_s


@dataclass(kw_only=True)
class Incident:
    """A failure and what was done about it. Recovery is cut into phases that follow one another without a gap."""

    kind: str
    host: int | None
    generation: int
    step: int | None
    failed_at_s: float
    evidence: dict[str, Any] = field(default_factory=dict)
    action: str = ""
    """`restart` or `give up: REASON`."""
    recovery_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, in order: they sum to `total_s`."""
    resumed_step: int | None = None
    """Of the generation that followed; None while there is none."""

    @property
    def total_s(self) -> float:
        return sum(self.recovery_s.values())

    def mark(self, phase: str, at_s: float) -> None:
        """The phase ended at `at_s`; it had begun where the one before ended, the first one with the failure."""
        elapsed_s = max(0.0, at_s - self.failed_at_s - self.total_s)
        self.recovery_s[phase] = self.recovery_s.get(phase, 0.0) + elapsed_s

    def recovered(self, first_step_end_s: float, median_step_s: float = 0.0) -> None:
        """Ends the recovery with the next generation's first step, less the step's own work: that is not lost."""
        self.mark("first_step", first_step_end_s)
        self.recovery_s["first_step"] = max(0.0, self.recovery_s["first_step"] - median_step_s)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total_s": self.total_s}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Incident:
        return cls(**{name: value for name, value in data.items() if name != "total_s"})


def _known(category: str) -> str:
    if category not in CATEGORIES:
        raise ValueError(f"goodput category {category!r}: expected one of {', '.join(CATEGORIES)}")
    return category
