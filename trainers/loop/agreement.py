"""What the hosts agree on without a collective of their own: each sends its requests into a step, and reads what all have sent
when that step is complete."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import jax

from gangway.errors import CoordinatorError, DesyncError
from gangway.stop_reason import StopReason
from trainers.callbacks import RunInfo
from trainers.loop.host_requests import HostRequests
from trainers.loop.inflight import STOP_REASONS, Agreed, Flags, Window
from trainers.loop.triggers import EndOfData
from trainers.runtime import multihost
from trainers.step.host_flags import UpdateStatus

DESYNC_TIMEOUT_S = 10.0
"""How long the hosts wait to exchange their batch indices for the error message. All hosts read the same status, so all of them
take part, unless one dies first."""


@dataclass
class Agreement:
    flags: Flags
    requests: HostRequests
    end_of_data: EndOfData = field(default_factory=lambda: EndOfData(None))
    window: Window = field(default_factory=Window)
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
        return self.flags.array(self._stop_request(batch_index), saves, skip, data_wait_s, batch_index)

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
