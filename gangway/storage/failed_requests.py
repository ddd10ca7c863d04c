"""How many requests to buckets have failed in this process, and why: whoever reports of it asks here. Without JAX."""

from __future__ import annotations

import threading


class FailedRequests:
    """Counts failed requests. Threads may share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number, self._why = 0, ""

    def add(self, why: str) -> None:
        with self._lock:
            self._number, self._why = self._number + 1, why

    def take(self) -> tuple[int, str]:
        """Returns how many requests have failed since the last call, and why the last of them did; (0, "") if none has."""
        with self._lock:
            found = self._number, self._why
            self._number, self._why = 0, ""
        return found


HERE = FailedRequests()
"""Those of this process."""
