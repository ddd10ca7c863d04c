"""The driver: reserves the gang, starts generations, watches them, and decides what follows. It computes nothing itself.

The gang does not need it: agents and their places are held by the cluster, and training goes on while no driver lives. A driver
that finds the gang of the one before it takes it over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from typing import Any

import ray

from cluster import gang as gangs
from cluster.gang import Gang, GangTimeout, StaleDriver
from orchestrator import replay, storage
from orchestrator.board import BoardLike
from orchestrator.config import JobConfig
from orchestrator.failures import Failure, FailureKind
from orchestrator.gauges import Gauges
from orchestrator.generation import Generation
from orchestrator.intake import Intake
from orchestrator.launch import Launch
from orchestrator.ledger import Action, Incident
from orchestrator.post_mortem import AGENT_TIMEOUT_S, Findings, epitaph, examine, keep_stacks, lost_hosts
from orchestrator.ray_train import Reporter
from orchestrator.rehearsals import Rehearsals
from orchestrator.replay import Lineage, ReplayError, Stretch
from orchestrator.restart import GiveUp, PastFailure, decide, past_failure
from orchestrator.roster import Change, NoHosts, Roster
from orchestrator.stops import Stops, Superseded, TrainingFailed
from orchestrator.watch import Watch
from trainers.recorders.feed import Recorders
from trainers.stop_reason import StopReason

RESTARTING = (StopReason.RESIZE, StopReason.PREEMPTED)
"""Stops that another generation follows."""


class Driver:
    """One driver process's part in a launch. `run` returns the summary of a finished or stopped run, or raises TrainingFailed."""

    def __init__(
        self,
        config: JobConfig,
        launch: Launch,
        board: BoardLike,
        reporter: Reporter,
        recorders: Recorders,
        clock: Callable[[], float] = time.time,
    ):
        self.config, self.launch, self.board, self.clock = config, launch, board, clock
        self.intake = Intake(launch, board, reporter, recorders, Gauges(config.training.name), config.driver.stragglers, clock)
        self.lineage = self._lineage_to_replay()
        self._roster: Roster | None = None
        self._stops: Stops
        self._rehearsals: Rehearsals
        self._told_storage_problem: str | None = None

    def run(self) -> dict[str, Any]:
        try:
            generation = self._adopt() or self._first_generation()
            while True:
                Watch(self.roster.gang, generation, self.intake).run(self._attend)
                if generation.finished and not self._goes_on(generation):
                    break
                generation = self._follow_up(generation)
            result = self._result(generation)
        except (Superseded, StaleDriver) as error:
            if not self.launch.lease.succeeded_by(self.launch.launch_id):
                self._release()
            raise Superseded(f"another driver has taken the run in {self.launch.run_dir}; this one leaves") from error
        except TrainingFailed:
            self._release()
            raise
        self._release()
        return result

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
            gang = gangs.adopt(self.config.hosts, self._name_in_cluster(), left["gang"], **self._about_agents())
        except gangs.AdoptError as error:
            self.intake.post_incident(self.launch.gang_lost(now_s, str(error)))
            return None
        self._take(gang)
        gang.prepare(self._preparation())
        generation = Generation(left["generation"], len(gang.members), high_water_step=left["high_water_step"])
        self.intake.start(generation)
        for host in range(generation.num_hosts):
            gang.call(host, "order", {"cmd": "fence", "path": self.launch.lease.fence})
        self._catch_up(generation)
        self.intake.post_incident(self.launch.adopted(now_s, generation.step))
        self.intake.say("training")
        return generation

    def _catch_up(self, generation: Generation) -> None:
        """Takes in what the agents told while nobody asked."""
        gang = self.roster.gang
        polls = [gang.call(host, "poll", 0, 0.0) for host in range(generation.num_hosts)]
        answers = {}
        for host, poll in enumerate(polls):
            try:
                answers[host] = ray.get(poll, timeout=AGENT_TIMEOUT_S)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                generation.broken.setdefault(host, "agent")
        self.intake.catch_up(generation, answers)
        for host, answer in answers.items():
            if not answer["host_state"]["alive"] and host not in generation.done:
                generation.broken.setdefault(host, "exit")  # halted by the driver before, which tells no event

    def _first_generation(self) -> Generation:
        self.intake.say("reserving")
        self.launch.goodput.switch("schedule", self.clock())
        name = self._name_in_cluster()
        gangs.clear(name)
        try:
            gang = gangs.reserve(self.config.hosts, name, **self._about_agents())
        except GangTimeout as error:
            raise TrainingFailed(str(error)) from error
        self._take(gang)
        self._form()
        self.launch.goodput.switch("import", self.clock())
        self.intake.say("importing")
        gang.prepare(self._preparation())
        return self._start_generation()

    def _take(self, gang: Gang) -> None:
        self._roster = Roster(self.config, gang)
        self._stops = Stops(self.config, self.launch, self.board, self.intake, self._roster, self.clock)
        self._rehearsals = Rehearsals(self.config, self.launch, self.intake, self._roster)

    def _about_agents(self) -> dict[str, Any]:
        return {
            "log_dir": storage.join(self.launch.run_dir, "logs"),
            "epoch": self.launch.lease.epoch,
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
            return self.roster.form(lost, avoid=avoid, wanted=self._stretch().num_hosts, waiting=self._wait_for_machines)
        except NoHosts as error:
            raise TrainingFailed(str(error)) from error

    def _wait_for_machines(self) -> None:
        self.launch.goodput.switch("schedule", self.clock())
        self.intake.say("reserving", "waiting for machines")

    def _release(self) -> None:
        if self._roster is not None:
            self.roster.gang.release()

    # ------------------------------------------------------------------ a generation

    def _start_generation(self) -> Generation:
        gang, launch = self.roster.gang, self.launch
        generation = Generation(launch.next_generation(), len(gang.members), high_water_step=launch.high_water_step)
        address, stretch = self._coordinator(), self._stretch()
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
            "limits": dataclasses.asdict(self.config.driver.watchdog),
        }
        for host in range(generation.num_hosts):
            gang.call(host, "go", {**common, "host": host, **gang.orders(host)})
        self.intake.start(generation)
        launch.formed(
            {
                "address": ray.get_runtime_context().gcs_address,
                "gang": gang.record(),
                "generation": generation.number,
                "high_water_step": generation.high_water_step,
            }
        )
        self.board.post({"ev": "generation", "generation": generation.number, "hosts": generation.num_hosts})
        return generation

    def _coordinator(self) -> str:
        """Host 0's address with a port never used before: joining an old service again is refused."""
        try:
            about = ray.get(self.roster.gang.call(0, "describe"), timeout=AGENT_TIMEOUT_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return "0.0.0.0:1"  # the generation fails at once, and host 0 is known to be lost then
        return f"{about['host_ip']}:{about['next_port']}"

    def _stretch(self) -> Stretch:
        """What the next generation is to do: anything, or its part of the lineage that is replayed."""
        return self.lineage.stretch_at(self.launch.checkpoint_step or 0) if self.lineage else Stretch()

    def _lineage_to_replay(self) -> Lineage | None:
        path = self.config.driver.replay
        try:
            return replay.read(path) if path else None
        except ReplayError as error:
            raise TrainingFailed(str(error)) from error

    # ------------------------------------------------------------------ while it trains

    def _attend(self, generation: Generation) -> None:
        """What the driver looks at between its polls."""
        if self.launch.succeeded.is_set():
            raise Superseded
        free = self.lineage is None
        if free:
            self._rehearsals.attend(generation)
        # It trains on while a larger gang's programs are compiled, instead of stopping for that.
        self._stops.attend(generation, may_grow=free and not self._rehearsals.busy)
        self.launch.tick()
        if (problem := self.launch.storage_problem) and problem != self._told_storage_problem:
            self.intake.note(problem, "warning")
        self._told_storage_problem = problem

    # ------------------------------------------------------------------ when it ends

    def _goes_on(self, generation: Generation) -> bool:
        """Whether the gang stopped only to go on with other hosts."""
        return generation.stopped_for in RESTARTING and self.board.stop_requested() is None

    def _follow_up(self, generation: Generation) -> Generation:
        """The generation after one that has failed, or has stopped for it. Raises TrainingFailed to give up."""
        incident, findings = self._resize(generation), None
        if incident is None:
            incident, findings = self._recover(generation)
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
        self.intake.post_incident(incident)
        if findings is not None:  # not before: the gang waits for nothing but its orders
            incident.evidence["stacks"] = keep_stacks(self.launch.run_dir, len(self.launch.incidents), findings.stacks)
        return following

    def _resize(self, generation: Generation) -> Incident | None:
        """The incident of a generation that stopped on purpose; None of one that failed."""
        if not generation.finished:
            return None
        now_s = self.clock()
        self.launch.goodput.switch("recovery", now_s)
        failure = examine(self.roster.gang, generation).failure  # they have saved, and are only leaving each other politely
        reason = generation.stopped_for
        said = "; ".join(f"host {host}: {notice['reason']}" for host, notice in generation.notices.items())
        incident = Incident(
            kind=FailureKind.PREEMPTION if reason == StopReason.PREEMPTED else "resize",
            host=next(iter(generation.notices), None),
            generation=generation.number,
            step=generation.step,
            failed_at_s=generation.all_entered_s("save") or now_s,
            evidence={"summary": f"saved and stopped at step {generation.step} ({said or reason})"},
        )
        incident.mark("save", now_s)
        incident.mark("halt", self.clock())
        self.launch.checkpoint_step = max(self.launch.checkpoint_step or 0, generation.step)
        if lost_hosts(generation) and failure.kind == FailureKind.HOST_LOST:  # meanwhile, and unannounced
            incident.kind, incident.host = failure.kind, failure.host
            incident.evidence["summary"] += f"; then {failure.summary}"
            self.launch.failed(self._past(failure, now_s), incident)
        else:
            self.launch.record(incident)
        return incident

    def _recover(self, generation: Generation) -> tuple[Incident, Findings]:
        """Kills what is left, finds out what happened, and decides."""
        launch, detected_s = self.launch, self.clock()
        findings = examine(self.roster.gang, generation)
        failure = findings.failure
        failed_at_s = min(failure.failed_at_s or detected_s, detected_s)
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
        launch.failed(self._past(failure, failed_at_s), incident)
        decision = decide(launch.history, self.config.driver.restart)
        if isinstance(decision, GiveUp):
            incident.evidence["stacks"] = keep_stacks(launch.run_dir, len(launch.incidents), findings.stacks)
            self._give_up(incident, decision.reason)
            raise TrainingFailed(epitaph(failure, decision.reason))
        if self.board.stop_requested():
            raise TrainingFailed(f"stopped on request while it was failing: {failure.summary}")
        if decision.delay_s:
            self._back_off(decision.delay_s)
        return incident, findings

    def _give_up(self, incident: Incident, reason: str) -> None:
        incident.action, incident.detail = Action.GIVE_UP, reason
        self.intake.post_incident(incident)

    def _past(self, failure: Failure, failed_at_s: float) -> PastFailure:
        seat = self.roster.gang.members[failure.host] if failure.host is not None else None
        number, node_id = (seat.number, seat.node_id) if seat is not None else (None, None)
        return past_failure(failure, self.launch.checkpoint_step, seat=number, node_id=node_id, at_s=failed_at_s)

    def _back_off(self, delay_s: float) -> None:
        self.launch.goodput.switch("idle", self.clock())
        self.intake.say("recovering", f"waiting {delay_s:.0f} s before the next try")
        deadline_s = time.monotonic() + delay_s
        while (left_s := deadline_s - time.monotonic()) > 0 and not self.board.stop_requested():
            self.roster.gang.refresh()  # the agents must go on hearing from a driver
            time.sleep(min(1.0, left_s))
        self.launch.goodput.switch("recovery", self.clock())

    def _result(self, generation: Generation) -> dict[str, Any]:
        self.launch.goodput.switch("finish", self.clock())
        done = generation.done[0]
        reason = done["stop_reason"]
        if reason in RESTARTING:  # and a request to stop came at the same time
            reason = self.board.stop_requested() or reason
        return {**done["result"], "stop_reason": reason}
