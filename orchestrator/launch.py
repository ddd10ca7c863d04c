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
from orchestrator.failures import FailureKind
from orchestrator.lease import Lease, acquire
from orchestrator.ledger import Goodput, Incident
from orchestrator.restart import PastFailure
from orchestrator.tracking import Tracker, TrackingConfig

STATE = "launch.json"
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
        self._published = {"train": -1, "eval": -1}
        self._take_over(storage.read_json(self._path))
        self.tracker = Tracker(run_dir, tracking, run_dir.rstrip("/").rsplit("/", 1)[-1], params)

    def next_generation(self) -> int:
        self.generations += 1
        self.store()
        return self.generations - 1

    def saved(self, step: int, path: str) -> None:
        self.checkpoint_step, self.saved_path = step, path
        self.store()

    def failed(self, past: PastFailure, incident: Incident) -> None:
        self.history.append(past)
        self.incidents.append(incident)
        self.store()

    def open_incident(self) -> Incident | None:
        """The one that the gang has not recovered from yet."""
        last = self.incidents[-1] if self.incidents else None
        return last if last is not None and last.resumed_step is None and last.action == "restart" else None

    def is_new(self, step: int, metrics: dict[str, float]) -> bool:
        """False for what an earlier generation published: trained again, it is the same again."""
        kind = "eval" if any(name.startswith("eval_") for name in metrics) else "train"
        if step <= self._published[kind]:
            return False
        self._published[kind] = step
        return True

    def publish(self, step: int, metrics: dict[str, float]) -> None:
        self.tracker.log_metrics(step, metrics)

    def store(self) -> None:
        """Writes all that the next driver needs; called at every change that must not be lost."""
        storage.write_json(
            self._path,
            {
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
            },
        )

    def close(self, status: str, timeout_s: float = TRACKING_CLOSE_TIMEOUT_S) -> str | None:
        """Delivers what is to be tracked and gives the run free; returns what could not be delivered, as a sentence."""
        self.store()
        left = self.tracker.close(timeout_s, status=status)
        self.lease.release()
        return left

    @property
    def _path(self) -> str:
        return storage.join(self.run_dir, STATE)

    def _take_over(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        # Of any launch: how far the run has been, and what was published of it.
        self.high_water_step = state["high_water_step"]
        self.saved_path, self.checkpoint_step = state["saved_path"], state["checkpoint_step"]
        self._published = state["published"]
        if state["launch_id"] != self.launch_id:
            return
        now_s = self.clock()
        self.goodput = Goodput.resume(state["goodput"], now_s)
        self.incidents = [Incident.from_dict(data) for data in state["incidents"]]
        self.history = [_past_failure(data) for data in state["history"]]
        self.generations, self.drivers = state["generations"], state["drivers"] + 1
        lost_at_s = state["goodput"]["counted_to_s"]
        self.incidents.append(driver_lost(self.generations - 1, self.high_water_step, lost_at_s, now_s))


def driver_lost(generation: int, step: int, lost_at_s: float, now_s: float) -> Incident:
    incident = Incident(
        kind="driver_lost",
        host=None,
        generation=generation,
        step=step,
        failed_at_s=lost_at_s,
        evidence={"summary": "the driver process ended without a verdict; Ray Train started another"},
        action="restart",
    )
    incident.mark("detect", now_s)
    return incident


def _past_failure(data: dict[str, Any]) -> PastFailure:
    exception = data["exception"]
    return PastFailure(**{**data, "kind": FailureKind(data["kind"]), "exception": tuple(exception) if exception else None})
