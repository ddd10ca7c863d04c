"""Who may command an agent, and for how long it waits for a sign of life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class StaleDriver(Exception):
    """A newer driver leads this agent; who sees this has lost the run, and must leave it alone."""


class Lease:
    """Held by the driver with the newest term; every call of it renews the lease. Any thread may call."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic):
        self.lease_s, self._clock = lease_s, clock
        self.driver_term = 0
        self._lock = threading.Lock()
        self._heard_at_s = clock()

    def renew(self, driver_term: int) -> None:
        """Hears from the driver with this term. Raises StaleDriver if one with a newer term has been heard."""
        with self._lock:
            if driver_term < self.driver_term:
                raise StaleDriver(
                    f"this driver's term is {driver_term}, and a driver with term {self.driver_term} leads this agent"
                )
            self.driver_term, self._heard_at_s = driver_term, self._clock()

    def left_s(self) -> float:
        """Seconds until the lease ends; none or less: it has ended."""
        with self._lock:
            return self._heard_at_s + self.lease_s - self._clock()
