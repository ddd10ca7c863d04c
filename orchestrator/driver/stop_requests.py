"""Requests to save and stop the gang: from a person, before a machine is taken away, to grow when machines come back, and when
the `time_limit` of the run has passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.gang.gang_like import Asked
from gangway.config.section import parse_duration_s
from gangway.stop_reason import StopReason
from gangway.wire import orders
from orchestrator.config.job import JobConfig
from orchestrator.driver.ending import StoppedOnRequest, TimeIsUp, TrainingFailed
from orchestrator.driver.event_handler import EventHandler
from orchestrator.driver.generation import Generation
from orchestrator.driver.membership import Membership
from orchestrator.driver.states import Saving, saving
from orchestrator.policies import elasticity
from orchestrator.reporting.board import BoardLike
from orchestrator.run_state.incidents import Action
from orchestrator.run_state.launch import Launch

ASK_AGAIN_S = 10.0
"""How often the hosts are asked to stop: a process that has no orders yet cannot take a request."""
STOP_TIMEOUT_S = 120.0
"""How long the gang may take to save and stop on request; then it is killed."""
LOOK_AROUND_EVERY_S = 1.0
"""How often to look which nodes are drained and which slots have an agent. This also replaces dead agents of spares."""


class StopRequests:
    """Sends stop requests to all hosts. The hosts agree on a step, save, and report that they are done."""

    def __init__(
        self,
        config: JobConfig,
        launch: Launch,
        board: BoardLike,
        events: EventHandler,
        membership: Membership,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ):
        self.config, self.launch, self.board = config, launch, board
        self.events, self.membership = events, membership
        self.clock, self.monotonic = clock, monotonic
        self._looked_around_s = float("-inf")
        self._recorded: int | None = None
        """The version of the gang that is recorded for the next driver."""

    def poll(self, generation: Generation, *, may_grow: bool) -> None:
        """Called in every round of the poller. Raises StoppedOnRequest if a request cannot be fulfilled."""
        self._check_stop_request(generation)
        self._check_notices(generation)
        if may_grow:
            self._consider_growing(generation)

    def _check_stop_request(self, generation: Generation) -> None:
        """Sends a person's request to the hosts once. Raises StoppedOnRequest if they do not stop in time."""
        reason = self.board.stop_requested()
        if reason is None:
            return
        state, now_s = self.events.state, self.monotonic()
        ordered_at_s = state.stop_ordered_at_s if isinstance(state, Saving) else None
        if ordered_at_s is None:
            if not generation.training:
                raise StoppedOnRequest(f"stopped on request ({reason}) before the first step")
            saves = saving(state, generation.number, stop_ordered_at_s=now_s)
            self.events.enter(saves, f"stopping ({reason}): saving first")
            self._order_stop(reason)
        elif now_s - ordered_at_s > STOP_TIMEOUT_S:
            raise StoppedOnRequest(f"the hosts did not stop within {STOP_TIMEOUT_S:.0f} s of the request ({reason}); killed")

    def record_gang(self) -> None:
        """Records the gang if it has changed: the next driver must find new agents."""
        if self._recorded != self.membership.gang.version:
            self._recorded = self.membership.gang.version
            self.launch.slots_changed(self.membership.gang.record())

    def _check_notices(self, generation: Generation) -> None:
        """Before a machine is taken away: lets all hosts save at one step. The next generation goes on without it."""
        membership, now_s = self.membership, self.monotonic()
        if now_s - self._looked_around_s >= LOOK_AROUND_EVERY_S:
            self._looked_around_s = now_s
            if generation.training:  # not before: a new agent would slow the recovery down
                membership.gang.fill_unassigned()
            membership.gang.refresh()
            self.record_gang()
            for host in membership.hosts_on(membership.gang.draining_nodes()):
                generation.announce(host, "its node is drained")
        leaving = {host: notice["reason"] for host, notice in generation.notices.items() if notice.get("node")}
        for host, reason in leaving.items():
            slot = membership.gang.members[host]
            if slot.number not in membership.leaving:
                membership.leaving[slot.number] = reason
                self.events.note(f"host {host} leaves ({reason}): saving, then going on without it", "warning")
        if leaving and generation.training and not self._pausing:
            self._pause(generation, StopReason.PREEMPTED)

    def _consider_growing(self, generation: Generation) -> None:
        """At a new checkpoint: stops the gang to grow, if there are more hosts and that saves more time than it costs."""
        if not self.events.take_new_checkpoint() or not generation.training or self.board.stop_requested():
            return
        decision = elasticity.should_grow(
            generation.num_hosts,
            self.membership.possible(self.membership.quarantine(self.launch.progress.history, self.clock())),
            remaining_steps=self._remaining_steps(generation),
            step_s=self.events.step_s,
            cost_s=self._cost_of_a_restart_s(),
            policy=self.config.driver.elasticity,
        )
        if isinstance(decision, elasticity.Grow):
            self.events.note(f"more hosts are there: {decision.reason}")
            self._pause(generation, StopReason.RESIZE)

    def _remaining_steps(self, generation: Generation) -> int | None:
        limit = self.config.training.max_num_steps
        return None if limit is None else max(0, limit - generation.step)

    def _cost_of_a_restart_s(self) -> float | None:
        """Returns the largest cost of the last restarts of this run, without detection; None if there was none."""
        closed = [
            i for i in self.launch.progress.incidents if i.action in tuple(Action) and Action(i.action).restarts and not i.open
        ]
        return max((i.total_s - i.recovery_s.get("detect", 0.0) for i in closed[-3:]), default=None)

    @property
    def _pausing(self) -> bool:
        state = self.events.state
        return isinstance(state, Saving) and state.pauses

    def _pause(self, generation: Generation, reason: StopReason) -> None:
        self.events.enter(saving(self.events.state, generation.number, pauses=True))
        self._order_stop(reason)

    def _order_stop(self, reason: str) -> None:
        # Not awaited: the hosts report by events that they have stopped.
        for host in range(self.membership.size):
            self.membership.gang.tell(host, "order", orders.stop(reason))


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
            saves = saving(self.events.state, generation.number)
            self.events.enter(saves, f"stopping (the time limit, {self._text}): saving first")
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
