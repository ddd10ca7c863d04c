"""What one host wants, and what comes of it: wishes go into the train step as flags, and come out of it for all hosts alike."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import numpy as np

from trainers import runtime
from trainers.callbacks import RunInfo
from trainers.loop.anomalies import Verdict
from trainers.parallel import mesh as meshes
from trainers.runtime.stop_reason import StopReason
from trainers.step.host_flags import FLAGS

RUN_AHEAD_STEPS = 2
LOOK_AHEAD_STEPS = RUN_AHEAD_STEPS + 1
"""After this many steps at most all hosts have heard of a wish."""
STOP_REASONS = tuple(StopReason)
"""A stop wish travels as 1 + its place in this tuple; where hosts differ, the greatest wins."""

RETRY_FIRST_S, RETRY_MAX_S = 10.0, 300.0
"""How long after a failed save it is tried again: the first time, and at most; doubled each time."""


@dataclass(frozen=True)
class Agreed:
    """What all hosts know of an earlier step: the same on every host at the same step. In the order of REDUCED."""

    stop: int = 0
    saves: int = 0
    verdict: Verdict = Verdict.APPLIED
    batch_index: int = 0
    newest_batch_index: int = 0
    """The same, unless the hosts are out of step."""
    loss: float = 0.0
    expected_loss: float = 0.0

    @classmethod
    def read(cls, reduced: jax.Array) -> Agreed:
        """Waits for the step."""
        values = np.asarray(reduced, np.int32)
        stop, saves, verdict, batch_index, newest = values[:5].tolist()
        loss, expected = values[5:].view(np.float32).tolist()
        return cls(stop, saves, Verdict(verdict), batch_index, newest, loss, expected)

    @property
    def stop_reason(self) -> StopReason | None:
        return STOP_REASONS[self.stop - 1] if self.stop else None


class Flags:
    """This host's flags as an input of the train step: one row for each of its devices."""

    def __init__(self, mesh: jax.sharding.Mesh):
        self._sharding = meshes.one_per_device(mesh)
        self._shape = (mesh.devices.size, len(FLAGS))

    def array(self, stop: int = 0, saves: int = 0, skip: bool = False, batch_index: int = 0) -> jax.Array:
        row = np.array([[stop, saves, skip, batch_index]], np.int32)
        # At every step: a fifth of the time that one `device_put` for each device takes.
        return jax.make_array_from_callback(self._shape, self._sharding, lambda index: row)


class Window:
    """The steps in flight, oldest first, each with the batch that this host took it with."""

    def __init__(self, first_step: int = 0):
        self._in_flight: collections.deque[tuple[int, jax.Array]] = collections.deque()
        self.completed_step = first_step

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def full(self) -> bool:
        """Whether the oldest is to be waited for."""
        return len(self._in_flight) > RUN_AHEAD_STEPS

    def push(self, batch_index: int, reduced: jax.Array) -> None:
        self._in_flight.append((batch_index, reduced))

    def complete_one(self) -> Agreed:
        """Waits for the oldest step."""
        batch_index, reduced = self._in_flight.popleft()
        agreed = Agreed.read(reduced)
        self.completed_step = batch_index + 1
        return agreed


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
class Wishes:
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

    def wished_saves(self, agreed: Agreed) -> int:
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
