"""The lease that a driver holds on an agent: which driver may command it, and how long the agent lives without one. Pure."""

from __future__ import annotations


class StaleDriver(Exception):
    """The agent has a newer driver. The caller has lost the run and must not touch it any more."""


class Lease:
    """The driver with the newest term holds the lease; each of its calls renews it. All times are of one monotonic clock."""

    def __init__(self, lease_s: float, now_s: float):
        self.lease_s = lease_s
        self.driver_term = 0
        # From the beginning: an agent that no driver ever calls has to end too.
        self._renewed_at_s = now_s

    def renew(self, driver_term: int, now_s: float) -> None:
        """Renews the lease for the driver with this term. Raises StaleDriver if a driver with a newer term has called before."""
        # An equal term passes: it is another call of the same driver.
        if driver_term < self.driver_term:
            raise StaleDriver(f"this driver's term is {driver_term}, and a driver with term {self.driver_term} leads this agent")
        self.driver_term, self._renewed_at_s = driver_term, now_s

    def left_s(self, now_s: float) -> float:
        """Returns the seconds until the lease ends; 0 or less if it has ended."""
        return self._renewed_at_s + self.lease_s - now_s
