"""The requests of one host (stop, save). They go into the train step as flags, and come out of it alike for all hosts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gangway.stop_reason import StopReason
from trainers import runtime
from trainers.callbacks import RunInfo
from trainers.loop.inflight import STOP_REASONS, Agreed

RETRY_FIRST_S, RETRY_MAX_S = 10.0, 300.0
"""The delay before a failed save is tried again: at first, and at most. It doubles each time."""


@dataclass(frozen=True)
class Limits:
    """The limits at which a run ends, in batches drawn."""

    max_steps: int | None
    max_batches: int | None
    """The number of batches in the configured epochs."""
    stop_at: int | None = None
    """The batch index at which the gang is resized."""
    time_is_up: bool = False
    """Whether the time limit had passed before this process began: then it trains no step. The same on all hosts."""
    deadline_s: float | None = None
    """The time limit on this host's clock. It becomes a request: a host that stopped by its own clock would leave the others in
    a collective."""

    def reached(self, info: RunInfo) -> StopReason | None:
        """Returns the limit that is reached. It does not depend on this host's clock, so all hosts find the same."""
        if self.max_steps is not None and info.batch_index >= self.max_steps:
            return StopReason.MAX_STEPS
        if self.max_batches is not None and info.batch_index >= self.max_batches:
            return StopReason.MAX_EPOCHS
        if self.stop_at is not None and info.batch_index >= self.stop_at:
            return StopReason.RESIZE
        return StopReason.TIME_LIMIT if self.time_is_up else None


@dataclass
class Retry:
    """Decides when a save is tried again after one that failed."""

    delay_s: float = RETRY_FIRST_S
    at_s: float | None = None
    requested: bool = False

    def due(self, failing: bool, now_s: float) -> bool:
        """Returns True once for each retry."""
        if not failing:
            # Saving works again: the next failure begins with the short delay.
            self.delay_s, self.at_s, self.requested = RETRY_FIRST_S, None, False
            return False
        if self.at_s is None:
            self.at_s = now_s + self.delay_s
        if self.requested or now_s < self.at_s:
            return False
        self.requested = True
        return True

    def tried(self, now_s: float) -> None:
        """Must be called when a save has started, whichever host asked for it: so all hosts wait alike before the next."""
        if self.at_s is not None:
            self.delay_s = min(2 * self.delay_s, RETRY_MAX_S)
            self.at_s, self.requested = now_s + self.delay_s, False


@dataclass
class HostRequests:
    """Turns what only this host knows (signals, orders, its clock, a failed save) into flags for the train step."""

    limits: Limits
    save_minutes: float | None
    save_failing: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    saves: int = 0
    _retry: Retry = field(default_factory=Retry)
    _last_save_s: float = field(default=0.0)

    def __post_init__(self):
        self._last_save_s = self.clock()

    def stop(self) -> int:
        """Returns this host's request to stop as a flag: 0 for none, else 1 + its index in STOP_REASONS."""
        reason = runtime.current().stop_reason
        if reason is None and self.limits.deadline_s is not None and self.clock() >= self.limits.deadline_s:
            reason = StopReason.TIME_LIMIT
        # The index in a fixed tuple: the step takes the maximum over the hosts, so all read the same reason.
        return 0 if reason is None else 1 + STOP_REASONS.index(StopReason(reason))

    def requested_saves(self, agreed: Agreed) -> int:
        """Returns the number of this host's latest save request. A new request gets one more than the number of any host."""
        now_s, requested = self.clock(), runtime.current().take_save_requests()
        timer_due = self.save_minutes is not None and now_s - self._last_save_s >= 60 * self.save_minutes
        # The retry comes first in the `or`: it must see every step, to notice when saving works again.
        if self._retry.due(self.save_failing(), now_s) or timer_due or requested:
            self._last_save_s = now_s
            # The step takes the maximum over the hosts: a number that another host has used would be no new request.
            self.saves = max(self.saves, agreed.saves) + 1
        return self.saves

    def saved(self) -> None:
        """Must be called when a save has started; `save_minutes` counts from here."""
        self._last_save_s = self.clock()
        self._retry.tried(self._last_save_s)
