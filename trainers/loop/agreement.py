"""What the hosts agree on without a collective of their own: each sends its requests into a step, and reads what all have sent
when that step is complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import jax

from gangway.errors import CoordinatorError, DesyncError
from gangway.stop_reason import StopReason
from trainers import runtime
from trainers.callbacks import RunInfo
from trainers.loop.inflight import STOP_REASONS, Agreed, Flags, Window
from trainers.loop.triggers import EndOfData
from trainers.runtime import multihost
from trainers.step.host_flags import UpdateStatus

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


DESYNC_TIMEOUT_S = 10.0
"""How long the hosts wait to exchange their batch indices for the error message. All hosts read the same status, so all of them
take part, unless one dies first."""


@dataclass
class Agreement:
    flags: Flags
    requests: HostRequests
    end_of_data: EndOfData = field(default_factory=lambda: EndOfData(None))
    window: Window = field(default_factory=Window)
    whole: Callable[[], Sequence[int]] = tuple
    """Returns the newest snapshot of this host, if there are snapshots."""
    newest: Agreed = field(default_factory=Agreed)
    """The result of the newest step that is complete."""
    _handled_saves: int = 0

    def start(self, info: RunInfo) -> None:
        """Training begins, or goes on from an older state: the results of the steps in flight must not be read any more. All
        hosts must call this."""
        self.window, self.newest = Window(info.global_step), Agreed()
        self.end_of_data.start(info.batch_index)

    def flags_of(self, batch_index: int, *, skip: bool, data_wait_s: float) -> jax.Array:
        """Returns the input of the next step: what this host asks for."""
        saves = self.requests.requested_saves(self.newest)
        return self.flags.array(self._stop_request(batch_index), saves, skip, data_wait_s, batch_index, *self.whole())

    def complete_one(self) -> Agreed:
        """Waits for the oldest step in flight; returns its result. Raises DesyncError if the hosts are at different batches."""
        self.newest = self.window.complete_one()
        if self.newest.status is UpdateStatus.OUT_OF_STEP:
            raise self._out_of_step()
        self.end_of_data.observe(self.newest)
        return self.newest

    def stop_reason(self, info: RunInfo) -> StopReason | None:
        """Returns why training ends here, the same on all hosts."""
        reason = self.requests.limits.reached(info)
        if reason is None and self.end_of_data.reached(info.batch_index):
            return self.end_of_data.reason
        # END_OF_DATA is requested ahead of the end. Training stops only after the last batch, which was checked above.
        agreed = self.newest.stop_reason
        return reason or (None if agreed is StopReason.END_OF_DATA else agreed)

    @property
    def save_asked(self) -> bool:
        """Whether a host has asked for a save that was not made yet."""
        return self.newest.saves > self._handled_saves

    def saves(self) -> None:
        """A save is about to be made. It serves every request that is known by now, whichever host it came from."""
        self._handled_saves = max(self.newest.saves, self._handled_saves)

    def _stop_request(self, batch_index: int) -> int:
        request = self.requests.stop()
        if self.end_of_data.in_sight(batch_index):
            # As the step does with the requests of several hosts: the greatest wins.
            request = max(request, 1 + STOP_REASONS.index(StopReason.END_OF_DATA))
        return request

    def _out_of_step(self) -> DesyncError:
        agreed, batch_index = self.newest, self.window.completed_step - 1  # the batch that this host took the step with
        indices: list[int] | None = None
        hosts = f"this host at {batch_index}"
        with suppress(CoordinatorError):  # it would hide the DesyncError
            indices = multihost.all_hosts("hosts out of step", batch_index, DESYNC_TIMEOUT_S)
            hosts = "; ".join(f"host {host} at {index}" for host, index in enumerate(indices))
        return DesyncError(
            f"the hosts are out of step at batch {agreed.batch_index}: they took one step with batches "
            f"{agreed.batch_index} to {agreed.newest_batch_index} ({hosts}); a host has skipped or repeated a step",
            indices,
        )
