"""The state of a launch that outlives its drivers: ledgers, budgets, progress. It is kept in the run's storage.

A *launch* is one use of the command. Ray Train may restart its driver; the next driver restores everything from here. Another
launch of the same run goes on from the run's checkpoints, with new ledgers and budgets.

There are three files, by how often they change: `launch.json` each second, `gang.json` when the gang changes, `incidents.jsonl`
with each incident. A background thread writes them: storage that hangs does not stop the driver.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from gangway.storage import documents, identity, json_text
from gangway.storage.opening import place_of
from gangway.waits import in_time
from orchestrator.failures.history import PastFailure
from orchestrator.run_state import incident_log
from orchestrator.run_state.goodput import Goodput
from orchestrator.run_state.incidents import Action, Incident
from orchestrator.run_state.lease import Lease, Time, acquire
from orchestrator.run_state.processes import this_machine
from orchestrator.run_state.progress import Progress, kind_of
from orchestrator.run_state.requests import Request
from orchestrator.run_state.run_folder import RunFolder
from orchestrator.run_state.storage_writer import Writer
from orchestrator.run_state.stored import GANG, GANG_KIND, PREVIEWS_KIND, STATE, STATE_KIND, Moment
from orchestrator.tracking.config import TrackingConfig
from orchestrator.tracking.tracker import Tracker
from trainers.checkpoint import layout
from trainers.config.arguments import ORCHESTRATOR_SECTIONS, PLACE

TIMELINE = "timeline.jsonl"
STORE_EVERY_S = 1.0
STORE_IN_BUCKET_EVERY_S, LOOK_IN_BUCKET_EVERY_S = 5.0, 60.0
LOOK_S = 5.0
TRACKING_CLOSE_TIMEOUT_S = 10.0
HURRIED_CLOSE_TIMEOUT_S = 1.0
"""The same when the machine is about to be taken away. The next launch ships what is left."""


def open_launch(
    run_dir: str,
    launch_id: str,
    started_at_s: float,
    tracking: TrackingConfig,
    params: dict[str, Any],
    clock: Callable[[], float],
    waiting: Callable[[str], None] = lambda message: None,
    monotonic: Callable[[], float] = time.monotonic,
) -> Launch:
    """Opens the launch for a driver and takes the run's lease, until `close`. Raises RunInUse if another launch drives the run.

    `waiting` is called with a message if it takes time to find out whether a driver on another machine lives.
    """
    lease_lost = threading.Event()
    # A new term is higher than that of the state too: the row may have been deleted. A damaged state is reported by `Launch`.
    above_term = (STATE_KIND.if_whole(documents.join(run_dir, STATE)) or {}).get("driver_term", 0)
    lease = acquire(run_dir, launch_id, Time(wall=clock), on_lost=lease_lost.set, waiting=waiting, above_term=above_term)
    name, launch = run_dir.rstrip("/").rsplit("/", 1)[-1], (launch_id, started_at_s)
    tracker = Tracker(run_dir, tracking, name, params, launch=launch, driver_term=lease.driver_term)
    folder, course = RunFolder(run_dir, lease.driver_term), _course(params)
    folder.delete_left()
    return Launch(folder, launch_id, started_at_s, lease, lease_lost, tracker, clock, Writer(), course, monotonic)


def _course(params: Mapping[str, Any]) -> str:
    """Returns a digest of the settings of the training: with others, a step that comes again has other numbers."""
    left_out = (*ORCHESTRATOR_SECTIONS, *PLACE)
    training = {name: str(value) for name, value in params.items() if name.partition(".")[0] not in left_out}
    return json_text.digest_of(training)[:16]


def read_gang(run_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Returns how to find the agents of the present generation: `address` of the cluster, `generation`, `gang` (`Gang.record`).
    None if there is no gang. Raises StorageError."""
    document = GANG_KIND.read(documents.join(run_dir, GANG))
    return document["gang"] if document else None


