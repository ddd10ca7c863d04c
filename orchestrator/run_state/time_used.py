"""The time that a run has used of its `time_limit`. It outlives drivers and launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class TimeUsed:
    """Counts from when the processes of a launch first joined each other, to the end of the launch.

    Restarts, waits and the time without a driver count; the time between two launches does not. Times are passed in, from one
    wall clock. If it is set back, no second is lost.
    """

    def __init__(self, seconds: float = 0.0, counted_to_s: float | None = None):
        """`counted_to_s`: the time up to which `seconds` are counted; None: nothing trains yet, and no second counts."""
        self._seconds, self._counted_to_s = seconds, counted_to_s

    def begin(self, at_s: float) -> None:
        """Counts from `at_s` on. Later calls change nothing."""
        if self._counted_to_s is None:
            self._counted_to_s = at_s

    def seconds(self, now_s: float) -> float:
        return self._seconds + (0.0 if self._counted_to_s is None else max(0.0, now_s - self._counted_to_s))

    def to_dict(self, now_s: float) -> dict[str, Any]:
        counting = self._counted_to_s is not None
        return {"seconds": self.seconds(now_s), "counted_to_s": now_s if counting else None}

    @classmethod
    def resume(cls, data: Mapping[str, Any], *, same_launch: bool, step_s: float = 0.0) -> TimeUsed:
        """Continues the count of another driver. Of an earlier launch only the seconds count that it had stored. `step_s`: by how
        much the wall clock was set forward since then."""
        counted_to_s = data["counted_to_s"] if same_launch else None
        return cls(data["seconds"], None if counted_to_s is None else counted_to_s + step_s)
