"""What a launch of a run knows beyond any one driver's life: ledgers, budgets, progress. Kept in the run's storage.

A *launch* is one use of the command. Ray Train may restart its driver; the next driver takes everything over from here. Another
launch of the same run name goes on from the run's checkpoints with ledgers and budgets of its own.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from orchestrator import storage
from orchestrator.lease import Lease, acquire
from orchestrator.ledger import Action, Goodput, Incident
from orchestrator.restart import PastFailure
from orchestrator.tracking import Tracker, TrackingConfig

STATE = "launch.json"
STORE_EVERY_S = 1.0
TRACKING_CLOSE_TIMEOUT_S = 10.0
HURRIED_CLOSE_TIMEOUT_S = 1.0
"""When the machine is about to be taken away: what is not tracked by then is shipped by the next launch."""


class Launch:
    """Taken up by a driver: holds the run's lease from here on, until `close`. Raises RunInUse if another launch lives."""

    def __init__(
        self,
        run_dir: str,
        launch_id: str,
        started_at_s: float,
        tracking: TrackingConfig,
        params: dict[str, Any],
        clock: Callable[[], float],
    ):
        self.run_dir, self.launch_id, self.clock = run_dir, launch_id, clock
        self.succeeded = threading.Event()
        """Set when another driver has taken the run: this one must stop at once, and write nothing more."""
        self.lease: Lease = acquire(run_dir, launch_id, clock, on_lost=self.succeeded.set)
        self.goodput = Goodput(started_at_s)
        self.incidents: list[Incident] = []
        self.history: list[PastFailure] = []
        self.generations = 0
        self.drivers = 1
        self.high_water_step = 0
        self.saved_path: str | None = None
        self.checkpoint_step: int | None = None
        self.gang: dict[str, Any] | None = None
        """Of the present generation: how another driver finds its agents, and what they were told."""
        self.seen: dict[int, int] = {}
        """Events of the present generation that were taken in, by host. Stored together with all that came of them."""
        self.storage_problem: str | None = None
        """Why what a next driver needs could not be stored; None while all is well."""
        self._published = {"train": -1, "eval": -1}
        self._stored_at_s = 0.0
        self._last_sign_s = started_at_s
        """Of the driver before: when it last stored what it knew."""
        self._take_over(storage.read_json(self._path))
        self.tracker = Tracker(run_dir, tracking, run_dir.rstrip("/").rsplit("/", 1)[-1], params)

    def next_generation(self) -> int:
        self.generations += 1
        return self.generations - 1

    def formed(self, gang: dict[str, Any]) -> None:
        """A generation has begun: `gang` is what its next driver would need to find it."""
        self.gang, self.seen = gang, {}
        self.store()

    def reseated(self, record: dict[str, Any]) -> None:
        """`record`: what the generation's gang would write of itself now. Called often, while it trains: a seat may get another
        agent, whom the next driver must find."""
        if self.gang is not None and self.gang["gang"] != record:
            self.gang["gang"] = record
            self.store()

    def saved(self, step: int, path: str) -> None:
        self.checkpoint_step, self.saved_path = step, path
        self.store()

    def failed(self, past: PastFailure, incident: Incident) -> None:
        self.history.append(past)
        self.record(incident)

    def record(self, incident: Incident) -> None:
        self.incidents.append(incident)
        self.store()

    def open_incident(self) -> Incident | None:
        """The one that the gang has not recovered from yet."""
        return next((incident for incident in reversed(self.incidents) if incident.open), None)

    def is_new(self, step: int, kind: str) -> bool:
        """False for what an earlier generation published: trained again, it is the same again. `kind`: `train` or `eval`."""
        if step <= self._published[kind]:
            return False
        self._published[kind] = step
        return True

    def preview(self, about: dict[str, Any]) -> None:
        """Texts that the model generated: a file for each step, in the run's folder and in MLflow."""
        path = storage.join(self.run_dir, "previews", f"{about['step']}.json")
        storage.write_json(path, about)
        self.tracker.log_artifact(path, "previews")

    def publish(self, step: int, metrics: dict[str, float]) -> None:
        self.tracker.log_metrics(step, metrics)

    def tick(self) -> None:
        """Called often: stores what changed, now and then, so that a next driver finds the clocks where they were."""
        if self.clock() - self._stored_at_s >= STORE_EVERY_S:
            self.store()

    def store(self) -> None:
        """Writes all that the next driver needs; called at every change that must not be lost.

        A storage that is full or gone does not stop the training: `storage_problem` says so until a later store succeeds.
        """
        self._stored_at_s = self.clock()
        try:
            storage.write_json(self._path, self._document())
            self.storage_problem = None
        except OSError as error:
            self.storage_problem = f"{self._path} could not be written: {error.strerror or error}"

    def close(self, status: str, timeout_s: float = TRACKING_CLOSE_TIMEOUT_S) -> str | None:
        """Delivers what is to be tracked and gives the run free; returns what could not be delivered, as a sentence."""
        self.gang = None
        self.store()
        left = self.tracker.close(timeout_s, status=status)
        self.lease.release()
        return left

    def adopted(self, now_s: float, step: int) -> Incident:
        """The gang of the driver before lives, and trained on: nothing was lost but a watcher."""
        incident = self._driver_lost(now_s, Action.ADOPT, "the training went on meanwhile")
        incident.resumed_step = incident.step = step
        self.record(incident)
        return incident

    def gang_lost(self, now_s: float, why: str) -> Incident:
        """The gang of the driver before is gone too, or cannot be taken over: what passed since was lost."""
        self.goodput.switch("detection", self.goodput.counted_to_s)
        incident = self._driver_lost(now_s, Action.RESTART, f"its gang could not be taken over: {why}")
        self.record(incident)
        return incident

    def _driver_lost(self, now_s: float, action: Action, detail: str) -> Incident:
        incident = Incident(
            kind="driver_lost",
            host=None,
            generation=self.generations - 1,
            step=self.high_water_step,
            failed_at_s=min(self._last_sign_s, now_s),
            evidence={"summary": f"the driver process ended without a verdict; Ray Train started another; {detail}"},
            action=action,
            detail=detail,
        )
        incident.mark("detect", now_s)
        return incident

    @property
    def _path(self) -> str:
        return storage.join(self.run_dir, STATE)

    def _document(self) -> dict[str, Any]:
        return {
            "launch_id": self.launch_id,
            "epoch": self.lease.epoch,
            "goodput": self.goodput.to_dict(self.clock()),
            "incidents": [incident.to_dict() for incident in self.incidents],
            "history": [dataclasses.asdict(past) for past in self.history],
            "generations": self.generations,
            "drivers": self.drivers,
            "high_water_step": self.high_water_step,
            "saved_path": self.saved_path,
            "checkpoint_step": self.checkpoint_step,
            "published": self._published,
            "gang": self.gang,
            "seen": {str(host): cursor for host, cursor in self.seen.items()},
        }

    def _take_over(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        # Of any launch: how far the run has been, and what was published of it.
        self.high_water_step = state["high_water_step"]
        self.saved_path, self.checkpoint_step = state["saved_path"], state["checkpoint_step"]
        self._published = state["published"]
        if state["launch_id"] != self.launch_id:
            return
        self.goodput = Goodput.resume(state["goodput"])
        self._last_sign_s = self.goodput.counted_to_s
        self.incidents = [Incident.from_dict(data) for data in state["incidents"]]
        self.history = [PastFailure.from_dict(data) for data in state["history"]]
        self.generations, self.drivers = state["generations"], state["drivers"] + 1
        self.gang = state["gang"]
        self.seen = {int(host): cursor for host, cursor in state["seen"].items()}
