"""The end of a run whose `time_limit` has passed, whether its processes stop by themselves or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.gang.gang_like import Asked
from gangway.config.section import parse_duration_s
from gangway.stop_reason import StopReason
from gangway.wire import orders
from orchestrator.config.job import JobConfig
from orchestrator.driver.ending import TimeIsUp, TrainingFailed
from orchestrator.driver.event_handler import EventHandler
from orchestrator.driver.generation import Generation
from orchestrator.run_state.goodput import DriverState
from orchestrator.run_state.launch import Launch

ASK_AGAIN_S = 10.0
"""How often the hosts are asked to stop: a process that has no orders yet cannot take a request."""


class TimeLimit:
    """Asks the hosts to stop when the limit has passed. Ends the run if they do not, or if there is no gang then."""

    def __init__(
        self,
        config: JobConfig,
        launch: Launch,
        events: EventHandler,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ):
        self.launch, self.events = launch, events
        self.clock, self.monotonic = clock, monotonic
        self._text = config.training.time_limit
        self._limit_s = None if self._text is None else parse_duration_s(self._text)
        # A healthy gang may be in an evaluation, and then it saves.
        self._grace_s = config.driver.watchdog.evaluate_s + config.driver.watchdog.save_s
        self._asked_first_s: float | None = None
        self._asked_last_s = float("-inf")

    @property
    def asked(self) -> bool:
        """Whether the hosts were asked to stop."""
        return self._asked_first_s is not None

    @property
    def passed(self) -> bool:
        return self._limit_s is not None and self.launch.progress.time_used.seconds(self.clock()) >= self._limit_s

    def poll(self, generation: Generation, gang: Asked) -> None:
        """Called in every round of the poller. Raises TimeIsUp, or TrainingFailed, if the hosts do not stop in time."""
        if not self.passed:
            return
        now_s = self.monotonic()
        if self._asked_first_s is None:
            self._asked_first_s = now_s
            self.events.enter(DriverState.SAVING, f"stopping (the time limit, {self._text}): saving first")
        if now_s - self._asked_first_s > self._grace_s:
            self.end_run(f"the hosts did not stop within {self._grace_s:g} s of it and were ended at step {generation.step}")
        if now_s - self._asked_last_s >= ASK_AGAIN_S:
            self._asked_last_s = now_s
            for host in range(generation.num_hosts):
                # Not awaited: the hosts report by events that they have stopped.
                gang.tell(host, "order", orders.stop(StopReason.TIME_LIMIT))

    def check(self, activity: str) -> None:
        """Called where no gang trains. Raises TimeIsUp, or TrainingFailed, if the limit has passed."""
        if self.passed:
            self.end_run(activity)

    def end_run(self, how: str) -> None:
        """Raises TimeIsUp. Without a checkpoint all work is lost, so that is a failure: raises TrainingFailed."""
        message = f"the time limit ({self._text}) has passed: {how}"
        step = self.launch.progress.committed_step
        if step is None:
            raise TrainingFailed(f"{message}; there is no checkpoint")
        self.events.note(f"{message}; the last checkpoint is that of step {step}", "warning")
        raise TimeIsUp(message)

    def result(self) -> dict[str, Any]:
        """Returns the result of a run that TimeIsUp has ended."""
        return {"stop_reason": str(StopReason.TIME_LIMIT)}
