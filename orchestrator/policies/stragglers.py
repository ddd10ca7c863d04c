"""Finds stragglers: hosts that are persistently slower than the others. Pure: it reads no clock.

All hosts take the same time for a step, since each waits for the slowest one. What differs is how long a host was *busy*: the
seconds in which its loop was not waiting for the device.
"""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gangway.config.section import Section, require


@dataclass(frozen=True, kw_only=True)
class StragglerPolicy(Section):
    """A host is a straggler if it is busy `factor` times as long as the others' median, and that by `share` of a step's time,
    in each of the last `windows` windows of `window_s` seconds."""

    factor: float = 1.5
    """How many times as long as the others' median a straggler is busy."""
    share: float = 0.1
    """By how much longer it is busy at least, as a share of a step's time."""
    windows: int = 5
    """In how many windows in a row."""
    window_s: float = 10.0
    """The length of a window."""

    def __post_init__(self):
        require(self.factor > 1, f"factor = {self.factor}: expected more than 1")
        require(0 < self.share < 1, f"share = {self.share}: expected more than 0 and less than 1 (of a step's time)")
        require(self.windows >= 1, f"windows = {self.windows}: expected at least 1")
        require(self.window_s > 0, f"window_s = {self.window_s}: expected more than 0 (seconds)")


@dataclass(frozen=True)
class Straggler:
    host: int
    busy_s_per_step: float
    others_busy_s_per_step: float
    """The others' median."""
    step_s: float

    @property
    def summary(self) -> str:
        return (
            f"host {self.host} is slower than the others: busy {self.busy_s_per_step:.3f} s of each step of {self.step_s:.3f} s, "
            f"the others {self.others_busy_s_per_step:.3f} s"
        )


@dataclass(frozen=True)
class Sample:
    """The progress of a host at some time. Both numbers count from the beginning of its loop."""

    steps: int
    busy_s: float


class Stragglers:
    """Finds the stragglers of one generation from its heartbeats."""

    def __init__(self, num_hosts: int, policy: StragglerPolicy):
        self._num_hosts, self._policy = num_hosts, policy
        self._latest: dict[int, Sample] = {}
        self._before: dict[int, Sample] = {}
        self._began_at_s: float | None = None
        self._windows: deque[set[int]] = deque(maxlen=policy.windows)
        self._reported: set[int] = set()

    def observe(self, host: int, at_s: float, batch_index: int, busy_s: float) -> list[Straggler]:
        """Takes a heartbeat; returns new stragglers. A host is returned once, and again if it had caught up meanwhile."""
        self._latest[host] = Sample(batch_index, busy_s)
        if len(self._latest) < self._num_hosts:
            return []  # a host without a heartbeat has not begun its loop
        if self._began_at_s is None:
            self._began_at_s, self._before = at_s, dict(self._latest)
        elapsed_s = at_s - self._began_at_s
        if elapsed_s < self._policy.window_s:
            return []
        slow = slower_than_others(self._before, self._latest, elapsed_s, self._policy)
        # In any case: a window that could not tell must not make the next one longer.
        self._began_at_s, self._before = at_s, dict(self._latest)
        return [] if slow is None else self._add(slow)

    def _add(self, slow: Mapping[int, Straggler]) -> list[Straggler]:
        self._windows.append(set(slow))
        full = len(self._windows) == self._policy.windows
        persistent = set.intersection(*self._windows) if full else set()
        new = persistent - self._reported
        self._reported = persistent
        return [slow[host] for host in sorted(new)]


def slower_than_others(
    before: Mapping[int, Sample], after: Mapping[int, Sample], elapsed_s: float, policy: StragglerPolicy
) -> dict[int, Straggler] | None:
    """Returns the slow hosts of one window; None if the window cannot tell (a single host, no step, a loop that began again)."""
    steps = {host: after[host].steps - before[host].steps for host in after}
    if len(steps) < 2 or min(steps.values()) < 1:
        return None
    busy = {host: max(0.0, after[host].busy_s - before[host].busy_s) / steps[host] for host in after}
    step_s = elapsed_s / statistics.median(steps.values())
    slow, ordered = {}, sorted(busy.values())
    for host, busy_s in busy.items():
        others_s = _median_without(ordered, busy_s)
        if busy_s > policy.factor * others_s and busy_s - others_s > policy.share * step_s:
            slow[host] = Straggler(host, busy_s, others_s, step_s)
    return slow


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Returns the median of sorted values without one of them. It does not sort again, since a gang may have thousands of
    hosts."""
    skipped, num_left = bisect.bisect_left(ordered, value), len(ordered) - 1

    def left(index: int) -> float:
        return ordered[index if index < skipped else index + 1]

    return (left((num_left - 1) // 2) + left(num_left // 2)) / 2
