"""The lease that a driver holds on an agent: which driver may command it, and how long the agent lives without one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class StaleDriver(Exception):
    """The agent has a newer driver. The caller has lost the run and must not touch it any more."""


class Lease:
    """The driver with the newest term holds the lease; each of its calls renews it. Thread-safe."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic):
        self.lease_s, self._clock = lease_s, clock
        self.driver_term = 0
        self._lock = threading.Lock()
        # From the beginning: an agent that no driver ever calls has to end too.
        self._renewed_at_s = clock()

    def renew(self, driver_term: int) -> None:
        """Renews the lease for the driver with this term. Raises StaleDriver if a driver with a newer term has called before."""
        with self._lock:
            # An equal term passes: it is another call of the same driver.
            if driver_term < self.driver_term:
                raise StaleDriver(
                    f"this driver's term is {driver_term}, and a driver with term {self.driver_term} leads this agent"
                )
            self.driver_term, self._renewed_at_s = driver_term, self._clock()

    def left_s(self) -> float:
        """Returns the seconds until the lease ends; 0 or less if it has ended."""
        with self._lock:
            return self._renewed_at_s + self.lease_s - self._clock()
