"""The steps in flight: dispatched to the device and not yet completed, with the result that each returns to all hosts alike."""

from __future__ import annotations

import collections
from dataclasses import dataclass

import jax
import numpy as np

from gangway.stop_reason import StopReason
from trainers.parallel import mesh as meshes
from trainers.parallel.platform import wait_for_device
from trainers.step.host_flags import FLAGS, RUN_AHEAD_STEPS, UpdateStatus

LOOK_AHEAD_STEPS = RUN_AHEAD_STEPS + 1
"""A request of one host is known to all hosts after at most this many steps."""
STOP_REASONS = tuple(StopReason)
"""A request to stop is sent as 1 + its index in this tuple (0: none). If hosts ask for different reasons, the greatest wins."""


@dataclass(frozen=True)
class Agreed:
    """The result of an earlier step: the same on every host at the same step. The fields are in the order of REDUCED."""

    stop: int = 0
    saves: int = 0
    status: UpdateStatus = UpdateStatus.APPLIED
    data_wait_us: int = 0
    """How long the host that waited longest for its part of the batch did so, in microseconds."""
    batch_index: int = 0
    newest_batch_index: int = 0
    """Equals `batch_index`, unless the hosts are out of step."""
    not_finite: int = 0
    """1 if a parameter is infinite or NaN after the step."""
    loss: float = 0.0
    expected_loss: float = 0.0
    whole: int = 0
    """The number of the newest snapshot that is whole on every host; less than 0: a host cannot take any yet."""

    @classmethod
    def read(cls, reduced: jax.Array) -> Agreed:
        """Waits for the step, and returns its result."""
        values = wait_for_device(reduced)
        stop, saves, status, data_wait_us, batch_index, newest, not_finite = values[:7].tolist()
        loss, expected = values[7:9].view(np.float32).tolist()  # sent as the bits of a float32
        whole = values[9:].tolist()
        return cls(stop, saves, UpdateStatus(status), data_wait_us, batch_index, newest, not_finite, loss, expected, *whole)

    @property
    def data_wait_s(self) -> float:
        return self.data_wait_us / 1e6

    @property
    def stop_reason(self) -> StopReason | None:
        return STOP_REASONS[self.stop - 1] if self.stop else None


class Flags:
    """Builds the input `flags` of the train step from what this host asks for and has waited: one row for each of its devices."""

    def __init__(self, mesh: jax.sharding.Mesh, *, snapshots: bool = False):
        self._sharding = meshes.one_per_device(mesh)
        self._shape = (mesh.devices.size, len(FLAGS) + snapshots)

    def array(
        self, stop: int = 0, saves: int = 0, skip: bool = False, data_wait_s: float = 0.0, batch_index: int = 0, whole: int = 0
    ) -> jax.Array:
        data_wait_us = min(int(data_wait_s * 1e6), np.iinfo(np.int32).max)
        # [1, len(FLAGS)], and one more with snapshots: the same row for each device of this host.
        row = np.array([[stop, saves, skip, data_wait_us, batch_index, whole][: self._shape[1]]], np.int32)
        # Called at every step: this takes a fifth of the time of one `device_put` for each device.
        return jax.make_array_from_callback(self._shape, self._sharding, lambda index: row)


class Window:
    """The queue of the steps in flight, oldest first, each with the index of this host's batch."""

    def __init__(self, first_step: int = 0):
        self._in_flight: collections.deque[tuple[int, jax.Array]] = collections.deque()
        self.completed_step = first_step

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def full(self) -> bool:
        """Whether the host must wait for the oldest step before it dispatches another."""
        return len(self._in_flight) > RUN_AHEAD_STEPS

    def push(self, batch_index: int, reduced: jax.Array) -> None:
        self._in_flight.append((batch_index, reduced))

    def complete_one(self) -> Agreed:
        """Waits for the oldest step, and returns its result."""
        batch_index, reduced = self._in_flight.popleft()
        agreed = Agreed.read(reduced)
        self.completed_step = batch_index + 1
        return agreed
