"""Handles the events of the hosts: passes them to the generation, the goodput ledger, tracking, Ray Train and the console.

The agents keep the events while there is no driver. A driver that adopts the gang gets all events of the generation again, and in
the place of those that an agent has dropped its facts (`cluster.agent.event_log`). Events that the previous driver has handled
only rebuild the `Generation`; the others are handled as usual.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

from gangway.storage import failed_requests, usage
from gangway.wire.console import Level, Status
from gangway.wire.events import (
    AnomalyTreated,
    Evaluating,
    FirstStep,
    Heartbeat,
    HostEvent,
    Joined,
    MachineNotice,
    Metrics,
    Note,
    Notice,
    Preview,
    Printed,
    Profile,
    RequestsFailed,
    RequestsMade,
    Restored,
    Saved,
    SaveFailed,
    course_left_at,
    problem_for_driver,
)
from gangway.wire.limits import PHASES
from orchestrator.driver.exported import ExportedMetrics
from orchestrator.driver.generation import START_PHASES, Generation, in_order
from orchestrator.driver.ray_train import Reporter
from orchestrator.driver.states import Beginning, Halting, Saving, State, Training, follow
from orchestrator.policies.stragglers import Straggler, StragglerPolicy, Stragglers
from orchestrator.reporting.board import BoardLike
from orchestrator.run_state.incidents import Action, Incident, of_anomaly
from orchestrator.run_state.launch import Launch
from orchestrator.run_state.progress import Progress
from orchestrator.tracking.prometheus import Gauges
from trainers.metrics import host_usage
from trainers.recorders.dispatch import Recorders

KEPT_STEP_TIMES = 100
KEPT_STATES = 12
SHOWN_HOSTS = 32
"""The time line has the phases and the busy seconds of so many hosts."""
BY_HOST_EVERY_S = 10.0
"""How often what each host uses of its machine is tracked, of as many hosts as the time line has."""
SHOWN_PROCESSES = 8


class Process(NamedTuple):
    """The training process of a host."""

    pid: int
    machine: str


def processes_line(processes: Mapping[int, Process]) -> str:
    """Returns the line that says which process is which host: that of one machine alone without its name."""
    machines = {process.machine for process in processes.values()}
    shown = [
        f"{process.pid} (host {host}{f' on {process.machine}' if len(machines) > 1 else ''})"
        for host, process in sorted(processes.items())[:SHOWN_PROCESSES]
    ]
    more = f", and {len(processes) - SHOWN_PROCESSES} more" if len(processes) > SHOWN_PROCESSES else ""
    return f"training process{'es' if len(processes) > 1 else ''} {', '.join(shown)}{more}"


class EventHandler:
    """Passes every event on to all that need it. Decides nothing."""

    def __init__(
        self,
        launch: Launch,
        board: BoardLike,
        reporter: Reporter,
        recorders: Recorders,
        gauges: Gauges,
        straggler_policy: StragglerPolicy,
        clock: Callable[[], float],
    ):
        self.launch, self.board, self.reporter, self.clock = launch, board, reporter, clock
        self.exported = ExportedMetrics(gauges, launch.progress)
        self.recorders = recorders
        self._step_times_s = {hosts: deque([step_s], KEPT_STEP_TIMES) for hosts, step_s in launch.progress.step_s.items()}
        self.outages = Outages(launch.progress, self.note, clock)
        self.state: State = Beginning()
        """The present state of the driver."""
        self._story: deque[State] = deque([self.state], KEPT_STATES)
        self._straggler_policy = straggler_policy
        self._stragglers = Stragglers(0, straggler_policy)
        self._label = ""
        self._busy = HostTimes()
        self._odd: set[tuple[int, str]] = set()
        """Hosts and kinds of events that were left out."""
        self._usage: dict[int, Mapping[str, float]] = {}
        """How much of its machine each host used, by its newest heartbeat."""
        self._by_host_s = float("-inf")
        """When that was last tracked."""
        self._processes: dict[int, Process] = {}
        """The training process of each host that has joined."""

    @property
    def step_s(self) -> dict[int, float]:
        """The median seconds of a step, by number of hosts."""
        return {hosts: statistics.median(times) for hosts, times in self._step_times_s.items()}

    def start(self, generation: Generation) -> None:
        """Resets what it keeps about the hosts of a generation."""
        self._stragglers = Stragglers(generation.num_hosts, self._straggler_policy)
        self._usage, self._processes = {}, {}
        self.exported.start(generation.num_hosts)

    def handle_answer(self, generation: Generation, host: int, answer: Mapping[str, Any]) -> None:
        """Handles one agent's answer to `poll`."""
        self.catch_up(generation, {host: answer})
        generation.note_silence(host, answer["host_state"].get("silence"))

    def catch_up(self, generation: Generation, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Handles the answers of several agents to `poll`, all events in the order of their times."""
        events = {host: self._events_of(generation, host, answer) for host, answer in answers.items()}
        for host, _, event in in_order(events):
            self.handle(generation, host, event, known=event["n"] < self.launch.progress.seen.get(host, 0))
        # After the events: the cursor is stored together with all that came of them.
        for host, answer in answers.items():
            # The maximum: the answer to an earlier poll may come late.
            self.launch.progress.seen[host] = max(self.launch.progress.seen.get(host, 0), answer["cursor"])
            if answer["heartbeat"] and self._takes(generation, host, answer["heartbeat"]):
                self.handle(generation, host, answer["heartbeat"])

    def _events_of(self, generation: Generation, host: int, answer: Mapping[str, Any]) -> list[HostEvent]:
        """Returns the events of an answer that are of this generation, in their order. Where the agent's log has dropped events,
        its facts complete them: they alone tell that the gang trains, and what it has saved."""
        events = [*answer.get("facts", ()), *answer["events"]]
        found = {event["n"]: event for event in events if self._takes(generation, host, event)}
        numbers = {event["n"] for event in events if isinstance(event, Mapping) and "n" in event}
        seen = self.launch.progress.seen.get(host, 0)
        # Of those that were dropped, only the ones that no driver has handled are lost.
        lost = answer["cursor"] - seen - sum(number >= seen for number in numbers)
        if (lost := min(lost, answer.get("missed", 0))) > 0:
            self.note(
                f"host {host}: {lost} events that no driver has read are lost (its agent keeps a limited number)", "warning"
            )
        return [event for _, event in sorted(found.items())]

    def _takes(self, generation: Generation, host: int, event: Mapping[str, Any]) -> bool:
        """Whether an event is one of this generation. One that is no event is dropped, and reported once for each host."""
        if problem := problem_for_driver(event):
            kind = str(event.get("ev"))[:50] if isinstance(event, Mapping) else ""
            if (host, kind) not in self._odd:
                self._odd.add((host, kind))
                self.note(f"host {host}: an event that its training process has sent is left out: {kind}: {problem}", "warning")
            return False
        return event.get("generation", generation.number) == generation.number

    def handle(self, generation: Generation, host: int, event: HostEvent, known: bool = False) -> None:
        # A host's clock may be wrong by any amount: the time is clamped between the start of the generation and now.
        event = cast("HostEvent", {**event, "t": min(max(event["t"], generation.began_at_s), self.clock())})
        was_training, phase, rollbacks = generation.training, generation.phase, len(generation.anomalies)
        generation.observe(host, event)
        launch = self.launch
        launch.progress.high_water_step = max(launch.progress.high_water_step, generation.step)
        if generation.resumed_step is not None:
            launch.progress.step = generation.step
        # Steps that a rollback took back are not lost: they were not to be kept.
        took_back = len(generation.anomalies) > rollbacks
        launch.progress.trained_step = generation.step if took_back else max(launch.progress.trained_step, generation.step)
        # Once a host has failed, the driver sets the clock: a late event would set it back to `step`.
        if not generation.wants_restart:
            launch.progress.goodput.switch(generation.category, event["t"])
        if known:
            return
        if event["ev"] == "phase" and host < SHOWN_HOSTS and event["phase"] in START_PHASES:
            launch.mark("phase", event["t"], host=host, phase=event["phase"], generation=generation.number)
        if generation.phase != phase:
            self._show(PHASES[generation.phase].label if generation.phase in PHASES else generation.phase)
        if generation.training and not was_training:
            self._training_again(generation)
        self._pass_on(generation, host, event)

    # ------------------------------------------------------------------ events that concern more than the generation

    def _pass_on(self, generation: Generation, host: int, event: HostEvent) -> None:
        match event["ev"]:
            case "metrics":
                self._on_metrics(generation, event)
            case "preview":
                self._on_preview(event)
            case "saved":
                self._on_saved(host, event)
            case "save_failed" | "notice":
                self._on_warning(host, event)
            case "requests_failed" | "requests_made":
                self._on_requests(host, event)
            case "restored":
                self._on_restored(host, event)
            case "note" | "printed" | "evaluating":
                self._on_said(host, event)
            case "profile":
                self._on_profile(host, event)
            case "first_step":
                self._on_first_step(host, event)
            case "anomaly":
                self._on_anomaly(generation, event)
            case "heartbeat":
                self._on_heartbeat(generation, host, event)
            case "joined":
                self.launch.progress.time_used.begin(event["t"])
                self._on_joined(generation, host, event)

    def _on_joined(self, generation: Generation, host: int, event: Joined) -> None:
        if "pid" in event:
            self._processes[host] = Process(event["pid"], event.get("machine", ""))
            if len(self._processes) == generation.num_hosts:
                self.note(processes_line(self._processes))

    def _on_first_step(self, host: int, event: FirstStep) -> None:
        resumed_step = event.get("resumed_step", event["step"] - 1)
        if host == 0 and self.launch.resumed(resumed_step):
            self.recorders.go_back(resumed_step)

    def _on_anomaly(self, generation: Generation, event: AnomalyTreated) -> None:
        if (step := course_left_at(event)) is not None and self.launch.leave_course(step):
            self.recorders.go_back(step)
        new, known = of_anomaly(event, generation.number), self.launch.progress.entries[-1:]
        if not (known and known[0].incident.takes(new)):
            self._record(new)
            return
        self.launch.update(one := known[0].incident)
        # Each batch would be a line: at 2, 4, 8 ... batches is one.
        if (number := len(one.evidence["skipped_batches"])) & (number - 1) == 0:
            self.note(str(one.evidence["summary"]), "warning")

    def _on_metrics(self, generation: Generation, event: Metrics) -> None:
        metrics, step, launch = event["metrics"], event["step"], self.launch
        if "step_time_s" in metrics:
            times = self._step_times_s.setdefault(generation.num_hosts, deque(maxlen=KEPT_STEP_TIMES))
            times.append(metrics["step_time_s"])
            # For the next driver, which must know what another number of hosts would gain.
            launch.progress.step_s[generation.num_hosts] = statistics.median(times)
        for category in ("data_wait", "checkpoint"):
            # Moved, not added: the training process measured these seconds inside its steps.
            launch.progress.goodput.move("step", category, event.get("seconds", {}).get(category, 0.0))
        kind = event.get("kind") or ("eval" if any(name.startswith("eval_") for name in metrics) else "train")
        # A replayed step gives the same metrics again: they must not be published twice.
        if launch.progress.is_new(step, kind):
            by_host: dict[str, float] = {}
            if host_usage.CPU in metrics:
                by_host = self._use_by_host(metrics)
                # Host 0 has sent its own: the fullest machine is the one to know of.
                metrics = metrics | host_usage.largest([metrics, *self._usage.values()])
            goodput = launch.progress.goodput_of_run(self.clock())
            self.board.post({"ev": "metrics", "step": step, "metrics": metrics, "kind": kind, "goodput": goodput})
            launch.publish(step, {**metrics, **by_host})
            self.recorders.record(step, {**metrics, **by_host}, event.get("distributions"))
            self.reporter.report({"step": step, **metrics})
            self.exported.publish(metrics)

    def _use_by_host(self, of_host_0: Mapping[str, float]) -> dict[str, float]:
        """Returns what each host uses of its machine, by the names that trackers have for it; {} until it is time again."""
        now_s = self.clock()
        if now_s - self._by_host_s < BY_HOST_EVERY_S:
            return {}
        self._by_host_s = now_s
        usages = {host: usage for host, usage in self._usage.items() if host < SHOWN_HOSTS} | {0: of_host_0}
        return {
            f"system/host-{host}/{name}": usage[name]
            for host, usage in sorted(usages.items())
            for name in host_usage.NAMES
            if name in usage
        }

    def _on_preview(self, event: Preview) -> None:
        step, previews = event["step"], event["previews"]
        self.board.post({"ev": "preview", "step": step, "previews": previews})
        self.launch.preview({"step": step, "previews": previews}, lambda problem: self.note(problem, "warning"))

    def _on_saved(self, host: int, event: Saved) -> None:
        # One report is enough: a checkpoint is committed by all hosts or by none.
        if host == 0:
            self.launch.saved(event["step"], event["path"])
            if isinstance(self.state, Training):
                self.state = replace(self.state, new_checkpoint=True)
            self.launch.mark("saved", event["t"], step=event["step"])
            self.board.post({"ev": "checkpoint", "step": event["step"], "path": event["path"]})
            self.reporter.report({"step": event["step"]}, checkpoint_path=event["path"])

    def checkpoint_gone(self) -> None:
        """Reports that the newest checkpoint was deleted by somebody: until the next save there is nothing to go back to."""
        step, path = self.launch.progress.checkpoint_step, self.launch.progress.saved_path
        self.board.post({"ev": "checkpoint_gone", "step": step or 0})
        self.note(f"the checkpoint of step {step} is gone from {path}: training goes on, and saves at its next save", "warning")

    def _on_restored(self, host: int, event: Restored) -> None:
        # All hosts have agreed on the checkpoint: the report of one is enough.
        if host == 0:
            for bad in event["skipped"]:
                self.note(f"checkpoint {bad['step']} was not used: {bad['why']}", "warning")

    def _on_said(self, host: int, event: Note | Printed | Evaluating) -> None:
        if event["ev"] == "evaluating":
            self.board.post({"ev": "evaluating", "unit": event["unit"], "done": event["done"], "total": event["total"]})
        elif event["ev"] == "printed":
            self.board.post({"ev": "printed", "host": host, "lines": event["lines"], "left_out": event["left_out"]})
        else:
            self.note(f"host {host}: {event['message']}")

    def _on_requests(self, host: int, event: RequestsFailed | RequestsMade) -> None:
        if event["ev"] == "requests_failed":
            self.outages.failed(event["number"], event["why"], f"host {host}")
        else:
            self.outages.made(event["counts"])

    def _on_warning(self, host: int, event: SaveFailed | Notice | MachineNotice) -> None:
        if event["ev"] == "notice":
            self.note(f"host {host} is about to be taken away: {event['reason']}", "warning")
        elif host == 0:  # one line is enough: a save fails on all hosts or on none
            failed = f"the checkpoint of step {event['step']} failed"
            self.launch.progress.save_problem = f"{failed}: {event['error']}"
            self.note(f"{failed}, and is tried again: {event['error']}", "warning")

    def _on_profile(self, host: int, event: Profile) -> None:
        if event["problem"] is None:
            steps = f"steps {event['first_step']} to {event['last_step']}"
            self.note(f"host {host}: a profile of {steps} is in {event['path']}; to look at it: xprof --logdir {event['path']}")
        elif event["id"] is None:  # a failed request has its own answer
            self.note(f"host {host}: no profile: {event['problem']}", "warning")

    def _on_heartbeat(self, generation: Generation, host: int, event: Heartbeat) -> None:
        self._usage[host] = event.get("usage", {})
        self.exported.host(host, event)
        if "busy_s" in event:
            if host < SHOWN_HOSTS and (shown := self._busy.observe(host, event["batch_index"], event["busy_s"])):
                self.launch.mark("busy", event["t"], step=event["batch_index"], busy_s=shown)
            for slow in self._stragglers.observe(host, event["t"], event["batch_index"], event["busy_s"]):
                self._record_straggler(generation, slow)

    def _record_straggler(self, generation: Generation, slow: Straggler) -> None:
        """Records and reports a straggler. Nothing is done about it."""
        incident = Incident(
            kind="straggler",
            host=slow.host,
            generation=generation.number,
            step=generation.step,
            failed_at_s=self.clock(),
            evidence={"summary": slow.summary},
            action=Action.REPORT,
            resumed_step=generation.step,
        )
        self._record(incident)

    def _record(self, incident: Incident) -> None:
        """Records and reports an incident that is over already."""
        self.launch.record(incident)
        self.post_incident(incident)

    def _training_again(self, generation: Generation) -> None:
        """Ends the open incident, if there is one: the gang has completed its first step."""
        # It may have been asked to save before its first step, and a halt delivers what no poll has.
        if not isinstance(self.state, Saving | Halting):
            self.enter(Training())
        incident = self.launch.progress.open_incident()
        if incident is None:
            return
        for phase, until in (("start", "join"), ("join", "restore"), ("restore", "compile"), ("compile", "train")):
            at_s = generation.all_entered_s(until)
            if at_s is not None:
                incident.mark(phase, at_s)
        incident.recovered(generation.started_s() or self.clock(), self.step_s.get(generation.num_hosts, 0.0))
        incident.resumed_step, incident.source = generation.resumed_step, generation.source
        # After the loss of a driver: its last heartbeat may be older than the checkpoint.
        incident.step = max(incident.step or 0, generation.resumed_step or 0)
        self.launch.update(incident)
        self.board.post({"ev": "recovered", "incident": incident.to_dict()})

    def take_new_checkpoint(self) -> bool:
        """Returns whether a checkpoint was committed since this was last asked, while the gang trained."""
        if not isinstance(self.state, Training) or not self.state.new_checkpoint:
            return False
        self.state = replace(self.state, new_checkpoint=False)
        return True

    def enter(self, state: State, message: str | None = None, *, since_s: float | None = None) -> None:
        """The driver is in another state, since now or `since_s`: the one place where that is recorded, counted and shown.
        Raises IllegalTransition."""
        self.state = follow(self._story, state)
        self._story.append(state)
        if state.category is not None:
            self.launch.progress.goodput.switch(state.category, self.clock() if since_s is None else since_s)
        if state.label:
            self._show(state.label, message)

    def _show(self, label: str, message: str | None = None) -> None:
        if label != self._label:
            self._label = label
            self.launch.mark("state", state=label)
            self.exported.state(label, self.clock())
        status: Status = {"ev": "status", "state": label}
        if message:
            status["message"] = message
        self.board.post(status)

    def post_incident(self, incident: Incident) -> None:
        self.board.post({"ev": "incident", "incident": incident.to_dict()})

    def note(self, message: str, level: Level = "info") -> None:
        self.board.post({"ev": "note", "message": message, "level": level})


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


QUIET_S = 30.0
"""After so long without a failure the storage is there again. A request without an answer fails after 20 s, and is made again."""


class Outages:
    """Counts the requests of the hosts and of this process, and notes when they fail. Only the driver's thread may call it."""

    def __init__(self, progress: Progress, note: Callable[[str, Level], None], clock: Callable[[], float]):
        self._progress, self._note, self._clock = progress, note, clock
        self._number = 0
        """Of those that failed since the storage was last there."""
        self._began_s = self._last_s = 0.0
        self._why = ""

    def failed(self, number: int, why: str, who: str) -> None:
        """`why` is that of the last one."""
        if self._number == 0:
            self._began_s = self._clock()
            line = f"requests to the storage fail (the first of {who}): {why}; training goes on, and they are tried again"
            self._note(line, "warning")
        self._number, self._last_s, self._why = self._number + number, self._clock(), why
        self._progress.failed_requests += number

    def look(self) -> None:
        """Called often: counts those of this process, and says when it is over."""
        self.made(usage.HERE.take())
        number, why = failed_requests.HERE.take()
        if number:
            self.failed(number, why, "the driver")
        if self._number and self._clock() - self._last_s > QUIET_S:
            self._note(f"the storage answers again; until then {self._so_far()}", "info")
            self._number = 0

    def made(self, counts: Mapping[str, int]) -> None:
        """Counts requests and bytes, by kind."""
        for kind, number in counts.items():
            self._progress.requests[kind] = self._progress.requests.get(kind, 0) + number

    def evidence(self) -> dict[str, str]:
        """Returns what an incident that happens now should tell; empty if the storage is there."""
        return {"storage": f"{self._so_far()}: {self._why}"} if self._number else {}

    def _so_far(self) -> str:
        return f"{self._number} requests to it failed in {self._last_s - self._began_s:.0f} s"
