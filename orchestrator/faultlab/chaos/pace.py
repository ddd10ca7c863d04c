"""How much a disturbed run is slowed down, so that it does not end before its last fault."""

from __future__ import annotations

import time

from orchestrator.faultlab.testbed.live_run import Run, step_of

FAULT_S, LONGEST_PACE_S, SLOWEST_PACE_S = 12.0, 0.15, 1.5
"""Steps are slowed down so that a fault's share of them lasts FAULT_S: by at most LONGEST_PACE_S a step, and when most of the
share is used, by at most SLOWEST_PACE_S."""


class Pace:
    """Slows a run down, so that it does not end before its last fault.

    Each fault has its share of the steps that are left when its turn comes. A recovery may take longer than FAULT_S, as that
    of a driver on a busy machine, and the hosts go on meanwhile: steps get slower and slower when half of the share is used.
    """

    LOOK_S = 1.0

    def __init__(self, run: Run, max_steps: int | None):
        self._run, self._max_steps = run, max_steps
        self._step = self._share = self._end = 0
        self._looked_s = 0.0
        self._now: float | None = None

    def share_out(self, faults_left: int) -> None:
        self._look()
        self._share = max(0, (self._max_steps or 0) - self._step) // faults_left
        self._end = self._step + self._share
        self._set()

    def keep(self) -> None:
        """To be called while something is waited for."""
        if self._share and time.monotonic() - self._looked_s > self.LOOK_S:
            self._look()
            self._set()

    def _look(self) -> None:
        # Not what the driver has told: it may be gone. Without a checkpoint (they may be what is gone), what is known is kept.
        self._step = step_of(newest[-1]) if (newest := self._run.checkpoints()) else self._step
        self._looked_s = time.monotonic()

    def _set(self) -> None:
        pace = pace_s(self._share, self._end - self._step)
        if pace != self._now:
            self._run.pace(pace)
            self._now = pace


def pace_s(share: int, left: int) -> float | None:
    """Returns by how much to slow down each step when `left` steps are left of a fault's share; None: not at all."""
    if share <= 0:
        return None
    return min(SLOWEST_PACE_S, min(LONGEST_PACE_S, FAULT_S / share) * max(1.0, share / 2 / max(1, left)))
