"""Takes in what the hosts tell, and passes it on: to the ledgers, to tracking, to Ray Train, to whoever watches.

What the gang told while no driver lived waits with the agents. The driver that adopts the gang gets all events of the generation
again: those that its predecessor had taken in already only rebuild the picture of the generation, the others count.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from cluster.agent.phases import PHASES
from orchestrator.driver.generation import Generation, in_order
from orchestrator.driver.ray_train import Reporter
from orchestrator.events import BoardLike
from orchestrator.policies.stragglers import Straggler, StragglerPolicy, Stragglers
from orchestrator.run_state.incidents import Action, Incident, of_anomaly
from orchestrator.run_state.launch import Launch
from orchestrator.tracking.prometheus import Gauges
from trainers.recorders.dispatch import Recorders

KEPT_STEP_TIMES = 100


class Intake:
    """The way of every event. Decides nothing."""

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
        self.launch, self.board, self.reporter, self.gauges, self.clock = launch, board, reporter, gauges, clock
        self.recorders = recorders
        self._step_times_s: dict[int, deque[float]] = {}
        self.new_checkpoint = False
        """Since the driver last looked."""
        self._straggler_policy = straggler_policy
        self._stragglers = Stragglers(0, straggler_policy)

    @property
    def step_s(self) -> dict[int, float]:
        """Median seconds of a step, by number of hosts."""
        return {hosts: statistics.median(times) for hosts, times in self._step_times_s.items()}

    def start(self, generation: Generation) -> None:
        """Forgets what it knew of the hosts of the generation before."""
        self._stragglers = Stragglers(generation.num_hosts, self._straggler_policy)

    def take_answer(self, generation: Generation, host: int, answer: Mapping[str, Any]) -> None:
        """What an agent's `poll` returned."""
        self.catch_up(generation, {host: answer})

    def catch_up(self, generation: Generation, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """What the agents' polls returned, in the order in which it happened."""
        events = {host: [e for e in answer["events"] if self._belongs(generation, e)] for host, answer in answers.items()}
        for host, _, event in in_order(events):
            self.take(generation, host, event, known=event["n"] < self.launch.seen.get(host, 0))
        for host, answer in answers.items():
            self.launch.seen[host] = max(self.launch.seen.get(host, 0), answer["cursor"])
            if answer["heartbeat"] and self._belongs(generation, answer["heartbeat"]):
                self.take(generation, host, answer["heartbeat"])

    def _belongs(self, generation: Generation, event: Mapping[str, Any]) -> bool:
        return event.get("generation", generation.number) == generation.number

    def take(self, generation: Generation, host: int, event: Mapping[str, Any], known: bool = False) -> None:
        # A host's clock may be wrong by any amount: nothing happened before the generation began, or will happen later than now.
        event = {**event, "t": min(max(event["t"], generation.began_at_s), self.clock())}
        was_training, phase = generation.training, generation.phase
        generation.take(host, event)
        launch = self.launch
        launch.high_water_step = max(launch.high_water_step, generation.step)
        if not generation.wants_restart:
            launch.goodput.switch(generation.category, event["t"])
        if known:
            return
        if generation.phase != phase:
            self.say(PHASES[generation.phase].label if generation.phase in PHASES else generation.phase)
        if generation.training and not was_training:
            self._training_again(generation)
        if handler := self._handlers.get(event["ev"]):
            handler(self, generation, host, event)

    # ------------------------------------------------------------------ events that concern more than the generation

    def _on_metrics(self, generation: Generation, host: int, event: Mapping[str, Any]) -> None:
        metrics, step, launch = event["metrics"], event["step"], self.launch
        if "step_time_s" in metrics:
            times = self._step_times_s.setdefault(generation.num_hosts, deque(maxlen=KEPT_STEP_TIMES))
            times.append(metrics["step_time_s"])
        for category in ("data_wait", "checkpoint"):
            launch.goodput.move("step", category, event.get("seconds", {}).get(category, 0.0))
        kind = event.get("kind") or ("eval" if any(name.startswith("eval_") for name in metrics) else "train")
        if launch.is_new(step, kind):
            self.board.post({"ev": "metrics", "step": step, "metrics": metrics, "kind": kind})
            launch.publish(step, metrics)
            self.recorders.record(step, metrics, event.get("distributions"))
            self.reporter.report({"step": step, **metrics})
            about = {"step": step, "generations": launch.generations, "goodput": launch.goodput.goodput(self.clock())}
            self.gauges.set({**metrics, **about})

    def _on_preview(self, generation: Generation, host: int, event: Mapping[str, Any]) -> None:
        about = {"step": event["step"], "previews": event["previews"]}
        self.board.post({"ev": "preview", **about})
        self.launch.preview(about, lambda problem: self.note(problem, "warning"))

    def _on_saved(self, generation: Generation, host: int, event: Mapping[str, Any]) -> None:
        if host == 0:
            self.launch.saved(event["step"], event["path"])
            self.new_checkpoint = True
            self.board.post({"ev": "checkpoint", "step": event["step"], "path": event["path"]})
            self.reporter.report({"step": event["step"]}, checkpoint_path=event["path"])

    def _on_save_failed(self, generation: Generation, host: int, event: Mapping[str, Any]) -> None:
        text = f"the checkpoint of step {event['step']} failed, training goes on and tries again: {event['error']}"
        self.note(f"host {host}: {text}", "warning")

    def _on_restored(self, generation: Generation, host: int, event: Mapping[str, Any]) -> None:
        if host == 0:
            for bad in event["skipped"]:
                self.note(f"checkpoint {bad['step']} was not used: {bad['why']}", "warning")

    def _on_note(self, generation: Generation, host: int, event: Mapping[str, Any]) -> None:
        self.note(f"host {host}: {event['message']}")

    def _on_profile(self, generation: Generation, host: int, event: Mapping[str, Any]) -> None:
        if event["problem"] is None:
            steps = f"steps {event['first_step']} to {event['last_step']}"
            self.note(f"host {host}: a profile of {steps} is in {event['path']}; to look at it: xprof --logdir {event['path']}")
        elif event["id"] is None:  # else whoever asked is told
            self.note(f"host {host}: no profile: {event['problem']}", "warning")

    def _on_notice(self, generation: Generation, host: int, event: Mapping[str, Any]) -> None:
        self.note(f"host {host} is about to be taken away: {event['reason']}", "warning")

    def _on_anomaly(self, generation: Generation, host: int, event: Mapping[str, Any]) -> None:
        """The trainer has dealt with it by itself: it is recorded here."""
        incident = of_anomaly(event, generation.number)
        self.launch.record(incident)
        self.post_incident(incident)

    def _on_heartbeat(self, generation: Generation, host: int, event: Mapping[str, Any]) -> None:
        if "busy_s" in event:
            for slow in self._stragglers.take(host, event["t"], event["batch_index"], event["busy_s"]):
                self._record_straggler(generation, slow)

    def _record_straggler(self, generation: Generation, slow: Straggler) -> None:
        """It is told, and put on record; nothing is done about it."""
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
        self.launch.record(incident)
        self.post_incident(incident)

    _handlers = {  # noqa: RUF012
        "metrics": _on_metrics,
        "preview": _on_preview,
        "saved": _on_saved,
        "save_failed": _on_save_failed,
        "restored": _on_restored,
        "note": _on_note,
        "profile": _on_profile,
        "notice": _on_notice,
        "anomaly": _on_anomaly,
        "heartbeat": _on_heartbeat,
    }

    def _training_again(self, generation: Generation) -> None:
        """The gang's first step is complete: the incident before it, if any, is over."""
        self.say("training")
        incident = self.launch.open_incident()
        if incident is None:
            return
        for phase, until in (("go", "join"), ("join", "restore"), ("restore", "compile"), ("compile", "train")):
            at_s = generation.all_entered_s(until)
            if at_s is not None:
                incident.mark(phase, at_s)
        incident.recovered(generation.started_s() or self.clock(), self.step_s.get(generation.num_hosts, 0.0))
        incident.resumed_step = generation.resumed_step
        # Of a lost driver: the last heartbeat that it took in may be older than the checkpoint.
        incident.step = max(incident.step or 0, generation.resumed_step or 0)
        self.launch.update(incident)
        self.board.post({"ev": "recovered", "incident": incident.to_dict()})

    def say(self, state: str, message: str | None = None) -> None:
        self.board.post({"ev": "status", "state": state, **({"message": message} if message else {})})

    def post_incident(self, incident: Incident) -> None:
        self.board.post({"ev": "incident", "incident": incident.to_dict()})

    def note(self, message: str, level: str = "info") -> None:
        self.board.post({"ev": "note", "message": message, "level": level})
