"""How many requests this process has made to buckets, and how many bytes went over the network: what a bucket is paid for.
Without JAX."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

REQUESTS = ("put", "get", "head", "list", "delete")
"""The kinds of requests. Clouds take most for the first and the fourth, and nothing for the last."""


class Usage:
    """Requests and bytes, by kind: those of REQUESTS; `again`, those of them that were not the first try;
    `bytes_out` and `bytes_in`. Threads may share one."""

    def __init__(self, whole: Usage | None = None):
        """All that is added here is added to `whole`, too."""
        self._whole = whole
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
        self._others: list[Callable[[], Mapping[str, int]]] = []

    def add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)
        if self._whole is not None:
            self._whole.add(**counts)

    def add_source(self, source: Callable[[], Mapping[str, int]]) -> None:
        """Counts, too, what `source()` returns: all that a library has asked since this process began."""
        with self._lock:
            self._others.append(source)

    def take(self) -> dict[str, int]:
        """Returns what was asked since the last call; empty if nothing was."""
        with self._lock:
            total = self._total()
            new = {kind: number - self._taken[kind] for kind, number in total.items() if number > self._taken[kind]}
            self._taken = total
        return new

    def _total(self) -> Counter[str]:
        total = Counter(self._counts)
        for source in self._others:
            total.update(source())
        return total


HERE = Usage()
"""All of this process."""
