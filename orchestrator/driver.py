"""The driver: reserves the gang, starts generations, watches them, and decides what follows. It computes nothing itself."""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import ray

from cluster.gang import Gang, GangTimeout, clear, reserve
from orchestrator import failures, storage
from orchestrator.board import BoardLike
from orchestrator.config import JobConfig
from orchestrator.gauges import Gauges
from orchestrator.generation import Generation
from orchestrator.launch import Launch
from orchestrator.ledger import Incident
from orchestrator.ray_train import Reporter
from orchestrator.restart import GiveUp, decide, past_failure

POLL_S = 1.0
"""How long an agent holds a poll when nothing happens: what happens is told at once."""
WATCH_INTERVAL_S = 0.2
"""How often the driver looks for a stop request."""
AGENT_TIMEOUT_S = 20.0
"""For an agent's answer to a call that does not wait for its process."""
STOP_TIMEOUT_S = 120.0
"""For the gang to save and stop on request; then it is killed."""


class TrainingFailed(Exception):
    """The run cannot go on; the message is for the user."""


class Superseded(Exception):
    """Another driver has taken the run: it has the say now."""


class Driver:
    """One driver process's part in a launch. `run` returns the summary of a finished or stopped run, or raises TrainingFailed."""

    def __init__(
        self, config: JobConfig, launch: Launch, board: BoardLike, reporter: Reporter, clock: Callable[[], float] = time.time
    ):
        self.config, self.launch, self.board, self.reporter, self.clock = config, launch, board, reporter, clock
        self.gang: Gang | None = None
        self.gauges = Gauges(config.training.name)
        self.step_times_s: list[float] = []
        self.stop_sent_at_s: float | None = None

    def run(self) -> dict[str, Any]:
        try:
            self._take_machines()
            while True:
                generation = self._start_generation()
                finished = self._watch(generation)
                if finished:
                    return self._result(generation)
                self._recover(generation)
        finally:
            self._release()

    # ------------------------------------------------------------------ machines

    def _take_machines(self) -> None:
        self._say("reserving")
        self.launch.goodput.switch("schedule", self.clock())
        name = self._name_in_cluster()
        clear(name)
        try:
            self.gang = reserve(self.config.hosts, name, log_dir=storage.join(self.launch.run_dir, "logs"))
        except GangTimeout as error:
            raise TrainingFailed(str(error)) from error
        self.launch.goodput.switch("import", self.clock())
        self._say("importing")
        self.gang.prepare(self._preparation())

    def _name_in_cluster(self) -> str:
        """Two runs of one name in different storages may share a cluster."""
        return f"{self.config.training.name}-{hashlib.sha256(self.launch.run_dir.encode()).hexdigest()[:6]}"

    def _preparation(self) -> dict[str, Any]:
        return {
            "cmd": "prepare",
            "arguments_class": self.config.arguments_class,
            "arguments": dataclasses.asdict(self.config.training),
        }

    def _replace(self, host: int) -> None:
        """A new agent where the host's agent is gone: on a spare, or on the same machine."""
        assert self.gang is not None
        try:
            self.gang.replace(host)
        except GangTimeout as error:
            raise TrainingFailed(str(error)) from error

    def _release(self) -> None:
        if self.gang is not None:
            self.gang.release()

    # ------------------------------------------------------------------ a generation

    def _start_generation(self) -> Generation:
        assert self.gang is not None
        generation = Generation(self.launch.next_generation(), len(self.gang.agents), high_water_step=self.launch.high_water_step)
        address = self._coordinator()
        for host, agent in enumerate(self.gang.agents):
            orders = {
                "cmd": "go",
                "generation": generation.number,
                "host": host,
                "num_hosts": generation.num_hosts,
                "coordinator": address,
                "restore_from": self.launch.saved_path,
                "program_key": self.launch.launch_id,
            }
            agent.go.remote({**orders, **self.gang.orders(host)})
        self.board.post({"ev": "generation", "generation": generation.number, "hosts": generation.num_hosts})
        return generation

    def _coordinator(self) -> str:
        """Host 0's address with a port never used before: joining an old service again is refused."""
        assert self.gang is not None
        about = ray.get(self.gang.agents[0].describe.remote(), timeout=AGENT_TIMEOUT_S)
        return f"{about['host_ip']}:{about['next_port']}"

    def _watch(self, generation: Generation) -> bool:
        """Follows the generation to its end: True if all hosts are done, False if one failed."""
        assert self.gang is not None
        polls = {agent.poll.remote(0, POLL_S): host for host, agent in enumerate(self.gang.agents)}
        while not generation.finished and not generation.broken:
            ready, _ = ray.wait(list(polls), num_returns=1, timeout=WATCH_INTERVAL_S)
            for ref in ready:
                host = polls.pop(ref)
                cursor = self._take_answer(generation, host, ref)
                if cursor is not None:
                    polls[self.gang.agents[host].poll.remote(cursor, POLL_S)] = host
            self._pass_on_stop_request(generation)
            if self.launch.succeeded.is_set():
                raise Superseded(
                    f"another driver has taken the run in {self.launch.run_dir}; this one ends its processes and leaves"
                )
        return generation.finished

    def _take_answer(self, generation: Generation, host: int, ref: ray.ObjectRef) -> int | None:
        """Takes in what an agent told; returns where to go on reading, or None if the agent is gone."""
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayActorError:
            generation.broken.setdefault(host, "agent")
            return None
        for event in answer["events"]:
            if event.get("generation", generation.number) == generation.number:
                self._take_event(generation, host, event)
        if answer["heartbeat"]:
            self._take_event(generation, host, answer["heartbeat"])
        return answer["cursor"]

    def _take_event(self, generation: Generation, host: int, event: dict[str, Any]) -> None:
        was_training, phase = generation.training, generation.phase
        generation.take(host, event)
        launch = self.launch
        launch.high_water_step = max(launch.high_water_step, generation.step)
        if not generation.broken:
            launch.goodput.switch(generation.category, event["t"])
        if generation.phase != phase:
            self._say(STATE_OF_PHASE.get(generation.phase, generation.phase))
        if generation.training and not was_training:
            self._training_again(generation)
        handler = self._handlers.get(event["ev"])
        if handler:
            handler(self, generation, host, event)

    def _on_metrics(self, generation: Generation, host: int, event: dict[str, Any]) -> None:
        metrics, step = event["metrics"], event["step"]
        if "step_time_s" in metrics:
            self.step_times_s.append(metrics["step_time_s"])
        for category in ("data_wait", "checkpoint"):
            self.launch.goodput.move("step", category, event.get("seconds", {}).get(category, 0.0))
        if self.launch.is_new(step, metrics):
            self.board.post({"ev": "metrics", "step": step, "metrics": metrics})
            self.launch.publish(step, metrics)
            self.reporter.report({"step": step, **metrics})
            about = {"step": step, "generations": self.launch.generations, "goodput": self.launch.goodput.goodput(self.clock())}
            self.gauges.set({**metrics, **about})

    def _on_saved(self, generation: Generation, host: int, event: dict[str, Any]) -> None:
        self.launch.saved(event["step"], event["path"])
        self.board.post({"ev": "checkpoint", "step": event["step"], "path": event["path"]})
        self.reporter.report({"step": event["step"]}, checkpoint_path=event["path"])

    def _on_save_failed(self, generation: Generation, host: int, event: dict[str, Any]) -> None:
        self._note(f"host {host}: the checkpoint of step {event['step']} failed, training goes on: {event['error']}", "warning")

    def _on_restored(self, generation: Generation, host: int, event: dict[str, Any]) -> None:
        if host == 0:
            for bad in event["skipped"]:
                self._note(f"checkpoint {bad['step']} is damaged and was not used: {bad['why']}", "warning")

    def _on_note(self, generation: Generation, host: int, event: dict[str, Any]) -> None:
        self._note(f"host {host}: {event['message']}")

    _handlers = {  # noqa: RUF012 - events that concern more than the generation
        "metrics": _on_metrics,
        "saved": _on_saved,
        "save_failed": _on_save_failed,
        "restored": _on_restored,
        "note": _on_note,
    }

    def _training_again(self, generation: Generation) -> None:
        """The gang's first step is complete: the incident before it, if any, is over."""
        self._say("training")
        incident = self.launch.open_incident()
        if incident is None:
            return
        for phase, until in (("go", "join"), ("join", "restore"), ("restore", "compile"), ("compile", "train")):
            at_s = generation.all_entered_s(until)
            if at_s is not None:
                incident.mark(phase, at_s)
        incident.recovered(generation.started_s() or self.clock(), self._median_step_s())
        incident.resumed_step = generation.resumed_step
        # Of a lost driver: the last heartbeat that it took in may be older than the checkpoint.
        incident.step = max(incident.step or 0, generation.resumed_step or 0)
        self.launch.store()
        self.board.post({"ev": "recovered", "incident": incident.to_dict()})

    def _median_step_s(self) -> float:
        return statistics.median(self.step_times_s) if self.step_times_s else 0.0

    # ------------------------------------------------------------------ when it fails

    def _recover(self, generation: Generation) -> None:
        """Kills what is left, finds out what happened, and decides. Returns to go on; raises TrainingFailed to give up."""
        assert self.gang is not None
        launch, detected_s = self.launch, self.clock()
        failure, failed_at_s = self._post_mortem(generation, detected_s)
        launch.goodput.switch("detection", failed_at_s)
        launch.goodput.switch("recovery", detected_s)
        incident = Incident(
            kind=str(failure.kind),
            host=failure.host,
            generation=generation.number,
            step=failure.step if failure.step is not None else generation.step,
            failed_at_s=failed_at_s,
            evidence={**failure.evidence, "collateral": list(failure.collateral)},
        )
        incident.mark("detect", detected_s)
        incident.mark("halt", self.clock())
        launch.failed(past_failure(failure, launch.checkpoint_step), incident)
        decision = decide(launch.history, self.config.driver.restart)
        incident.action = f"give up: {decision.reason}" if isinstance(decision, GiveUp) else "restart"
        self.board.post({"ev": "incident", "incident": incident.to_dict()})
        if isinstance(decision, GiveUp):
            launch.store()
            raise TrainingFailed(self._epitaph(failure, decision.reason))
        if self.board.stop_requested():
            raise TrainingFailed(f"stopped on request while it was failing: {failure.summary}")
        self._say("recovering")
        for host in self._lost(generation):
            self._replace(host)
        if decision.delay_s:
            launch.goodput.switch("idle", self.clock())
            time.sleep(decision.delay_s)
            launch.goodput.switch("recovery", self.clock())
        incident.mark("decide", self.clock())

    def _post_mortem(self, generation: Generation, detected_s: float) -> tuple[failures.Failure, float]:
        """Halts all hosts; returns what happened, and when."""
        assert self.gang is not None
        halts = {
            host: agent.halt.remote() for host, agent in enumerate(self.gang.agents) if generation.broken.get(host) != "agent"
        }
        dead = []
        for host in range(generation.num_hosts):
            try:
                answer = ray.get(halts[host], timeout=AGENT_TIMEOUT_S) if host in halts else None
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                generation.broken[host], answer = "agent", None
            dead.append(failures.read_post_mortem(host, answer, done=host in generation.done))
        # Heartbeats come along with other news: the last one may not have been read.
        self.launch.high_water_step = max([self.launch.high_water_step, *(d.last_step or 0 for d in dead)])
        failure = failures.classify(dead, self._lost(generation))
        times = [d.failed_at_s for d in dead if d.failed_at_s is not None and d.failed]
        return failure, min([*times, detected_s])

    def _lost(self, generation: Generation) -> list[int]:
        return [host for host, how in generation.broken.items() if how == "agent"]

    def _epitaph(self, failure: failures.Failure, reason: str) -> str:
        exception = failure.exception or {}
        where = f" on host {failure.host}" if failure.host is not None else ""
        details = exception.get("traceback") or "\n".join(failure.evidence.get("log_tail", []))
        text = f"{failure.kind}{where}: {failure.summary}\ngiving up: {reason}"
        return text if exception.get("deterministic") or not details else f"{details.rstrip()}\n\n{text}"

    # ------------------------------------------------------------------ stopping

    def _pass_on_stop_request(self, generation: Generation) -> None:
        """Tells the hosts once; kills them if they do not stop in time."""
        assert self.gang is not None
        reason = self.board.stop_requested()
        if reason is None:
            return
        if self.stop_sent_at_s is None:
            if not generation.training:
                raise TrainingFailed(f"stopped on request ({reason}) before the first step: there is nothing new to save")
            self.stop_sent_at_s = self.clock()
            self._say("saving", f"stopping ({reason}): saving first")
            for agent in self.gang.agents:
                agent.order.remote({"cmd": "stop", "reason": reason})
        elif self.clock() - self.stop_sent_at_s > STOP_TIMEOUT_S:
            raise TrainingFailed(f"the hosts did not stop within {STOP_TIMEOUT_S:.0f} s of the request ({reason}); killed")

    def _result(self, generation: Generation) -> dict[str, Any]:
        self.launch.goodput.switch("finish", self.clock())
        done = generation.done[0]
        return {"stop_reason": done["stop_reason"], **done["result"]}

    def _say(self, state: str, message: str | None = None) -> None:
        self.board.post({"ev": "status", "state": state, **({"message": message} if message else {})})

    def _note(self, message: str, level: str = "info") -> None:
        self.board.post({"ev": "note", "message": message, "level": level})


STATE_OF_PHASE = {
    "import": "importing",
    "join": "joining",
    "restore": "restoring",
    "compile": "compiling",
    "train": "training",
    "evaluate": "evaluating",
    "save": "saving",
    "finish": "finishing",
}
