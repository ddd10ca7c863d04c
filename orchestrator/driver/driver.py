"""The driver: reserves the gang, starts generations, watches them, and decides what follows. It computes nothing itself.

Training goes on without a driver: agents and placement groups are held by the cluster. A new driver adopts the gang of the
previous one if it finds it. The driver never waits for storage, and every wait of it can be ended by a stop request.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cluster.agent.machine import with_port
from cluster.gang import acquire
from cluster.gang.acquire import AdoptError, GangTimeout, StaleDriver
from cluster.gang.calls import AgentGone, AwakeClock, NoAnswer, gather
from cluster.gang.gang_like import AnyGang, GangsLike
from gangway.stop_reason import StopReason
from gangway.storage import documents
from gangway.wire import orders
from gangway.wire.orders import Preparation, Start
from orchestrator.config.job import JobConfig
from orchestrator.driver.ending import StoppedOnRequest, Superseded, TimeIsUp, TrainingFailed
from orchestrator.driver.event_handler import EventHandler
from orchestrator.driver.generation import Finished, Generation, Paused
from orchestrator.driver.halt import (
    AGENT_TIMEOUT_S,
    Findings,
    Halt,
    ask_hosts,
    final_error,
    find_cause,
    lost_hosts,
    stacks_folder,
    unpolled_events,
    write_stacks,
)
from orchestrator.driver.membership import Change, Membership, NoHosts
from orchestrator.driver.poller import Poller
from orchestrator.driver.precompile import Precompilations
from orchestrator.driver.ray_train import Reporter
from orchestrator.driver.states import BackingOff, Ended, Halting, Importing, Recovering, Reserving, Training
from orchestrator.driver.stop_requests import StopRequests, TimeLimit
from orchestrator.failures.classify import Failure, FailureKind, explain_missing_code
from orchestrator.failures.history import PastFailure, past_failure
from orchestrator.policies.restart import GiveUp, decide
from orchestrator.reporting import text
from orchestrator.reporting.board import BoardLike
from orchestrator.run_state import replay
from orchestrator.run_state.incidents import Action, Incident
from orchestrator.run_state.launch import Launch
from orchestrator.run_state.replay import ReplayError, ReplayPlan, Segment
from orchestrator.run_state.requests import STOP, Request
from orchestrator.tracking.prometheus import Gauges
from trainers.recorders.dispatch import Recorders

NO_GENERATION = -1
"""The generation number in the record of a gang that has no orders yet."""
FIRST_RECORD_TIMEOUT_S = 5.0
"""How long the driver waits for the storage to take the first record of a gang."""


class Driver:
    """The control loop of one driver process. `run` returns the result of a finished or stopped run, or raises TrainingFailed.

    Everything from outside is an argument: `gangs` makes gangs (the module `cluster.gang.acquire`), `clock` is the wall clock for
    times that are reported, `monotonic` and `sleep` are for waits.
    """

    def __init__(
        self,
        config: JobConfig,
        launch: Launch,
        board: BoardLike,
        reporter: Reporter,
        recorders: Recorders,
        *,
        gangs: GangsLike = acquire,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.config, self.launch, self.board, self.gangs = config, launch, board, gangs
        self.clock, self.monotonic, self.sleep = clock, monotonic, sleep
        self.events = EventHandler(
            launch, board, reporter, recorders, Gauges(config.training.name), config.driver.stragglers, clock
        )
        self._time_limit = TimeLimit(config, launch, self.events, clock, monotonic)
        self.replay_plan = self._replay_plan()
        launch.progress.max_steps = config.training.max_num_steps
        self._snapshots_since = 0
        """The oldest generation whose snapshots the next one may go on from."""
        self._membership: Membership | None = None
        self._stop_requests: StopRequests
        self._precompilations: Precompilations
        self._reported_storage_problem: str | None = None

    def run(self) -> dict[str, Any]:
        for problem in self.launch.problems:
            self.events.note(problem, "warning")
        try:
            return self._run()
        finally:
            self.events.enter(Ended())

    def _run(self) -> dict[str, Any]:
        try:
            result = self._train()
        except TimeIsUp:
            result = self._time_limit.result()
        except (Superseded, StaleDriver) as error:
            # First: nothing more may be written over the files of the successor.
            self.launch.stop()
            # A newer driver of the same launch adopts the gang: only a gang that nobody will adopt is released.
            if not self.launch.lease.superseded_by(self.launch.launch_id):
                self._release()
            raise Superseded(f"another driver has taken the run in {self.launch.run_dir}; this one ends") from error
        except TrainingFailed:
            self._release()
            raise
        self._release()
        return result

    def _train(self) -> dict[str, Any]:
        generation = self._adopt() or self._first_generation()
        while True:
            end = Poller(self.membership.gang, generation, self.events, self.monotonic).run(self._between_polls)
            if isinstance(end, Finished):
                return self._result(end)
            # Read before the halt: the time in which processes die is recovery, not detection.
            detected_s = self.clock()
            findings = self._halt(generation)
            # Asked again: the halt delivers the last events, and with them a generation may turn out to have finished.
            match generation.end:
                case Finished() as end:
                    return self._result(end)
                # A person's request outranks a planned restart: the state is saved, so the run can end here.
                case Paused() as end if self.board.stop_requested():
                    return self._result(end)
                case Paused() as end:
                    incident = self._resized(generation, end, findings, detected_s)
                case _:
                    incident = self._failed(generation, findings, detected_s)
            generation = self._continue(generation, incident, findings)

    @property
    def membership(self) -> Membership:
        assert self._membership is not None
        return self._membership

    # ------------------------------------------------------------------ machines

    def _adopt(self) -> Generation | None:
        """Adopts the gang of the previous driver; returns its generation. Returns None if there is no gang that can go on."""
        record, now_s = self.launch.progress.gang, self.clock()
        if record is None:
            # The first driver of a launch has no predecessor whose gang could be lost.
            if self.launch.progress.drivers > 1:
                self.launch.gang_lost(now_s, "it had none")
            return None
        try:
            gang = self.gangs.adopt(
                self.config.hosts,
                self.launch.name_in_cluster(self.config.training.name),
                record["gang"],
                check_stop=self._check_lease,  # not a stop request: the adopted gang has to save first
                **self._agent_options(),
            )
        except AdoptError as error:
            self.events.post_incident(self.launch.gang_lost(now_s, str(error)))
            return None
        self._use(gang)
        # The agents may have it, but this gang object is new: it gives it to the agents that come later.
        gang.prepare(self._preparation())
        number = gang.leads[0]["generation"]
        assert number is not None  # of agents without orders no gang is adopted
        if number != record["generation"]:  # the previous driver ended before it could record the newest generation
            self.launch.adopt_generation(number)
        generation = Generation(
            number, len(gang.members), high_water_step=record["high_water_step"], began_at_s=record["began_at_s"]
        )
        self._snapshots_since = number  # unless its events say that it has gone on from an older one
        self.events.start(generation)
        self._catch_up(generation)
        # After the catch-up: only the events tell how far the gang has come.
        self.events.post_incident(self.launch.adopted(now_s, generation.step))
        self.events.enter(Training())
        return generation

    def _catch_up(self, generation: Generation) -> None:
        """Gives the hosts this driver's term, and handles the events that the agents have kept while no driver polled."""
        order = orders.taken_over(self.launch.lease.driver_term)
        # Before anything else: by the term of the previous driver, no host can commit a checkpoint any more.
        self._ask_all(generation, "order", order)
        # From the first event on: this driver's `Generation` is rebuilt from all of them.
        answers = self._ask_all(generation, "poll", 0, 0.0)
        self.events.catch_up(generation, answers)
        for host, answer in answers.items():
            if not answer["host_state"]["alive"]:
                generation.find_dead(host)  # the previous driver halted it, which makes no event

    def _ask_all(self, generation: Generation, method: str, *args: Any) -> dict[int, Any]:
        """Calls a method of all agents at once; returns their answers by host."""
        gang = self.membership.gang
        limits_s = dict.fromkeys(range(generation.num_hosts), AGENT_TIMEOUT_S)
        return ask_hosts(gang, generation, lambda host: gang.call(host, method, *args), limits_s, self.monotonic)

    def _first_generation(self) -> Generation:
        self.events.enter(Reserving())
        name = self.launch.name_in_cluster(self.config.training.name)
        # First: what an earlier driver left holds machines that this gang needs.
        check_stop = partial(self._check_stop, "machines are being reserved")
        self.gangs.clear(name, check_stop=check_stop)
        try:
            gang = self.gangs.reserve(self.config.hosts, name, check_stop=check_stop, **self._agent_options())
        except GangTimeout as error:
            raise TrainingFailed(explain_missing_code(str(error)) or str(error)) from error
        self._use(gang)
        self._form()
        self.launch.formed(self._record(Generation(NO_GENERATION, 0, began_at_s=self.clock())))
        # The only write that the driver waits for: without it, the next driver could not find the agents at all.
        self.launch.flush(FIRST_RECORD_TIMEOUT_S)
        self.events.enter(Importing())
        gang.prepare(self._preparation())
        return self._start_generation()

    def _use(self, gang: AnyGang) -> None:
        self._membership = Membership(self.config, gang, self.monotonic)
        arguments = (self.config, self.launch, self.board, self.events, self._membership, self.clock, self.monotonic)
        self._stop_requests = StopRequests(*arguments)
        self._precompilations = Precompilations(self.config, self.launch, self.events, self._membership, self.monotonic)

    def _agent_options(self) -> dict[str, Any]:
        return {
            "log_dir": documents.join(self.launch.run_dir, "logs"),
            "driver_term": self.launch.lease.driver_term,
            "lease_s": self.config.driver.agent_lease_s,
        }

    def _preparation(self) -> Preparation:
        return {
            "cmd": "prepare",
            "arguments_class": self.config.arguments_class,
            "arguments": dataclasses.asdict(self.config.training),
            "snapshot_slots": self.config.training.snapshot.num_slots,
        }

    def _form(self, lost: tuple[int, ...] = ()) -> Change:
        avoid = self.membership.quarantine(self.launch.progress.history, self.clock())
        try:
            return self.membership.form(
                lost,
                avoid=avoid,
                num_hosts=self._segment().num_hosts,
                waiting=self._wait_for_machines,
                check_stop=partial(self._check_stop, "the run waits for machines"),
            )
        except NoHosts as error:
            raise TrainingFailed(str(error)) from error

    def _wait_for_machines(self, missing: str) -> None:
        self.events.enter(Reserving(), f"waiting for machines: {missing}")

    def _check_lease(self) -> None:
        if self.launch.lease_lost.is_set():
            raise Superseded
        # Every wait passes here, so the stored state stays up to date in all of them.
        self.launch.tick()
        self.events.outages.look()
        for request in self.launch.new_requests():
            self._do(request)

    def _do(self, request: Request) -> None:
        """Does what somebody asks by the run's storage."""
        self.events.note(f"{request.by} asks this run to {request.kind}")
        if request.kind == STOP:
            self.board.request_stop(str(StopReason.REQUESTED), wait=False)
        elif self._membership is not None:
            for host in range(self.membership.size):
                self.membership.gang.tell(host, "order", orders.SAVE)

    def _check_stop(self, activity: str) -> None:
        """Called in every wait in which no gang trains. Raises StoppedOnRequest if there is a stop request."""
        self._check_lease()
        if self._membership is not None:
            self._stop_requests.record_gang()
        if reason := self.board.stop_requested():
            raise StoppedOnRequest(f"stopped on request ({reason}) while {activity}")
        self._time_limit.check(f"the run ends while {activity}")

    def _release(self) -> None:
        # A Ray without its head does not answer, and takes all its processes along.
        if self._membership is not None and self.board.stop_requested() != StopReason.HEAD_LOST:
            self.membership.gang.release()

    # ------------------------------------------------------------------ a generation

    def _start_generation(self) -> Generation:
        gang, launch = self.membership.gang, self.launch
        generation = Generation(
            launch.next_generation(), len(gang.members), high_water_step=launch.progress.high_water_step, began_at_s=self.clock()
        )
        address, segment = self._coordinator(), self._segment()
        common: Start = {
            "cmd": "start",
            "host": 0,
            "generation": generation.number,
            "num_hosts": generation.num_hosts,
            "coordinator": address,
            "restore_from": launch.progress.saved_path,
            # By launch: a new launch may come with changed code, which has to be traced again.
            "program_key": launch.launch_id,
            "stop_at": segment.stop_at,
            "skip_batches": list(segment.skip_batches),
            "committed_step": launch.progress.committed_step,
            "driver_term": launch.lease.driver_term,
            "time_used_s": launch.progress.time_used.seconds(self.clock()),
            "retry_for_s": self.config.driver.restart.retry_for_s,
            "limits": self.config.driver.watchdog.orders(),
            "snapshots_since": self._snapshots_since,
        }
        # Recorded before the orders are sent. If the write is lost with this driver, the agents' own orders are the record.
        launch.formed(self._record(generation))
        for host in range(generation.num_hosts):
            # Not awaited: the agents report the start, and a failed one, as events.
            shown_lines = self.config.driver.shown_lines(host, generation.num_hosts)
            start: Start = {**common, "host": host, "shown_lines": shown_lines, **gang.orders(host)}
            gang.tell(host, "start", start)
        self.events.start(generation)
        self.board.post({"ev": "generation", "generation": generation.number, "hosts": generation.num_hosts})
        return generation

    def _record(self, generation: Generation) -> dict[str, Any]:
        """Returns what the next driver needs to adopt the generation."""
        return {
            "address": self.membership.gang.cluster_address(),
            "gang": self.membership.gang.record(),
            "generation": generation.number,
            "high_water_step": generation.high_water_step,
            "began_at_s": generation.began_at_s,
        }

    def _coordinator(self) -> str:
        """Returns host 0's address with a port that was never used: a process that joins an old coordination service is
        refused."""
        gang = self.membership.gang
        answer = gather(gang.mailbox(), lambda host: gang.call(host, "describe"), {0: AGENT_TIMEOUT_S}, self.monotonic)[0]
        if isinstance(answer.error, AgentGone | NoAnswer):
            return "0.0.0.0:1"  # nobody listens there: the generation fails at once, and its halt finds host 0 lost
        if answer.error is not None:
            raise answer.error
        return with_port(answer.value["host_ip"], answer.value["next_port"])

    def _segment(self) -> Segment:
        """Returns what the next generation has to do: its part of a replayed lineage, or anything."""
        return self.replay_plan.segment_at(self.launch.progress.checkpoint_step or 0) if self.replay_plan else Segment()

    def _replay_plan(self) -> ReplayPlan | None:
        path = self.config.driver.replay
        try:
            return replay.read(path) if path else None
        except ReplayError as error:
            raise TrainingFailed(str(error)) from error

    # ------------------------------------------------------------------ while it trains

    def _between_polls(self, generation: Generation) -> None:
        """Called by the poller in every round."""
        self._check_lease()
        may_resize = self.replay_plan is None  # a replay has its numbers of hosts from the lineage
        if may_resize:
            self._precompilations.poll(generation)
        # While the programs of a larger gang are being compiled, the gang does not grow: it would stop to compile them.
        self._stop_requests.poll(generation, may_grow=may_resize and not self._precompilations.busy)
        self._time_limit.poll(generation, self.membership.gang)
        if (problem := self.launch.storage_problem) and problem != self._reported_storage_problem:
            self.events.note(problem, "warning")
        self._reported_storage_problem = problem
        if self.launch.checkpoint_is_gone():
            self.events.checkpoint_gone()
        self.events.exported.often(generation.step, self.clock())

    # ------------------------------------------------------------------ when it ends

    def _halt(self, generation: Generation) -> Findings:
        """Kills what is left of the generation, and finds the cause of its end."""
        halt = Halt(self.membership.gang, generation, self.monotonic)
        # From the cursors on: an event that a poll has delivered is not delivered again.
        answers = halt.run(self.launch.progress.seen, self._wait_for_deaths)
        # When the hosts were asked, not now: the answers may have taken minutes.
        asked_at_s = self.clock() - (self.monotonic() - halt.began_s)
        # Before the cause is sought: a `done` or a notice among these events changes it.
        self.events.catch_up(generation, unpolled_events(answers))
        return find_cause(generation, answers, asked_at_s)

    def _wait_for_deaths(self, hosts: Sequence[int]) -> bool:
        self._check_lease()
        names = ", ".join(map(str, hosts))
        self.events.enter(Halting(), f"host {names}: the killed process takes long to end")
        return self.board.stop_requested() is not None

    def _resized(self, generation: Generation, end: Paused, findings: Findings, paused_s: float) -> Incident:
        """Returns the incident of a generation that was asked to save and stop."""
        self.events.enter(Recovering(), since_s=paused_s)
        failure = findings.failure  # normally nothing: the hosts have saved and were shutting down
        reasons = "; ".join(f"host {host}: {notice['reason']}" for host, notice in generation.notices.items())
        incident = Incident(
            kind=FailureKind.PREEMPTION if end.stop_reason == StopReason.PREEMPTED else "resize",
            host=next(iter(generation.notices), None),
            generation=generation.number,
            step=generation.step,
            failed_at_s=generation.all_entered_s("save") or paused_s,
            evidence={"summary": f"saved and stopped at step {generation.step} ({reasons or end.stop_reason})"},
        )
        incident.mark("save", paused_s)
        incident.mark("halt", self.clock())
        self.launch.progress.checkpoint_step = max(self.launch.progress.checkpoint_step or 0, generation.step)
        if lost_hosts(generation) and failure.kind == FailureKind.HOST_LOST:  # a host was lost while the gang stopped
            incident.kind, incident.host = failure.kind, failure.host
            incident.evidence["summary"] += f"; then {failure.summary}"
            self.launch.failed(self._past(generation, failure, paused_s), incident)
        else:
            self.launch.record(incident)
        return incident

    def _failed(self, generation: Generation, findings: Findings, detected_s: float) -> Incident:
        """Returns the incident of a generation that failed, after the back-off. Raises TrainingFailed to give up."""
        launch, failure = self.launch, findings.failure
        # Clamped: a host's clock may have been set meanwhile.
        failed_at_s = min(max(failure.failed_at_s or detected_s, generation.began_at_s), detected_s)
        # A post-mortem may know of a later step than any event: trained again, it counts as replay.
        launch.progress.high_water_step = max(launch.progress.high_water_step, findings.last_step)
        launch.progress.trained_step = max(launch.progress.trained_step, findings.last_step)
        launch.progress.goodput.switch("detection", failed_at_s)
        self.events.enter(Recovering(), since_s=detected_s)
        incident = Incident(
            kind=failure.kind,
            host=failure.host,
            generation=generation.number,
            step=failure.step if failure.step is not None else generation.step,
            failed_at_s=failed_at_s,
            evidence={**failure.evidence, "collateral": list(failure.collateral), **self.events.outages.evidence()},
        )
        incident.mark("detect", detected_s)
        incident.mark("halt", self.clock())
        # Before the decision, which counts this failure.
        launch.failed(self._past(generation, failure, failed_at_s), incident)
        decision = decide(launch.progress.history, self.config.driver.restart)
        if isinstance(decision, GiveUp):
            self._keep_stacks(incident, findings.stacks)
            self._give_up(incident, decision.reason)
            raise TrainingFailed(final_error(failure, decision.reason, self._agent_options()["log_dir"]))
        # There is no gang left that could save: a request that came meanwhile ends the run here.
        if self.board.stop_requested():
            raise StoppedOnRequest(f"stopped on request while it was failing: {failure.summary}")
        if self._time_limit.passed:  # another generation would have no time to train
            self._keep_stacks(incident, findings.stacks)
            self._give_up(incident, "the time limit has passed")
            self._time_limit.end_run(failure.summary)
        if decision.delay_s:
            self._back_off(decision.delay_s, text.waiting(decision.delay_s, decision.left_s, failure.summary))
        return incident

    def _continue(self, generation: Generation, incident: Incident, findings: Findings) -> Generation:
        """Starts the next generation. Raises TrainingFailed if there are no machines for it."""
        try:
            change = self._form(lost_hosts(generation))
        except TrainingFailed as error:
            self._give_up(incident, str(error))
            raise
        incident.action, incident.detail = change.action, change.detail
        incident.hosts_before, incident.hosts_after = change.before, change.after
        self.events.enter(Recovering())  # forming may have waited for machines
        incident.mark("decide", self.clock())
        if generation.snapshots_since is not None:
            self._snapshots_since = generation.snapshots_since
        following = self._start_generation()
        # After the start: writing and reporting must not delay the recovery.
        if not generation.finished:
            self._keep_stacks(incident, findings.stacks)
        self.launch.update(incident)
        self.events.post_incident(incident)
        return following

    def _keep_stacks(self, incident: Incident, texts: Mapping[int, str]) -> None:
        number = self.launch.progress.num_incidents
        if texts:
            folder = stacks_folder(self.launch.run_dir, number)
            self.launch.write_beside(f"the stacks of incident {number}", lambda: write_stacks(folder, texts))
            incident.evidence["stacks"] = folder.url

    def _give_up(self, incident: Incident, reason: str) -> None:
        incident.action, incident.detail = Action.GIVE_UP, reason
        self.launch.update(incident)
        self.events.post_incident(incident)

    def _past(self, generation: Generation, failure: Failure, failed_at_s: float) -> PastFailure:
        slot = self.membership.gang.members[failure.host] if failure.host is not None else None
        # What came from memory counts as progress, like a checkpoint.
        kept = [self.launch.progress.checkpoint_step, generation.resumed_step if generation.source == "memory" else None]
        number, node_id = (slot.number, slot.node_id) if slot is not None else (None, None)
        return past_failure(
            failure,
            max((step for step in kept if step is not None), default=None),
            generation=generation.number,
            trained=bool(generation.first_step_at_s),
            slot=number,
            node_id=node_id,
            at_s=failed_at_s,
        )

    def _back_off(self, delay_s: float, message: str) -> None:
        self.events.enter(BackingOff(), message)
        # A stall of this process is no back-off.
        awake_s = AwakeClock(self.monotonic)
        while (left_s := delay_s - awake_s()) > 0:
            self._check_stop(f"waiting {delay_s:.0f} s before the next try")
            # Agents that died are replaced during the back-off, not after it.
            self.membership.gang.refresh(members=True)
            self.sleep(min(0.5, left_s))
        self.events.enter(Recovering())

    def _result(self, end: Finished | Paused) -> dict[str, Any]:
        self.launch.progress.goodput.switch("finish", self.clock())
        # After a pause: a stop request came at the same time, and its reason is the one to report.
        reason = end.stop_reason if isinstance(end, Finished) else self.board.stop_requested() or end.stop_reason
        if self._time_limit.asked and not self.board.stop_requested() and not StopReason(reason).finished:
            reason = StopReason.TIME_LIMIT  # a trainer of one's own need not know why it was asked to stop
        return {**end.result, "stop_reason": str(reason)}
