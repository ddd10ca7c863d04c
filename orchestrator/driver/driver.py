"""The driver: reserves the gang, starts generations, watches them, and decides what follows. It computes nothing itself.

The gang does not need it: agents and their places are held by the cluster, and training goes on while no driver lives. A driver
that finds the gang of the one before it takes it over. It never waits for storage, and in every wait it hears a request to stop.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from cluster.agent.machine import with_port
from cluster.gang import acquire as ray_gangs
from cluster.gang.acquire import AdoptError, GangTimeout, StaleDriver
from cluster.gang.calls import AgentGone, AwakeClock, NoAnswer, gather
from cluster.gang.gang import Gang
from orchestrator.config.job import JobConfig
from orchestrator.driver.ask_hosts import ask_hosts
from orchestrator.driver.errors import Superseded, TrainingFailed
from orchestrator.driver.event_handler import Intake
from orchestrator.driver.generation import Finished, Generation, Paused
from orchestrator.driver.halt import (
    AGENT_TIMEOUT_S,
    Findings,
    Halt,
    final_error,
    find_cause,
    late_events,
    lost_hosts,
    stacks_folder,
    write_stacks,
)
from orchestrator.driver.membership import Change, NoHosts, Roster
from orchestrator.driver.poller import Watch
from orchestrator.driver.precompile import Precompilations
from orchestrator.driver.ray_train import Reporter
from orchestrator.driver.stop_requests import Stops
from orchestrator.events import BoardLike
from orchestrator.failures.classify import Failure, FailureKind
from orchestrator.failures.history import PastFailure, past_failure
from orchestrator.policies.restart import GiveUp, decide
from orchestrator.reporting import text
from orchestrator.run_state import replay
from orchestrator.run_state.incidents import Action, Incident
from orchestrator.run_state.launch import Launch
from orchestrator.run_state.replay import ReplayError, ReplayPlan, Segment
from orchestrator.tracking.prometheus import Gauges
from trainers.recorders.dispatch import Recorders
from trainers.runtime.stop_reason import StopReason
from trainers.storage import documents

NO_GENERATION = -1
"""In the record of a gang that has no orders yet."""
FIRST_RECORD_TIMEOUT_S = 5.0
"""For the storage to take the first record of a gang."""


class Driver:
    """One driver process's part in a launch. `run` returns the summary of a finished or stopped run, or raises TrainingFailed.

    Everything from outside is an argument: `gangs` makes gangs (the module `cluster.gang.acquire`), `clock` is the wall clock
    for what is told, `monotonic` and `sleep` are for waits.
    """

    def __init__(
        self,
        config: JobConfig,
        launch: Launch,
        board: BoardLike,
        reporter: Reporter,
        recorders: Recorders,
        *,
        gangs: ModuleType | Any = ray_gangs,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.config, self.launch, self.board, self.gangs = config, launch, board, gangs
        self.clock, self.monotonic, self.sleep = clock, monotonic, sleep
        self.intake = Intake(launch, board, reporter, recorders, Gauges(config.training.name), config.driver.stragglers, clock)
        self.replay_plan = self._replay_plan()
        self._roster: Roster | None = None
        self._stops: Stops
        self._precompilations: Precompilations
        self._told_storage_problem: str | None = None

    def run(self) -> dict[str, Any]:
        for problem in self.launch.problems:
            self.intake.note(problem, "warning")
        try:
            result = self._train()
        except (Superseded, StaleDriver) as error:
            self.launch.stop()
            if not self.launch.lease.superseded_by(self.launch.launch_id):
                self._release()
            raise Superseded(f"another driver has taken the run in {self.launch.run_dir}; this one leaves") from error
        except TrainingFailed:
            self._release()
            raise
        self._release()
        return result

    def _train(self) -> dict[str, Any]:
        generation = self._adopt() or self._first_generation()
        while True:
            end = Watch(self.roster.gang, generation, self.intake, self.monotonic).run(self._between_polls)
            if isinstance(end, Finished):
                return self._result(end)
            detected_s = self.clock()
            findings = self._halt(generation)
            match generation.end:  # the hosts may have told more, at the last moment
                case Finished() as end:
                    return self._result(end)
                case Paused() as end if self.board.stop_requested():
                    return self._result(end)
                case Paused() as end:
                    incident = self._resized(generation, end, findings, detected_s)
                case _:
                    incident = self._failed(generation, findings, detected_s)
            generation = self._go_on(generation, incident, findings)

    @property
    def roster(self) -> Roster:
        assert self._roster is not None
        return self._roster

    # ------------------------------------------------------------------ machines

    def _adopt(self) -> Generation | None:
        """The generation that the driver before left, if its gang lives; else what is left of it is cleared away."""
        left, now_s = self.launch.gang, self.clock()
        if left is None:
            if self.launch.drivers > 1:
                self.launch.gang_lost(now_s, "it had none")
            return None
        try:
            gang = self.gangs.adopt(
                self.config.hosts,
                self._name_in_cluster(),
                left["gang"],
                check_stop=self._check_lease,  # a request to stop is for the gang to save
                **self._about_agents(),
            )
        except AdoptError as error:
            self.intake.post_incident(self.launch.gang_lost(now_s, str(error)))
            return None
        self._take(gang)
        gang.prepare(self._preparation())
        number = gang.leads[0]["generation"]
        if number != left["generation"]:
            self.launch.adopt_generation(number)
        generation = Generation(number, len(gang.members), high_water_step=left["high_water_step"], began_at_s=left["began_at_s"])
        self.intake.start(generation)
        self._catch_up(generation)
        self.intake.post_incident(self.launch.adopted(now_s, generation.step))
        self.intake.say("training")
        return generation

    def _catch_up(self, generation: Generation) -> None:
        """Tells the hosts that they are this driver's now, and takes in what the agents told while nobody asked."""
        order = {"cmd": "fence", "path": self.launch.lease.fence}
        self._ask_all(generation, "order", order)  # under the fence of the driver before, no checkpoint can be committed any more
        answers = self._ask_all(generation, "poll", 0, 0.0)
        self.intake.catch_up(generation, answers)
        for host, answer in answers.items():
            if not answer["host_state"]["alive"]:
                generation.find_dead(host)  # halted by the driver before, which tells no event

    def _ask_all(self, generation: Generation, method: str, *args: Any) -> dict[int, Any]:
        """What the hosts' agents answer."""
        gang = self.roster.gang
        limits_s = dict.fromkeys(range(generation.num_hosts), AGENT_TIMEOUT_S)
        return ask_hosts(gang, generation, lambda host: gang.call(host, method, *args), limits_s, self.monotonic)

    def _first_generation(self) -> Generation:
        self.intake.say("reserving")
        self.launch.goodput.switch("schedule", self.clock())
        name = self._name_in_cluster()
        self.gangs.clear(name, check_stop=self._check_lease)
        check_stop = partial(self._check_stop, "machines are being reserved")
        try:
            gang = self.gangs.reserve(self.config.hosts, name, check_stop=check_stop, **self._about_agents())
        except GangTimeout as error:
            raise TrainingFailed(str(error)) from error
        self._take(gang)
        self._form()
        self.launch.formed(self._record(Generation(NO_GENERATION, 0, began_at_s=self.clock())))
        self.launch.flush(FIRST_RECORD_TIMEOUT_S)  # without it, the next driver would not know of the agents at all
        self.launch.goodput.switch("import", self.clock())
        self.intake.say("importing")
        gang.prepare(self._preparation())
        return self._start_generation()

    def _take(self, gang: Gang) -> None:
        self._roster = Roster(self.config, gang, self.monotonic)
        about = (self.config, self.launch, self.board, self.intake, self._roster, self.clock, self.monotonic)
        self._stops = Stops(*about)
        self._precompilations = Precompilations(self.config, self.launch, self.intake, self._roster, self.monotonic)

    def _about_agents(self) -> dict[str, Any]:
        return {
            "log_dir": documents.join(self.launch.run_dir, "logs"),
            "driver_term": self.launch.lease.driver_term,
            "lease_s": self.config.driver.agent_lease_s,
        }

    def _name_in_cluster(self) -> str:
        """Two runs of one name in different storages may share a cluster."""
        return f"{self.config.training.name}-{hashlib.sha256(self.launch.run_dir.encode()).hexdigest()[:6]}"

    def _preparation(self) -> dict[str, Any]:
        return {
            "cmd": "prepare",
            "arguments_class": self.config.arguments_class,
            "arguments": dataclasses.asdict(self.config.training),
        }

    def _form(self, lost: tuple[int, ...] = ()) -> Change:
        avoid = self.roster.quarantine(self.launch.history, self.clock())
        try:
            return self.roster.form(
                lost,
                avoid=avoid,
                wanted=self._segment().num_hosts,
                waiting=self._wait_for_machines,
                check_stop=partial(self._check_stop, "the run waits for machines"),
            )
        except NoHosts as error:
            raise TrainingFailed(str(error)) from error

    def _wait_for_machines(self, missing: str) -> None:
        self.launch.goodput.switch("schedule", self.clock())
        self.intake.say("reserving", f"waiting for machines: {missing}")

    def _check_lease(self) -> None:
        if self.launch.lease_lost.is_set():
            raise Superseded
        self.launch.tick()

    def _check_stop(self, doing: str) -> None:
        """Called in every wait in which no gang trains. Raises TrainingFailed if a person wants the run to stop."""
        self._check_lease()
        if self._roster is not None:
            self._stops.record_gang()
        if reason := self.board.stop_requested():
            raise TrainingFailed(f"stopped on request ({reason}) while {doing}: there is nothing new to save")

    def _release(self) -> None:
        if self._roster is not None:
            self.roster.gang.release()

    # ------------------------------------------------------------------ a generation

    def _start_generation(self) -> Generation:
        gang, launch = self.roster.gang, self.launch
        generation = Generation(
            launch.next_generation(), len(gang.members), high_water_step=launch.high_water_step, began_at_s=self.clock()
        )
        address, stretch = self._coordinator(), self._segment()
        common = {
            "cmd": "go",
            "generation": generation.number,
            "num_hosts": generation.num_hosts,
            "coordinator": address,
            "restore_from": launch.saved_path,
            "program_key": launch.launch_id,
            "stop_at": stretch.stop_at,
            "skip_batches": list(stretch.skip_batches),
            "fence": launch.lease.fence,
            "run": launch.committed.run,
            "committed_step": launch.committed.step,
            "driver_term": launch.lease.driver_term,
            "limits": dataclasses.asdict(self.config.driver.watchdog),
        }
        # Before the orders. If it is not written when this driver dies, the agents tell the next one what they were ordered.
        launch.formed(self._record(generation))
        for host in range(generation.num_hosts):
            gang.call(host, "go", {**common, "host": host, **gang.orders(host)})
        self.intake.start(generation)
        self.board.post({"ev": "generation", "generation": generation.number, "hosts": generation.num_hosts})
        return generation

    def _record(self, generation: Generation) -> dict[str, Any]:
        """What the next driver needs to take the generation over."""
        return {
            "address": self.roster.gang.cluster_address(),
            "gang": self.roster.gang.record(),
            "generation": generation.number,
            "high_water_step": generation.high_water_step,
            "began_at_s": generation.began_at_s,
        }

    def _coordinator(self) -> str:
        """Host 0's address with a port never used before: joining an old service again is refused."""
        gang = self.roster.gang
        answer = gather(gang.mailbox(), lambda host: gang.call(host, "describe"), {0: AGENT_TIMEOUT_S}, self.monotonic)[0]
        if isinstance(answer.error, AgentGone | NoAnswer):
            return "0.0.0.0:1"  # the generation fails at once, and host 0 is known to be lost then
        if answer.error is not None:
            raise answer.error
        return with_port(answer.value["host_ip"], answer.value["next_port"])

    def _segment(self) -> Segment:
        """What the next generation is to do: anything, or its part of the lineage that is replayed."""
        return self.replay_plan.segment_at(self.launch.checkpoint_step or 0) if self.replay_plan else Segment()

    def _replay_plan(self) -> ReplayPlan | None:
        path = self.config.driver.replay
        try:
            return replay.read(path) if path else None
        except ReplayError as error:
            raise TrainingFailed(str(error)) from error

    # ------------------------------------------------------------------ while it trains

    def _between_polls(self, generation: Generation) -> None:
        """What the driver looks at between its polls."""
        self._check_lease()
        free = self.replay_plan is None
        if free:
            self._precompilations.poll(generation)
        # It trains on while a larger gang's programs are compiled, instead of stopping for that.
        self._stops.poll(generation, may_grow=free and not self._precompilations.busy)
        if (problem := self.launch.storage_problem) and problem != self._told_storage_problem:
            self.intake.note(problem, "warning")
        self._told_storage_problem = problem

    # ------------------------------------------------------------------ when it ends

    def _halt(self, generation: Generation) -> Findings:
        """Kills what is left of the generation, and finds out what happened."""
        halt = Halt(self.roster.gang, generation, self.monotonic)
        answers = halt.run(self.launch.seen, self._wait_for_deaths)
        asked_at_s = self.clock() - (self.monotonic() - halt.began_s)
        self.intake.catch_up(generation, late_events(answers))
        return find_cause(generation, answers, asked_at_s)

    def _wait_for_deaths(self, hosts: Sequence[int]) -> None:
        self._check_lease()
        names = ", ".join(map(str, hosts))
        self.intake.say("recovering", f"host {names}: the killed process takes long to end")

    def _resized(self, generation: Generation, end: Paused, findings: Findings, paused_s: float) -> Incident:
        """The incident of a generation that stopped on purpose."""
        self.launch.goodput.switch("recovery", paused_s)
        failure = findings.failure  # they have saved, and are only shutting down
        said = "; ".join(f"host {host}: {notice['reason']}" for host, notice in generation.notices.items())
        incident = Incident(
            kind=FailureKind.PREEMPTION if end.stop_reason == StopReason.PREEMPTED else "resize",
            host=next(iter(generation.notices), None),
            generation=generation.number,
            step=generation.step,
            failed_at_s=generation.all_entered_s("save") or paused_s,
            evidence={"summary": f"saved and stopped at step {generation.step} ({said or end.stop_reason})"},
        )
        incident.mark("save", paused_s)
        incident.mark("halt", self.clock())
        self.launch.checkpoint_step = max(self.launch.checkpoint_step or 0, generation.step)
        if lost_hosts(generation) and failure.kind == FailureKind.HOST_LOST:  # meanwhile, and unannounced
            incident.kind, incident.host = failure.kind, failure.host
            incident.evidence["summary"] += f"; then {failure.summary}"
            self.launch.failed(self._past(generation, failure, paused_s), incident)
        else:
            self.launch.record(incident)
        return incident

    def _failed(self, generation: Generation, findings: Findings, detected_s: float) -> Incident:
        """The incident of a generation that failed, after any back-off. Raises TrainingFailed to give up."""
        launch, failure = self.launch, findings.failure
        # A host's clock may have been set since.
        failed_at_s = min(max(failure.failed_at_s or detected_s, generation.began_at_s), detected_s)
        launch.high_water_step = max(launch.high_water_step, findings.last_step)
        launch.goodput.switch("detection", failed_at_s)
        launch.goodput.switch("recovery", detected_s)
        incident = Incident(
            kind=failure.kind,
            host=failure.host,
            generation=generation.number,
            step=failure.step if failure.step is not None else generation.step,
            failed_at_s=failed_at_s,
            evidence={**failure.evidence, "collateral": list(failure.collateral)},
        )
        incident.mark("detect", detected_s)
        incident.mark("halt", self.clock())
        launch.failed(self._past(generation, failure, failed_at_s), incident)
        decision = decide(launch.history, self.config.driver.restart)
        if isinstance(decision, GiveUp):
            self._keep_stacks(incident, findings.stacks)
            self._give_up(incident, decision.reason)
            raise TrainingFailed(final_error(failure, decision.reason))
        if self.board.stop_requested():
            raise TrainingFailed(f"stopped on request while it was failing: {failure.summary}")
        if decision.delay_s:
            self._back_off(decision.delay_s, text.waiting(decision.delay_s, decision.left_s, failure.summary))
        return incident

    def _go_on(self, generation: Generation, incident: Incident, findings: Findings) -> Generation:
        """The generation that follows. Raises TrainingFailed if there are no machines for it."""
        self.intake.say("recovering")
        try:
            change = self._form(lost_hosts(generation))
        except TrainingFailed as error:
            self._give_up(incident, str(error))
            raise
        incident.action, incident.detail = change.action, change.detail
        incident.hosts_before, incident.hosts_after = change.before, change.after
        self.launch.goodput.switch("recovery", self.clock())
        incident.mark("decide", self.clock())
        following = self._start_generation()
        if not generation.finished:
            self._keep_stacks(incident, findings.stacks)
        self.launch.update(incident)
        self.intake.post_incident(incident)
        return following

    def _keep_stacks(self, incident: Incident, texts: Mapping[int, str]) -> None:
        number = self.launch.num_incidents
        folder = stacks_folder(self.launch.run_dir, number)
        if texts:
            self.launch.write_beside(f"the stacks of incident {number}", lambda: write_stacks(folder, texts))
            incident.evidence["stacks"] = folder

    def _give_up(self, incident: Incident, reason: str) -> None:
        incident.action, incident.detail = Action.GIVE_UP, reason
        self.launch.update(incident)
        self.intake.post_incident(incident)

    def _past(self, generation: Generation, failure: Failure, failed_at_s: float) -> PastFailure:
        slot = self.roster.gang.members[failure.host] if failure.host is not None else None
        number, node_id = (slot.number, slot.node_id) if slot is not None else (None, None)
        return past_failure(
            failure,
            self.launch.checkpoint_step,
            generation=generation.number,
            trained=bool(generation.first_step_at_s),
            slot=number,
            node_id=node_id,
            at_s=failed_at_s,
        )

    def _back_off(self, delay_s: float, message: str) -> None:
        self.launch.goodput.switch("idle", self.clock())
        self.intake.say("recovering", message)
        awake_s = AwakeClock(self.monotonic)
        while (left_s := delay_s - awake_s()) > 0:
            self._check_stop(f"waiting {delay_s:.0f} s before the next try")
            self.roster.gang.refresh(members=True)
            self.sleep(min(0.5, left_s))
        self.launch.goodput.switch("recovery", self.clock())

    def _result(self, end: Finished | Paused) -> dict[str, Any]:
        self.launch.goodput.switch("finish", self.clock())
        # Of a pause: a request to stop came at the same time.
        reason = end.stop_reason if isinstance(end, Finished) else self.board.stop_requested() or end.stop_reason
        return {**end.result, "stop_reason": reason}
