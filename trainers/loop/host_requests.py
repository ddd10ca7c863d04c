"""What one host wants, and what comes of it: wishes go into the train step as flags, and come out of it for all hosts alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trainers import runtime
from trainers.callbacks import RunInfo
from trainers.loop.inflight import STOP_REASONS, Agreed
from trainers.runtime.stop_reason import StopReason

RETRY_FIRST_S, RETRY_MAX_S = 10.0, 300.0
"""How long after a failed save it is tried again: the first time, and at most; doubled each time."""


@dataclass(frozen=True)
class Limits:
    """Where a run ends, in batches drawn."""

    max_steps: int | None
    max_batches: int | None
    """Of the epochs asked for."""
    stop_at: int | None = None
    """Where it is to be resized."""
    deadline_s: float | None = None
    """On this host's clock: becomes a wish, never a decision of its own."""

    def reached(self, info: RunInfo) -> StopReason | None:
        if self.max_steps is not None and info.batch_index >= self.max_steps:
            return StopReason.MAX_STEPS
        if self.max_batches is not None and info.batch_index >= self.max_batches:
            return StopReason.MAX_EPOCHS
        if self.stop_at is not None and info.batch_index >= self.stop_at:
            return StopReason.RESIZE
        return None


@dataclass
class Retry:
    """When a save is tried again after one that failed."""

    delay_s: float = RETRY_FIRST_S
    at_s: float | None = None
    wished: bool = False

    def due(self, failing: bool, now_s: float) -> bool:
        """True once for each try."""
        if not failing:
            self.delay_s, self.at_s, self.wished = RETRY_FIRST_S, None, False
            return False
        if self.at_s is None:
            self.at_s = now_s + self.delay_s
        if self.wished or now_s < self.at_s:
            return False
        self.wished = True
        return True

    def tried(self, now_s: float) -> None:
        """A save has started, whichever host wished it: all hosts wait alike for the next."""
        if self.at_s is not None:
            self.delay_s = min(2 * self.delay_s, RETRY_MAX_S)
            self.at_s, self.wished = now_s + self.delay_s, False


@dataclass
class HostRequests:
    """Turns what this host alone knows (signals, orders, its clock, a save that failed) into flags."""

    limits: Limits
    save_minutes: float | None
    save_failing: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    saves: int = 0
    _seen_requests: int = 0
    _retry: Retry = field(default_factory=Retry)
    _last_save_s: float = field(default=0.0)

    def __post_init__(self):
        self._last_save_s = self.clock()

    def stop(self) -> int:
        reason = runtime.current().stop_reason
        if reason is None and self.limits.deadline_s is not None and self.clock() >= self.limits.deadline_s:
            reason = StopReason.TIME_LIMIT
        return 0 if reason is None else 1 + STOP_REASONS.index(StopReason(reason))

    def requested_saves(self, agreed: Agreed) -> int:
        """How many saves this host has ever asked for; a new wish is one more than any host's."""
        requests, now_s = runtime.current().save_requests, self.clock()
        due = self.save_minutes is not None and now_s - self._last_save_s >= 60 * self.save_minutes
        if self._retry.due(self.save_failing(), now_s) or due or requests > self._seen_requests:
            self._seen_requests, self._last_save_s = requests, now_s
            self.saves = max(self.saves, agreed.saves) + 1
        return self.saves

    def saved(self) -> None:
        """A save has started."""
        self._last_save_s = self.clock()
        self._retry.tried(self._last_save_s)
