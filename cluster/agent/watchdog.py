"""The watchdog: a pure class that checks the events of a process against the limits that came with its orders.

Progress is a change of phase, another step (also an earlier one, after a rollback), another batch of an evaluation, or a save
that ends. A heartbeat alone is not progress. All times are from one monotonic clock that the caller reads, so a host whose wall
clock is wrong changes nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from gangway.wire.events import Event
from gangway.wire.limits import FIRST_PHASE, FIRST_STEP, SAVE, STEPS, Limits

NUM_STEP_TIMES = 256
"""How many of the last step times the median is taken of."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A phase or a save has made no progress: for nearly its limit (time to take stacks), or for longer (`overdue`)."""

    phase: str
    limit_s: float
    waited_s: float
    overdue: bool


@dataclass(frozen=True)
class _Task:
    """One thing that has a limit, and since when it has made no progress."""

    phase: str
    since_s: float
    limit_s: float


class Watchdog:
    """Checks one process in one generation. Not thread-safe: the owner locks."""

    def __init__(self, limits: Limits, now_s: float):
        """Begins with the start order."""
        self.limits = limits
        self._phase: str | None = FIRST_PHASE
        self._progress_s = now_s
        self._stepped = False
        self._position = 0
        self._evaluated_batches = 0
        self._last_step_s: float | None = None
        self._step_times_s: deque[float] = deque(maxlen=NUM_STEP_TIMES)
        self._saves: dict[int, float] = {}
        """Saves in flight: the time when each began, by step."""
        self._suspected: set[tuple[str, float]] = set()
        self._reported: set[str] = set()

    def observe(self, event: Event, now_s: float) -> None:
        """Takes an event of the process, heartbeats included, as it arrives."""
        match event["ev"]:
            case "phase":
                self._enter(event["phase"], now_s)
            case "joined":
                # A user's trainer need not report phases: then it has no limit here until its first step.
                self._enter(None, now_s)
            case "first_step":
                self._stepped = True
                self._enter(STEPS, now_s)
                self._position = event["step"]
                self._last_step_s = now_s
            case "heartbeat":
                self._take_position(max(event["step"], event["batch_index"]), now_s)
                self._take_evaluated(event.get("evaluated_batches", 0), now_s)
            case "saving":
                self._saves.setdefault(event["step"], now_s)
            case "saved" | "save_failed":
                self._saves.pop(event["step"], None)
                self._progress_s = now_s  # the loop may have waited for this save
            case "done":
                self._enter("finish", now_s)

    def look(self, now_s: float) -> list[Alarm]:
        """Returns new alarms: `suspicious` once per period without progress, `overdue` once per phase."""
        alarms = []
        for task in self._tasks():
            waited_s, period = now_s - task.since_s, (task.phase, task.since_s)
            if waited_s >= self._suspicious_after_s(task) and period not in self._suspected:
                self._suspected.add(period)
                alarms.append(_alarm(task, waited_s, overdue=False))
            if waited_s >= task.limit_s and task.phase not in self._reported:
                self._reported.add(task.phase)
                alarms.append(_alarm(task, waited_s, overdue=True))
        return alarms

    def next_look_s(self, now_s: float) -> float:
        """Returns the seconds until `look` may return an alarm, if no event comes before; infinite if never."""
        times = [time_s - now_s for task in self._tasks() for time_s in self._alarm_times_s(task)]
        return max(0.0, min(times, default=float("inf")))

    @property
    def limited(self) -> bool:
        """Whether anything has a limit now. If not, the process reports nothing, and only its silence can be noticed."""
        return next(self._tasks(), None) is not None

    def suspicious(self, now_s: float) -> bool:
        """Returns whether something has made no progress for nearly its limit."""
        return any(now_s - task.since_s >= self._suspicious_after_s(task) for task in self._tasks())

    def _alarm_times_s(self, task: _Task) -> Iterator[float]:
        if (task.phase, task.since_s) not in self._suspected:
            yield task.since_s + self._suspicious_after_s(task)
        if task.phase not in self._reported:
            yield task.since_s + task.limit_s

    def _suspicious_after_s(self, task: _Task) -> float:
        return task.limit_s - min(self.limits.stacks_before_s, task.limit_s / 2)

    def _tasks(self) -> Iterator[_Task]:
        """Yields what has a limit now: the phase, and the oldest save in flight."""
        name, limit_s = self._phase_limit()
        if limit_s is not None:
            yield _Task(name, self._progress_s, limit_s)
        if self._saves and self.limits.save_s is not None:
            yield _Task(SAVE, min(self._saves.values()), self.limits.save_s)

    def _phase_limit(self) -> tuple[str, float | None]:
        """Returns the phase, by the watchdog's name for it, and its limit."""
        if self._phase != STEPS:
            return str(self._phase), self.limits.phases.get(self._phase or "")
        return (STEPS, self._step_limit_s()) if self._stepped else (FIRST_STEP, self.limits.first_step_s)

    def _step_limit_s(self) -> float | None:
        """Returns the limit of a step. While a save is in flight, it is at least `save_s`: a loop that starts the next save
        waits for the one before."""
        if self.limits.step_floor_s is None:
            return None
        median_s = statistics.median(self._step_times_s) if self._step_times_s else 0.0
        limit_s = max(self.limits.step_floor_s, self.limits.step_factor * median_s)
        return max(limit_s, self.limits.save_s or 0.0) if self._saves else limit_s

    def _enter(self, phase: str | None, now_s: float) -> None:
        self._phase, self._progress_s = phase, now_s
        self._last_step_s = None  # the time in another phase must not count as a step time

    def _take_position(self, position: int, now_s: float) -> None:
        """Takes the position of a heartbeat. Any other position is progress, an earlier one after a rollback too."""
        if position == self._position:
            return
        if self._phase == STEPS:
            if self._last_step_s is not None and position > self._position:
                self._step_times_s.append((now_s - self._last_step_s) / (position - self._position))
            self._progress_s = self._last_step_s = now_s
        self._position = position

    def _take_evaluated(self, num_batches: int, now_s: float) -> None:
        if num_batches != self._evaluated_batches and self._phase == "evaluate":
            self._progress_s = now_s
        self._evaluated_batches = num_batches


def _alarm(task: _Task, waited_s: float, overdue: bool) -> Alarm:
    return Alarm(phase=task.phase, limit_s=task.limit_s, waited_s=waited_s, overdue=overdue)