class Launch:
    """A launch, made by `open_launch`: its `progress`, and the run's storage that keeps it. Only the driver's thread may call it;
    another thread sets `lease_lost`."""

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
        course: str | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.run_dir, self.launch_id, self.clock = folder.path, launch_id, clock
        self.lease, self.tracker = lease, tracker
        self.lease_lost = lease_lost
        """Set when another driver has taken the run: this one must stop at once, and write nothing more."""
        self.problems: list[str] = [*tracker.problems]
        """Problems with the files of an earlier driver, as sentences."""
        self.progress = Progress(Goodput(started_at_s), course_of_points=course, stored_at_s=started_at_s)
        self._folder, self._writer = folder, writer
        self._in_bucket = documents.is_url(folder.path)
        self._store_every_s = STORE_IN_BUCKET_EVERY_S if self._in_bucket else STORE_EVERY_S
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._course = course
        self._num_published = self._num_marks = 0
        self._gone: str | None = None
        """The checkpoint that was looked for and not found."""
        self._noted_gone: str | None = None
        self._monotonic = monotonic
        self._stored_at_s = self._looked_at_s = monotonic()
        self._restore()
        # The row may be newer than a `launch.json` that was lost or damaged.
        self._committed(lease.committed_step)

    def next_generation(self) -> int:
        self.progress.generations += 1
        return self.progress.generations - 1

    def formed(self, gang: dict[str, Any]) -> None:
        """Records a generation that is about to begin. `gang` is what the next driver needs to find it."""
        self.progress.gang, self.progress.seen = gang, {}
        self._store_gang()

    def slots_changed(self, record: dict[str, Any]) -> None:
        """Stores the changed `Gang.record`: a slot may have a new agent, which the next driver must find."""
        if self.progress.gang is not None:
            self.progress.gang = {**self.progress.gang, "gang": record}
            self._store_gang()

    def adopt_generation(self, number: int) -> None:
        """Records that the agents are in another generation than `gang.json` says: the previous driver ended before it was
        stored."""
        assert self.progress.gang is not None
        # No number may be used twice: the events of generations are distinguished by it.
        self.progress.generations = max(self.progress.generations, number + 1)
        self.progress.gang, self.progress.seen = {**self.progress.gang, "generation": number}, {}
        self._store_gang()

    def saved(self, step: int, path: str) -> None:
        self.progress.checkpoint_step, self.progress.saved_path, self.progress.save_problem = step, path, None
        self._committed(step)
        # At once, not at the next tick: the next driver has to know that this step was committed.
        self.store()

    def _committed(self, step: int | None) -> None:
        known = (known for known in (self.progress.committed_step, step) if known is not None)
        self.progress.committed_step = max(known, default=None)

    def failed(self, past: PastFailure, incident: Incident) -> None:
        self._write_incident(self.progress.add_incident(incident, past))

    def record(self, incident: Incident) -> None:
        self._write_incident(self.progress.add_incident(incident))

    def update(self, incident: Incident) -> None:
        """Writes a changed incident again."""
        for entry in self.progress.entries:
            if entry.incident is incident:
                self._write_incident(entry)

    def resumed(self, step: int) -> bool:
        """Called when training has begun, from `step` on. If its settings are others than those of the published points, the
        points of later steps are left behind. Returns whether there are any."""
        is_other = self.progress.course_of_points != self._course
        self.progress.course_of_points = self._course
        return is_other and self.leave_course(step)

    def leave_course(self, step: int) -> bool:
        """Records that training has gone back to `step` and takes another course: what comes of later steps is new. Returns
        whether any was published."""
        if not self.progress.leave_course(step):
            return False
        self._num_published += 1
        self.write_beside(f"metrics {self._num_published}", lambda: self.tracker.go_back(step))
        self.store()
        return True

    def preview(self, about: dict[str, Any], on_problem: Callable[[str], None]) -> None:
        """Stores texts that the model generated: a file per step, in the run's folder and in MLflow."""
        name = documents.join("previews", f"{about['step']}.json")

        def write() -> None:
            try:
                self._folder.write(PREVIEWS_KIND, about, name)
            except (documents.StorageError, OSError) as error:  # previews are not worth a failure
                on_problem(f"the previews of step {about['step']} are not kept: {error}")
                return
            self.tracker.log_artifact(documents.join(self.run_dir, name), "previews")

        self.write_beside(f"the previews of step {about['step']}", write)

    def publish(self, step: int, metrics: dict[str, float]) -> None:
        # Read here: the write may come much later, if the storage hangs.
        at_s = self.clock()
        self._num_published += 1
        if (kind := kind_of(metrics)) is not None:
            self.progress.newest[kind] = dict(metrics)
        # A key for each: a waiting job with the same key would be replaced, and its metrics lost.
        self.write_beside(f"metrics {self._num_published}", lambda: self.tracker.log_metrics(step, metrics, at_s))

    def mark(self, ev: str, at_s: float | None = None, **about: Any) -> None:
        """Adds a line to the run's time line (`timeline.jsonl`), for those who look at it later: `gangway report`."""
        self._num_marks += 1
        line = {"t": round(self.clock() if at_s is None else at_s, 3), "launch": self.launch_id, "ev": ev, **about}
        text = json_text.dumps(line) + "\n"
        # A key for each: a waiting job with the same key would be replaced, and its line lost.
        self.write_beside(f"mark {self._num_marks}", lambda: self._folder.append(TIMELINE, text))

    def write_beside(self, name: str, job: Callable[[], None]) -> None:
        """The one door for what this driver writes to the run, from a thread beside it."""

        def unless_superseded() -> None:
            # Checked at each write: a driver that was asleep must not overwrite the files of its successor.
            if not self.lease_lost.is_set() and not self.lease.superseded():
                job()

        self._writer.put(name, unless_superseded)

    def tick(self) -> None:
        """Called often: stores the state every second, so that the next driver finds the clocks up to date; in a bucket, where
        each request is paid for, less often."""
        if self._monotonic() - self._stored_at_s >= self._store_every_s:
            self.store()

    def store(self) -> None:
        """Has `launch.json` written. Called at every change that must not be lost.

        Storage that is full, gone or stuck does not stop the training: `storage_problem` is set until a later write succeeds.
        """
        self._stored_at_s = self._monotonic()
        # Made here, not by the writer: it is the state of this moment, which only this thread may read.
        document = self._document()
        self.write_beside(STATE, lambda: self._folder.write(STATE_KIND, document))
        self.write_beside("the requests", self._look_for_requests)
        if (path := self.progress.saved_path) is not None and self._gone != path and self._may_look():
            self._writer.put("the look at the newest checkpoint", lambda: self._look_for(path))

    def _may_look(self) -> bool:
        """Whether it is time to look for the newest checkpoint. In a bucket, a look is paid for."""
        now_s = self._monotonic()
        if self._in_bucket and now_s - self._looked_at_s < LOOK_IN_BUCKET_EVERY_S:
            return False
        self._looked_at_s = now_s
        return True

    def new_requests(self) -> Iterator[Request]:
        """Yields what was asked of this launch in its storage since the last call (`gangway stop`)."""
        with suppress(queue.Empty):
            while True:
                yield self._requests.get_nowait()

    def _look_for_requests(self) -> None:
        # On the writer's thread: the storage may hang.
        for request in self._folder.take_requests(self.launch_id):
            self._requests.put(request)

    def checkpoint_is_gone(self) -> bool:
        """Returns True once for a newest checkpoint that is no longer where it was saved: somebody has deleted it."""
        is_new, self._noted_gone = self._gone != self._noted_gone, self._gone
        # A newer one may have been saved meanwhile.
        return is_new and self._gone == self.progress.saved_path

    def saved_there(self) -> tuple[int | None, str | None]:
        """Returns the step of the newest checkpoint that is there, None if none is, and why no newer one is."""
        step, path = self.progress.checkpoint_step, self.progress.saved_path
        if path is None or self._gone != path:
            return step, self.progress.save_problem
        folder = place_of(path).parent
        with suppress(OSError, documents.StorageError, TimeoutError):
            step = in_time(lambda: layout.newest_there(folder, layout.row_of(folder).newest()), lambda: LOOK_S)
        return step, f"the checkpoint of step {self.progress.checkpoint_step} is gone from {path}"

    def _look_for(self, path: str) -> None:
        # On the writer's thread: the storage may hang.
        if not documents.exists(path):
            self._gone = path

    def name_in_cluster(self, name: str) -> str:
        """Returns the name of this run in a Ray cluster, which no other run has."""
        return identity.name_in_cluster(name, self.run_dir, self.tracker.identity)

    def flush(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` until all is stored; returns whether it is."""
        return self._writer.flush(timeout_s)

    @property
    def storage_problem(self) -> str | None:
        """Why the state is not stored now; None if it is."""
        return self._writer.problem()

    def close(self, status: str, timeout_s: float = TRACKING_CLOSE_TIMEOUT_S) -> str | None:
        """Stores and tracks what is left, and releases the run. Returns what could not be delivered, as a sentence."""
        # The machines are given back: nobody may try to adopt this gang.
        self.progress.gang = None
        self._store_gang()
        written = self.flush(timeout_s)
        problem = None if written else f"not all was written to {self.run_dir}: {self.storage_problem or 'there was no time to'}"
        self.stop()
        undelivered = self.tracker.close(timeout_s, status=status)
        self._folder.delete_left()
        self.lease.release()  # last: from now on another launch may write
        return "; ".join(filter(None, [problem, undelivered])) or None

    def stop(self) -> None:
        """Stops writing: another driver has the run, or all is written."""
        self._writer.stop()

    def adopted(self, now_s: float, step: int) -> Incident:
        """Records that the previous driver was lost and its gang trained on: no training time was lost."""
        incident = self._driver_lost(now_s, Action.ADOPT, "the training went on meanwhile")
        incident.resumed_step = incident.step = step
        self.record(incident)
        return incident

    def gang_lost(self, now_s: float, why: str) -> Incident:
        """Records that the previous driver was lost and its gang cannot be adopted: the time since then was lost."""
        self.progress.goodput.switch("detection", self.progress.goodput.counted_to_s)
        self.progress.generations += 1  # the lost driver may have begun one that is not recorded
        incident = self._driver_lost(now_s, Action.RESTART, f"its gang could not be taken over: {why}")
        self.record(incident)
        return incident

    def _driver_lost(self, now_s: float, action: Action, detail: str) -> Incident:
        incident = Incident(
            kind="driver_lost",
            host=None,
            generation=self.progress.generations - 1,
            step=self.progress.high_water_step,
            # Stored by another machine perhaps, whose clock is ahead: a failure cannot lie in the future.
            failed_at_s=min(self.progress.stored_at_s, now_s),
            evidence={"summary": f"the driver process ended early; Ray Train started another; {detail}"},
            action=action,
            detail=detail,
        )
        incident.mark("detect", now_s)
        return incident

    # ------------------------------------------------------------------ files

    def _store_gang(self) -> None:
        document = {"launch_id": self.launch_id, "driver_term": self.lease.driver_term, "gang": self.progress.gang}
        self.write_beside(GANG, lambda: self._folder.write(GANG_KIND, document))
        self.store()

    def _write_incident(self, entry: incident_log.Entry) -> None:
        text = incident_log.line(self.launch_id, entry)
        self.write_beside(f"incident {entry.number}", lambda: self._folder.append(incident_log.NAME, text))
        self.store()

    def _document(self) -> dict[str, Any]:
        about = {"launch_id": self.launch_id, "driver_term": self.lease.driver_term, "stored": self._moment()}
        return {**about, **self.progress.to_document(self.clock(), self.run_dir)}

    def _moment(self) -> Moment:
        return {"machine": this_machine(), "wall_s": self.clock(), "passed_s": self._monotonic()}

    def _restore(self) -> None:
        """Restores what earlier drivers stored: the progress of the run, and everything of this launch."""
        state, gang = self._read(STATE_KIND), self._read(GANG_KIND)
        if state is None:
            return
        entries, problem = incident_log.with_launches(self._folder.last_lines(incident_log.NAME))
        missing = self.progress.restore(state, gang, entries, self.launch_id, self._moment())
        self.problems += filter(None, [problem or missing])
        path = state["saved_path"] and identity.outside(state["saved_path"], self.run_dir)
        # A trainer of one's own may have saved beside a run that was moved alone.
        if path and path != state.get("saved_at") and not documents.exists(path):
            path = state.get("saved_at") or path
        self.progress.saved_path = path

    def _read(self, kind: documents.DocumentKind) -> dict[str, Any] | None:
        """Reads a document. A damaged one is set aside and lost: a driver that refused to start would lose the whole run."""
        document, notes = self._folder.salvaged(kind)
        self.problems += notes
        return document
