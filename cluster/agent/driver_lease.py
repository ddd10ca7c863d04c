"""Who may command an agent, and for how long it waits for a sign of life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class StaleDriver(Exception):
    """A newer driver leads this agent; who sees this has lost the run, and must leave it alone."""


class Lease:
    """Held by the driver with the newest epoch; every call of it renews the lease. Any thread may call."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic):
        self.lease_s, self._clock = lease_s, clock
        self.epoch = 0
        self._lock = threading.Lock()
        self._heard_at_s = clock()

    def renew(self, epoch: int) -> None:
        """Hears from the driver with this epoch. Raises StaleDriver if one with a newer epoch has been heard."""
        with self._lock:
            if epoch < self.epoch:
                raise StaleDriver(f"this driver's epoch is {epoch}, and a driver with epoch {self.epoch} leads this agent")
            self.epoch, self._heard_at_s = epoch, self._clock()

    def left_s(self) -> float:
        """Seconds until the lease ends; none or less: it has ended."""
        with self._lock:
            return self._heard_at_s + self.lease_s - self._clock()
