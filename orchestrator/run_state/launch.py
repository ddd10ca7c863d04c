"""What a launch of a run knows beyond any one driver's life: ledgers, budgets, progress. Kept in the run's storage.

A *launch* is one use of the command. Ray Train may restart its driver; the next driver takes everything over from here. Another
launch of the same run name goes on from the run's checkpoints with ledgers and budgets of its own.

Three files, by how often they change: `launch.json` each second, `gang.json` when the gang does, `incidents.jsonl` with each
incident. A thread of their own writes them: a storage that hangs holds up nobody.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.failures.history import PastFailure
from orchestrator.run_state import incident_log
from orchestrator.run_state.goodput import Goodput
from orchestrator.run_state.incident_log import KEPT_FAILURES, KEPT_INCIDENTS, Entry
from orchestrator.run_state.incidents import Action, Incident
from orchestrator.run_state.lease import Lease, Time, acquire
from orchestrator.run_state.run_folder import RunFolder
from orchestrator.run_state.storage_writer import Writer
from orchestrator.tracking.config import TrackingConfig
from orchestrator.tracking.tracker import Tracker
from trainers.checkpoint import committed, fence
from trainers.checkpoint.committed import Committed
from trainers.storage import documents

STATE, GANG = "launch.json", "gang.json"
CHECKPOINTS = "checkpoints"
STORE_EVERY_S = 1.0
TRACKING_CLOSE_TIMEOUT_S = 10.0
HURRIED_CLOSE_TIMEOUT_S = 1.0
"""When the machine is about to be taken away: what is not tracked by then is shipped by the next launch."""


def take_up(
    run_dir: str,
    launch_id: str,
    started_at_s: float,
    tracking: TrackingConfig,
    params: dict[str, Any],
    clock: Callable[[], float],
    waiting: Callable[[str], None] = lambda message: None,
) -> Launch:
    """The launch, for a driver: holds the run's lease from here on, until `close`. Raises RunInUse if another launch lives.

    `waiting` is told if it takes time to find out whether another machine's driver lives.
    """
    lost = threading.Event()
    above = _term_so_far(run_dir)
    lease = acquire(run_dir, launch_id, Time(wall=clock), on_lost=lost.set, waiting=waiting, above_term=above)
    tracker = Tracker(run_dir, tracking, run_dir.rstrip("/").rsplit("/", 1)[-1], params)
    recorded = committed.of_run(Path(run_dir), Path(run_dir, CHECKPOINTS))
    return Launch(RunFolder(run_dir), launch_id, started_at_s, lease, lost, tracker, clock, Writer(), recorded)


def _term_so_far(run_dir: str) -> int:
    """Of the latest driver, as far as anything beside the leases knows: what was saved under a higher term goes first."""
    try:
        stored = (documents.read_json(documents.join(run_dir, STATE)) or {}).get("driver_term", 0)
        return max([stored, *(term.driver_term for term in fence.claims(Path(run_dir, CHECKPOINTS)))])
    except (OSError, documents.StorageError):
        return 0  # the leases know, unless somebody has deleted them


def read_gang(run_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """How to find the agents of the run's present generation: `address` of the cluster, `generation`, `gang` (`Gang.record`).
    None while no gang is at work. Raises StorageError."""
    document = documents.read_json(documents.join(run_dir, GANG))
    return document["gang"] if document else None


class Launch:
    """Made by `take_up`. Only the driver's thread may call; `lease_lost` is set by another."""

    def __init__(
        self,
        folder: RunFolder,
        launch_id: str,
        started_at_s: float,
        lease: Lease,
        lease_lost: threading.Event,
        tracker: Tracker,
        clock: Callable[[], float],
        writer: Writer,
        recorded: Committed = committed.NOTHING,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.run_dir, self.launch_id, self.clock = folder.path, launch_id, clock
        self.lease, self.tracker = lease, tracker
        self.lease_lost = lease_lost
        """Set when another driver has taken the run: this one must stop at once, and write nothing more."""
        self.goodput = Goodput(started_at_s)
        self.num_incidents = 0
        self.history: list[PastFailure] = []
        """The newest failures, oldest first."""
        self.generations = 0
        self.drivers = 1
        self.high_water_step = 0
        self.saved_path: str | None = None
        self.checkpoint_step: int | None = None
        self.committed = Committed()
        """Of the run, whichever launch: what its checkpoints' folder must show."""
        self.gang: dict[str, Any] | None = None
        """Of the present generation: how another driver finds its agents, and what they were told."""
        self.seen: dict[int, int] = {}
        """Events of the present generation that were taken in, by host. Stored together with all that came of them."""
        self.problems: list[str] = []
        """What was wrong with what an earlier driver left, as sentences."""
        self._folder, self._writer = folder, writer
        self._entries: list[Entry] = []
        self._published = {"train": -1, "eval": -1}
        self._num_published = 0
        self._monotonic = monotonic
        self._stored_at_s = monotonic()
        self._last_sign_s = started_at_s
        """Of the driver before: when it last stored what it knew."""
        self._take_over()
        # Of what the documents of launches have lost, the trainers' own record may tell.
        self.committed = self.committed.and_(recorded).and_(Committed(run=uuid.uuid4().hex[:12]))

    def next_generation(self) -> int:
        self.generations += 1
        return self.generations - 1

    def formed(self, gang: dict[str, Any]) -> None:
        """A generation is about to begin: `gang` is what its next driver would need to find it."""
        self.gang, self.seen = gang, {}
        self._store_gang()

    def slots_changed(self, record: dict[str, Any]) -> None:
        """`record`: what the generation's gang would write of itself now. Called when that has changed: a slot may get another
        agent, whom the next driver must find."""
        if self.gang is not None:
            self.gang = {**self.gang, "gang": record}
            self._store_gang()

    def adopt_generation(self, number: int) -> None:
        """The agents are in another generation than `gang.json` knows: the driver before ended between the two."""
        assert self.gang is not None
        self.generations = max(self.generations, number + 1)
        self.gang, self.seen = {**self.gang, "generation": number}, {}
        self._store_gang()

    def saved(self, step: int, path: str) -> None:
        self.checkpoint_step, self.saved_path = step, path
        self.committed = self.committed.and_(Committed(step=step))
        self.store()

    @property
    def incidents(self) -> list[Incident]:
        """The newest ones, oldest first."""
        return [entry.incident for entry in self._entries]

    def failed(self, past: PastFailure, incident: Incident) -> None:
        self.history = [*self.history[1 - KEPT_FAILURES :], past]
        self.record(incident, past)

    def record(self, incident: Incident, past: PastFailure | None = None) -> None:
        self._entries = [*self._entries[1 - KEPT_INCIDENTS :], Entry(self.num_incidents, incident, past)]
        self.num_incidents += 1
        self._write_incident(self._entries[-1])

    def update(self, incident: Incident) -> None:
        """More is known of one that was recorded."""
        for entry in self._entries:
            if entry.incident is incident:
                self._write_incident(entry)

    def open_incident(self) -> Incident | None:
        """The one that the gang has not recovered from yet."""
        return next((incident for incident in reversed(self.incidents) if incident.open), None)

    def is_new(self, step: int, kind: str) -> bool:
        """False for what an earlier generation published: trained again, it is the same again. `kind`: `train` or `eval`."""
        if step <= self._published[kind]:
            return False
        self._published[kind] = step
        return True

    def preview(self, about: dict[str, Any], on_problem: Callable[[str], None]) -> None:
        """Texts that the model generated: a file for each step, in the run's folder and in MLflow."""
        name = documents.join("previews", f"{about['step']}.json")

        def write() -> None:
            try:
                self._folder.write(name, about)
            except (documents.StorageError, OSError) as error:  # a look at the model is worth no failure
                on_problem(f"the previews of step {about['step']} are not kept: {error}")
                return
            self.tracker.log_artifact(documents.join(self.run_dir, name), "previews")

        self._writer.put(f"the previews of step {about['step']}", write)

    def publish(self, step: int, metrics: dict[str, float]) -> None:
        at_s = self.clock()
        self._num_published += 1
        self._writer.put(f"metrics {self._num_published}", lambda: self.tracker.log_metrics(step, metrics, at_s))

    def write_beside(self, name: str, write: Callable[[], None]) -> None:
        """Has something else written to the run's folder, in turn with the launch's own files."""
        self._writer.put(name, write)

    def tick(self) -> None:
        """Called often: stores what changed, now and then, so that a next driver finds the clocks where they were."""
        if self._monotonic() - self._stored_at_s >= STORE_EVERY_S:
            self.store()

    def store(self) -> None:
        """Has all that changes all the time written; called at every change that must not be lost.

        A storage that is full, gone or stuck does not stop the training: `storage_problem` says so until a later write succeeds.
        """
        self._stored_at_s = self._monotonic()
        document = self._document()
        self._write(STATE, lambda: self._folder.write(STATE, document))

    def flush(self, timeout_s: float) -> bool:
        """Waits, at most so long, until all is stored; whether it is."""
        return self._writer.flush(timeout_s)

    @property
    def storage_problem(self) -> str | None:
        """Why what a next driver needs is not stored; None while all is well."""
        return self._writer.problem()

    def close(self, status: str, timeout_s: float = TRACKING_CLOSE_TIMEOUT_S) -> str | None:
        """Delivers what is to be tracked and gives the run free; returns what could not be delivered, as a sentence."""
        self.gang = None
        self._store_gang()
        written = self.flush(timeout_s)
        problem = None if written else f"not all was written to {self.run_dir}: {self.storage_problem or 'there was no time to'}"
        self.stop()
        left = self.tracker.close(timeout_s, status=status)
        self.lease.release()
        return "; ".join(filter(None, [problem, left])) or None

    def stop(self) -> None:
        """Writes nothing more: another driver has the run, or all is written."""
        self._writer.stop()

    def adopted(self, now_s: float, step: int) -> Incident:
        """The gang of the driver before lives, and trained on: nothing was lost but a watcher."""
        incident = self._driver_lost(now_s, Action.ADOPT, "the training went on meanwhile")
        incident.resumed_step = incident.step = step
        self.record(incident)
        return incident

    def gang_lost(self, now_s: float, why: str) -> Incident:
        """The gang of the driver before is gone too, or cannot be taken over: what passed since was lost."""
        self.goodput.switch("detection", self.goodput.counted_to_s)
        self.generations += 1  # one may have begun that no record tells of
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

    # ------------------------------------------------------------------ files

    def _write(self, name: str, job: Callable[[], None]) -> None:
        def unless_superseded() -> None:
            # A driver that was asleep must not write over what its successor knows.
            if not self.lease_lost.is_set() and not self.lease.superseded():
                job()

        self._writer.put(name, unless_superseded)

    def _store_gang(self) -> None:
        document = {"launch_id": self.launch_id, "driver_term": self.lease.driver_term, "gang": self.gang}
        self._write(GANG, lambda: self._folder.write(GANG, document))
        self.store()

    def _write_incident(self, entry: Entry) -> None:
        text = incident_log.line(self.launch_id, entry)
        self._write(f"incident {entry.number}", lambda: self._folder.append(incident_log.NAME, text))
        self.store()

    def _document(self) -> dict[str, Any]:
        return {
            "launch_id": self.launch_id,
            "driver_term": self.lease.driver_term,
            "goodput": self.goodput.to_dict(self.clock()),
            "generations": self.generations,
            "drivers": self.drivers,
            "high_water_step": self.high_water_step,
            "saved_path": self.saved_path,
            "checkpoint_step": self.checkpoint_step,
            "committed": dataclasses.asdict(self.committed),
            "published": dict(self._published),
            "seen": {
                "generation": self.gang["generation"] if self.gang else None,
                "events": [self.seen.get(host, 0) for host in range(max(self.seen, default=-1) + 1)],
            },
        }

    def _take_over(self) -> None:
        state, gang = self._read(STATE), self._read(GANG)
        if state is None:
            return
        # Of any launch: how far the run has been, and what was published of it.
        self.high_water_step = state["high_water_step"]
        self.saved_path, self.checkpoint_step = state["saved_path"], state["checkpoint_step"]
        self.committed = Committed(**state.get("committed", {"step": self.checkpoint_step}))
        self._published = state["published"]
        if state["launch_id"] != self.launch_id:
            return
        self.goodput = Goodput.resume(state["goodput"])
        self._last_sign_s = self.goodput.counted_to_s
        self.generations, self.drivers = state["generations"], state["drivers"] + 1
        if gang is not None and gang["launch_id"] == self.launch_id:
            self.gang = gang["gang"]
        if self.gang is not None:
            self.generations = max(self.generations, self.gang["generation"] + 1)
            if state["seen"]["generation"] == self.gang["generation"]:
                self.seen = dict(enumerate(state["seen"]["events"]))
        entries = incident_log.read(self._folder.last_lines(incident_log.NAME), self.launch_id)
        self._entries = entries[-KEPT_INCIDENTS:]
        self.history = [entry.past for entry in entries if entry.past is not None][-KEPT_FAILURES:]
        self.num_incidents = entries[-1].number + 1 if entries else 0

    def _read(self, name: str) -> dict[str, Any] | None:
        """A damaged document is set aside: what it said is lost, but a driver that cannot start loses everything."""
        try:
            return self._folder.read(name)
        except documents.StorageError as error:
            aside = self._folder.set_aside(name)
            self.problems.append(f"{error.args[0].partition(';')[0]}; set aside as {aside}: ledgers and budgets begin anew")
            return None
