"""Who asks the gang to save and stop, and when: a person, a machine that goes away, machines that come back."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.config.job import JobConfig
from orchestrator.driver.errors import TrainingFailed
from orchestrator.driver.event_handler import Intake
from orchestrator.driver.generation import Generation
from orchestrator.driver.membership import Roster
from orchestrator.events import BoardLike
from orchestrator.policies import elasticity
from orchestrator.run_state.incidents import Action
from orchestrator.run_state.launch import Launch
from trainers.runtime.stop_reason import StopReason

STOP_TIMEOUT_S = 120.0
"""For the gang to save and stop on request; then it is killed."""
LOOK_AROUND_EVERY_S = 1.0
"""At the cluster: which nodes are drained, which slots have an agent (which also keeps the spares' agents)."""


class Stops:
    """A stop goes to all hosts as a wish; they agree on the step, save, and say that they are done."""

    def __init__(
        self,
        config: JobConfig,
        launch: Launch,
        board: BoardLike,
        intake: Intake,
        roster: Roster,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ):
        self.config, self.launch, self.board, self.intake, self.roster, self.clock = config, launch, board, intake, roster, clock
        self.monotonic = monotonic
        self._ordered_at_s: float | None = None
        """When a person's wish was passed on."""
        self._pausing: int | None = None
        """The generation that was told to save and stop, for another one to go on with other hosts."""
        self._looked_around_s = float("-inf")
        self._recorded: int | None = None
        """The version of the gang that its next driver would find."""

    def poll(self, generation: Generation, *, may_grow: bool) -> None:
        """Called every round of the watch. Raises TrainingFailed if a request cannot be met."""
        self._heed_request(generation)
        self._heed_notices(generation)
        if may_grow:
            self._consider_growing(generation)

    def _heed_request(self, generation: Generation) -> None:
        """Tells the hosts once; kills them if they do not stop in time."""
        reason = self.board.stop_requested()
        if reason is None:
            return
        if self._ordered_at_s is None:
            if not generation.training:
                raise TrainingFailed(f"stopped on request ({reason}) before the first step: there is nothing new to save")
            self._ordered_at_s = self.monotonic()
            self.intake.say("saving", f"stopping ({reason}): saving first")
            self._order_stop(reason)
        elif self.monotonic() - self._ordered_at_s > STOP_TIMEOUT_S:
            raise TrainingFailed(f"the hosts did not stop within {STOP_TIMEOUT_S:.0f} s of the request ({reason}); killed")

    def record_gang(self) -> None:
        """Has the gang written down if it has changed: its next driver must find an agent that came meanwhile."""
        if self._recorded != self.roster.gang.version:
            self._recorded = self.roster.gang.version
            self.launch.slots_changed(self.roster.gang.record())

    def _heed_notices(self, generation: Generation) -> None:
        """Before a machine is taken away: all hosts save at one step, and the next generation does without it."""
        roster, now_s = self.roster, self.monotonic()
        if now_s - self._looked_around_s >= LOOK_AROUND_EVERY_S:
            self._looked_around_s = now_s
            if generation.training:
                roster.gang.fill_unassigned()
            roster.gang.refresh()
            self.record_gang()
            for host in roster.hosts_on(roster.gang.draining_nodes()):
                generation.announce(host, "its node is drained")
        leaving = {host: notice["reason"] for host, notice in generation.notices.items() if notice.get("node")}
        for host, reason in leaving.items():
            slot = roster.gang.members[host]
            if slot.number not in roster.leaving:
                roster.leaving[slot.number] = reason
                self.intake.note(f"host {host} leaves ({reason}): saving, then going on without it", "warning")
        if leaving and generation.training and self._pausing != generation.number:
            self._pause(generation, StopReason.PREEMPTED)

    def _consider_growing(self, generation: Generation) -> None:
        """At a new checkpoint: more hosts, if there are some and if that repays its cost."""
        if not self.intake.new_checkpoint:
            return
        self.intake.new_checkpoint = False
        if self._pausing == generation.number or not generation.training or self.board.stop_requested():
            return
        verdict = elasticity.should_grow(
            generation.num_hosts,
            self.roster.possible(self.roster.quarantine(self.launch.history, self.clock())),
            remaining_steps=self._remaining_steps(generation),
            step_s=self.intake.step_s,
            cost_s=self._cost_of_a_restart_s(),
            policy=self.config.driver.elasticity,
        )
        if isinstance(verdict, elasticity.Grow):
            self.intake.note(f"more hosts are there: {verdict.reason}")
            self._pause(generation, StopReason.RESIZE)

    def _remaining_steps(self, generation: Generation) -> int | None:
        limit = self.config.training.max_num_steps
        return None if limit is None else max(0, limit - generation.step)

    def _cost_of_a_restart_s(self) -> float | None:
        """As this run has paid before, beside what it took to notice."""
        over = [i for i in self.launch.incidents if i.action in tuple(Action) and Action(i.action).restarts and not i.open]
        return max((i.total_s - i.recovery_s.get("detect", 0.0) for i in over[-3:]), default=None)

    def _pause(self, generation: Generation, reason: StopReason) -> None:
        self._pausing = generation.number
        self._order_stop(reason)

    def _order_stop(self, reason: str) -> None:
        for host in range(self.roster.size):
            self.roster.gang.call(host, "order", {"cmd": "stop", "reason": str(reason)})
