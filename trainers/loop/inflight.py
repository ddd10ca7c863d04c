"""The steps in flight: dispatched to the device and not yet completed, and what each says for all hosts alike."""

from __future__ import annotations

import collections
from dataclasses import dataclass

import jax
import numpy as np

from trainers.parallel import mesh as meshes
from trainers.runtime.device import wait_for_device
from trainers.runtime.stop_reason import StopReason
from trainers.step.host_flags import FLAGS, RUN_AHEAD_STEPS, UpdateStatus

LOOK_AHEAD_STEPS = RUN_AHEAD_STEPS + 1
"""After this many steps at most all hosts have heard of a wish."""
STOP_REASONS = tuple(StopReason)
"""A stop wish travels as 1 + its place in this tuple; where hosts differ, the greatest wins."""


@dataclass(frozen=True)
class Agreed:
    """What all hosts know of an earlier step: the same on every host at the same step. In the order of REDUCED."""

    stop: int = 0
    saves: int = 0
    verdict: UpdateStatus = UpdateStatus.APPLIED
    batch_index: int = 0
    newest_batch_index: int = 0
    """The same, unless the hosts are out of step."""
    loss: float = 0.0
    expected_loss: float = 0.0

    @classmethod
    def read(cls, reduced: jax.Array) -> Agreed:
        """Waits for the step."""
        values = wait_for_device(reduced)
        stop, saves, verdict, batch_index, newest = values[:5].tolist()
        loss, expected = values[5:].view(np.float32).tolist()
        return cls(stop, saves, UpdateStatus(verdict), batch_index, newest, loss, expected)

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
