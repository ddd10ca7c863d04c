"""How much a disturbed run is slowed down, so that it does not end before its last fault."""

from __future__ import annotations

import time
from collections.abc import Callable

from orchestrator.faultlab.testbed.live_run import Run, step_of

FAULT_S, LONGEST_PACE_S, SLOWEST_PACE_S = 12.0, 0.15, 3.0
"""Steps are slowed down so that a fault's share of them lasts FAULT_S: by at most LONGEST_PACE_S a step. When most of the share
is used, or all takes long, it is by at most SLOWEST_PACE_S."""


class Pace:
    """Slows a run down, so that it does not end before its last fault.

    Each fault has its share of the steps that are left when its turn comes. A recovery may take longer than FAULT_S, as that
    of a driver on a busy machine, and the hosts go on meanwhile: steps get slower and slower when half of the share is used. So
    does the start of standbys, which nobody sees in the steps: those that are left must last as long as was waited already.
    """

    LOOK_S = 1.0

    def __init__(self, run: Run, max_steps: int | None, clock: Callable[[], float] = time.monotonic):
        self._run, self._max_steps, self._clock = run, max_steps, clock
        self._step = self._share = self._end = 0
        self._looked_s = self._began_s = 0.0
        self._now: float | None = None

    def share_out(self, faults_left: int) -> None:
        self._look()
        self._share = max(0, (self._max_steps or 0) - self._step) // faults_left
        self._end, self._began_s = self._step + self._share, self._looked_s
        self._set()

    def keep(self) -> None:
        """To be called while something is waited for."""
        if self._share and self._clock() - self._looked_s > self.LOOK_S:
            self._look()
            self._set()

    def _look(self) -> None:
        # Not what the driver has told: it may be gone. Without a checkpoint (they may be what is gone), what is known is kept.
        self._step = step_of(newest[-1]) if (newest := self._run.checkpoints()) else self._step
        self._looked_s = self._clock()

    def _set(self) -> None:
        pace = pace_s(self._share, self._end - self._step, self._looked_s - self._began_s)
        if pace != self._now:
            self._run.pace(pace)
            self._now = pace


def pace_s(share: int, left: int, waited_s: float) -> float | None:
    """Returns by how much to slow down each step when `left` steps are left of a fault's share; None: not at all."""
    if share <= 0:
        return None
    left = max(1, left)
    used = min(LONGEST_PACE_S, FAULT_S / share) * max(1.0, share / 2 / left)
    return min(SLOWEST_PACE_S, max(used, waited_s / left))
