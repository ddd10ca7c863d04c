"""Who stopped making progress: limits for each phase of a training process, and a pure judge of its events against them.

Progress is a change of phase, another step (also one from before, after a rollback), or a save that ends; a process that is alive
and says so is none. All times are
of one monotonic clock that the caller reads: its own, so that a host whose clock is wrong is judged no differently.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cluster.agent.phases import FIRST_STEP, PHASES

NUM_STEP_TIMES = 256
"""The last ones, of which the median is taken."""


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """How long a training process may stay without progress, in seconds (configuration section `driver.watchdog`)."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    import_s: float = 300.0
    """From the order to go until its imports, configuration and data are ready; a warm standby is at once."""
    join_s: float = 120.0
    """For all hosts to find each other."""
    restore_s: float = 900.0
    compile_s: float = 1800.0
    first_step_s: float = 900.0
    step_floor_s: float = 60.0
    """A step may always take so long."""
    step_factor: float = 20.0
    """A step may take so many times the median step of this generation, if that is more than `step_floor_s`."""
    save_s: float = 900.0
    """From the start of a checkpoint until it is complete, or has failed, whatever the process does beside it."""
    evaluate_s: float = 900.0
    preview_s: float = 900.0
    """For the model to generate its previews, the first time compiling included."""
    finish_s: float = 900.0
    stacks_before_s: float = 3.0
    """How long before a limit the stacks are taken (at half the limit, if that is shorter): they come with the news."""

    def __post_init__(self):
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        wrong = [f"{name} = {value}: expected more than 0" for name, value in values.items() if not value > 0]
        if wrong:
            raise ValueError("\n".join(wrong))


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Something has made no progress: for nearly as long as it may (time to take stacks), or for longer."""

    phase: str
    limit_s: float
    waited_s: float
    overdue: bool


@dataclass(frozen=True)
class _Task:
    """What the process is at, and since when without progress."""

    phase: str
    since_s: float
    limit_s: float


class Watchdog:
    """Judges one process in one generation. Its owner sees to it that one thread at a time calls."""

    def __init__(self, config: WatchdogConfig, now_s: float):
        """From the order to go: the process is at its imports until it says otherwise."""
        self.config = config
        self._phase: str | None = "import"
        self._progress_s = now_s
        self._stepped = False
        self._position = 0
        self._last_step_s: float | None = None
        self._step_times_s: deque[float] = deque(maxlen=NUM_STEP_TIMES)
        self._saves: dict[int, float] = {}
        """Those in flight: when each began, by step."""
        self._suspected: set[tuple[str, float]] = set()
        self._told: set[str] = set()

    def note(self, event: Mapping[str, Any], now_s: float) -> None:
        """Takes in an event of the process, heartbeats included, as it arrives."""
        kind = event.get("ev")
        if kind == "phase":
            self._enter(event["phase"], now_s)
        elif kind == "joined":
            # A trainer of the user's own need not tell phases: then it is watched from its first step on.
            self._enter(None, now_s)
        elif kind == "first_step":
            self._stepped = True
            self._enter("train", now_s)
            self._position = event["step"]
            self._last_step_s = now_s
        elif kind == "heartbeat":
            self._take_position(max(event["step"], event["batch_index"]), now_s)
        elif kind == "saving":
            self._saves.setdefault(event["step"], now_s)
        elif kind in ("saved", "save_failed"):
            self._saves.pop(event["step"], None)
            self._progress_s = now_s  # the loop may have waited for this save
        elif kind == "done":
            self._enter("finish", now_s)

    def look(self, now_s: float) -> list[Alarm]:
        """What is suspicious, and what is overdue: each told once per stretch without progress, and overdue once per phase."""
        alarms = []
        for task in self._tasks():
            waited_s, stretch = now_s - task.since_s, (task.phase, task.since_s)
            if waited_s >= self._suspicious_after_s(task) and stretch not in self._suspected:
                self._suspected.add(stretch)
                alarms.append(_alarm(task, waited_s, overdue=False))
            if waited_s >= task.limit_s and task.phase not in self._told:
                self._told.add(task.phase)
                alarms.append(_alarm(task, waited_s, overdue=True))
        return alarms

    def next_look_s(self, now_s: float) -> float:
        """Seconds until `look` may find something, if no event comes before; infinite if never."""
        times = [time_s - now_s for task in self._tasks() for time_s in self._alarm_times_s(task)]
        return max(0.0, min(times, default=float("inf")))

    def suspicious(self, now_s: float) -> bool:
        """Whether something goes without progress for nearly as long as it may."""
        return any(now_s - task.since_s >= self._suspicious_after_s(task) for task in self._tasks())

    def _alarm_times_s(self, task: _Task) -> Iterator[float]:
        if (task.phase, task.since_s) not in self._suspected:
            yield task.since_s + self._suspicious_after_s(task)
        if task.phase not in self._told:
            yield task.since_s + task.limit_s

    def _suspicious_after_s(self, task: _Task) -> float:
        return task.limit_s - min(self.config.stacks_before_s, task.limit_s / 2)

    def _tasks(self) -> Iterator[_Task]:
        """The phase, and beside it the oldest save in flight."""
        phase = PHASES.get(self._phase or "")
        if self._phase == "train" and not self._stepped:
            yield _Task(FIRST_STEP, self._progress_s, self.config.first_step_s)
        elif self._phase == "train":
            yield _Task("train", self._progress_s, self._train_limit_s())
        elif phase is not None and phase.limit is not None:
            yield _Task(str(self._phase), self._progress_s, getattr(self.config, phase.limit))
        if self._saves:
            yield _Task("save", min(self._saves.values()), self.config.save_s)

    def _train_limit_s(self) -> float:
        """A loop that starts a save waits for the one before it: while one is in flight, its limit holds for the loop too."""
        median_s = statistics.median(self._step_times_s) if self._step_times_s else 0.0
        limit_s = max(self.config.step_floor_s, self.config.step_factor * median_s)
        return max(limit_s, self.config.save_s) if self._saves else limit_s

    def _enter(self, phase: str | None, now_s: float) -> None:
        self._phase, self._progress_s = phase, now_s
        self._last_step_s = None  # what lies between two stretches of training is no step

    def _take_position(self, position: int, now_s: float) -> None:
        """Any other position is progress: what is trained again after a rollback too."""
        if position == self._position:
            return
        if self._phase == "train":
            if self._last_step_s is not None and position > self._position:
                self._step_times_s.append((now_s - self._last_step_s) / (position - self._position))
            self._progress_s = self._last_step_s = now_s
        self._position = position


def _alarm(task: _Task, waited_s: float, overdue: bool) -> Alarm:
    return Alarm(phase=task.phase, limit_s=task.limit_s, waited_s=waited_s, overdue=overdue)
