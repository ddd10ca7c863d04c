"""How long each host works at a step, at intervals, for the time line of a run."""

from __future__ import annotations

BATCHES = 20
"""The least length of an interval, in batches; it doubles with the run, so that a long run has no more lines than a short one."""
INTERVALS = 200


class HostTimes:
    """Keeps, for each host, the busy seconds at the beginning of the present interval. Pure."""

    def __init__(self) -> None:
        self._every = BATCHES
        self._first: dict[int, tuple[int, float]] = {}
        self._latest: dict[int, tuple[int, float]] = {}
        self._num_intervals = 0

    def observe(self, host: int, batch_index: int, busy_s: float) -> list[float] | None:
        """Takes what a heartbeat says: the busy seconds of its process so far. Returns the busy seconds of a step of each host,
        from host 0 on, when an interval has ended for all hosts; else None."""
        if self._went_back(host, batch_index, busy_s):
            self._first, self._latest = {}, {}
        self._first.setdefault(host, (batch_index, busy_s))
        self._latest[host] = (batch_index, busy_s)
        spans = {host: self._latest[host][0] - first for host, (first, _) in self._first.items()}
        if min(spans.values()) < self._every or [*sorted(spans)] != [*range(len(spans))]:
            return None
        shown = [round((self._latest[host][1] - self._first[host][1]) / spans[host], 6) for host in sorted(spans)]
        self._first = dict(self._latest)
        self._num_intervals += 1
        if self._num_intervals % INTERVALS == 0:
            self._every *= 2
        return shown

    def _went_back(self, host: int, batch_index: int, busy_s: float) -> bool:
        """Whether the process of the host is another one, whose seconds begin at 0, or has restored an older checkpoint.

        The present interval then has no end: it begins anew for all hosts, which may be others."""
        batches, seconds = self._latest.get(host, (batch_index, busy_s))
        return batch_index < batches or busy_s < seconds
