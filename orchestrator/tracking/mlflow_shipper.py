"""The shipper process: sends a run's tracking file to MLflow, each (metric, step) once.

It may be killed at any moment. It then goes on from the offset in `shipped.json`; an entry that is sent twice has the same time
stamp, and MLflow's stores keep it once. A replayed step (after a restart from a checkpoint) is not sent again, unless training
takes another course from there: then the steps that come again are sent, and the newest point of a step is the one that
counts (MLflow removes none). Entries that
MLflow refuses for good go to `rejected.jsonl` with the reason; all others are retried until MLflow takes them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from gangway.config.masking import MASK, masked
from gangway.program import Parser, command
from gangway.storage import documents, durable, identity, json_text, opening
from gangway.surroundings import end_with_parent
from orchestrator.tracking import mlflow_store, registration
from orchestrator.tracking.config import OWN_STORE
from orchestrator.tracking.shipper_process import LEFT_OVER, URI_VARIABLE
from orchestrator.tracking.spool import FOLDER, RUN, RUN_KIND, SPOOL, STATE, STATE_KIND, State, entry, read_document
from orchestrator.tracking.tags import REPORT
from orchestrator.tracking.tracker import left_over
from trainers.config.arguments import PLACE

POLL_S = 1.0
MAX_BACKOFF_S = 30.0
MAX_VALUES = 900
"""The most values of one request; MLflow takes 1000."""
MAX_LINES = 500
MAX_PARAM_LENGTH = 6000
CHANGED = "changed."
"""How the names of the tags begin that have settings which later launches have changed."""
PLACE_TAG = "gangway.run_dir"
KIND_TAG = "mlflow.experimentKind"
OF_TRAININGS = {KIND_TAG: "custom_model_development"}
"""Without this tag of the experiment, MLflow's pages show its runs among evaluations of language models."""
NOTE_TAG = "mlflow.note.content"
ABOUT = "Trained by gangway: settings are parameters; what the machines did, and the goodput, are system metrics."
"""What the description of a run begins with."""
LEFT_TAG = "gangway.course_left"
"""The tag of a run whose training has gone back to take another course: which steps have points of both."""
ATTEMPTS_AT_END = 3
ATTEMPTS_BEFORE_REFUSED = 5
"""After so many internal errors for the same entries, from a server that answers other requests, the entries are the cause."""
REFUSALS = frozenset(
    {
        "INVALID_PARAMETER_VALUE",
        "BAD_REQUEST",
        "MALFORMED_REQUEST",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_LIMIT_EXCEEDED",
        "INVALID_STATE",
    }
)
"""Error codes of MLflow for a wrong entry. All other codes are problems of the server."""
NOT_OF_TRAINING = ("host_", "process_memory", "device_memory", "goodput/", "launch/", "incidents/")
"""How the names of metrics of machines begin, and of those of the end of a launch."""


class Line(NamedTuple):
    record: dict[str, Any] | None
    """The entry; None if the line is none."""
    end: int
    """The byte offset of its end."""
    problem: str = ""
    """Why it is none: a driver died while it wrote it, or its bits have changed."""


class Value(NamedTuple):
    name: str
    value: float
    time_ms: int
    step: int


def sendable(text: str) -> str:
    """Returns the text as every store of MLflow takes it. One half of a character, which a shell or a file of another encoding
    gives, would stop all that comes after it; a NUL would end the text."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def _sendable(values: Mapping[str, str]) -> dict[str, str]:
    return {sendable(name): sendable(value)[:MAX_PARAM_LENGTH] for name, value in values.items()}


def read_lines(path: str, offset: int, max_lines: int = MAX_LINES) -> list[Line]:
    """Returns complete lines from `offset`. A line that is still being written is left for later."""
    lines: list[Line] = []
    with durable.reading(path) as file:
        file.seek(offset)
        while len(lines) < max_lines and (text := file.readline()).endswith(b"\n"):
            offset += len(text)
            try:
                lines.append(Line(entry(text), offset))
            except documents.DamagedDocument as error:
                lines.append(Line(None, offset, str(error)))
    return lines


def next_batch(lines: Sequence[Line]) -> Sequence[Line]:
    """Returns the longest prefix that fits one request: lines of metrics, or a single line of another kind."""
    num_values = 0
    for index, line in enumerate(lines):
        metrics = (line.record or {}).get("metrics")
        num_values += len(metrics or ())
        if metrics is None or num_values > MAX_VALUES:
            return lines[: max(1, index)]
    return lines


def shown(name: str) -> str:
    """Returns the name of a metric in MLflow. What machines need, and the ledger of a launch, are on the page of system metrics:
    the page of the others sorts its sections by their names, and would begin with the goodput."""
    return f"system/{name}" if name.startswith(NOT_OF_TRAINING) else name


def fresh_values(batch: Sequence[Line], last_step: dict[str, int]) -> list[Value]:
    """Returns the values of steps after `last_step`, with rising steps for each metric: replayed steps are left out."""
    newest = dict(last_step)
    fresh = []
    for line in batch:
        record = line.record or {}
        for name, value in record["metrics"].items():
            if record["step"] > newest.get(name, -1):
                newest[name] = record["step"]
                fresh.append(Value(name, value, int(record["t"] * 1000), record["step"]))
    return fresh


def real_uri(stored: str) -> str:
    """Returns the store's address with its user information, which is only in the environment. Raises LookupError without it."""
    given = os.environ.get(URI_VARIABLE, "")
    if masked(given) == stored:
        return given
    if MASK in stored:
        raise LookupError(f"the user and password of {stored} are not stored; set {URI_VARIABLE} to the whole of it")
    return stored


class MlflowRun:
    """The run in MLflow. It is found by its key, or created."""

    def __init__(self, folder: str):
        self._path = documents.join(folder, RUN)
        named = RUN_KIND.read(self._path)
        if named is None:
            raise LookupError(f"{self._path} is gone: the next start of the run writes it again")
        self._run_dir = os.path.dirname(folder)
        self._key = named["key"]
        # The store of the storage has no path in its address: a path may have letters that mean something else in a URL.
        uri = OWN_STORE if named["uri"] is None else real_uri(named["uri"])
        if named["uri"] is None:
            os.chdir(os.path.dirname(self._run_dir))
        artifacts = mlflow_store.prepare(uri, is_own=named["uri"] is None) if uri.startswith("sqlite:///") else None

        from mlflow import MlflowClient

        self.client = MlflowClient(uri, uri)
        self._experiment_id = self._find_experiment(named["experiment"], artifacts)
        self.found, self.run_id = self._find_run(named)
        # For the driver, which tells people how to look at the run (`Tracker.where`).
        RUN_KIND.write(self._path, named | {"run_id": self.run_id})
        self._params = dict(self.client.get_run(self.run_id).data.params)

    def answers(self) -> bool:
        """Returns False when the store is broken, or the run was deleted: then the entries are not the cause of an error."""
        from mlflow.exceptions import MlflowException

        try:
            return self.client.get_run(self.run_id).info.lifecycle_stage == "active"
        except MlflowException:
            return False

    def send_values(self, values: Sequence[Value]) -> None:
        from mlflow.entities import Metric

        self.client.log_batch(self.run_id, metrics=[Metric(sendable(shown(v.name)), v.value, v.time_ms, v.step) for v in values])

    def send_record(self, record: dict[str, Any]) -> None:
        """Sends a line that holds no metrics."""
        if "params" in record:
            self._send_params(record["params"])
        elif "tags" in record:
            self._send_tags(record["tags"])
        elif "artifact" in record:
            self._send_artifact(identity.outside(record["artifact"], self._run_dir), record["folder"] or None)
            if record["folder"] == REPORT:
                self.describe(f"{REPORT}/{os.path.basename(record['artifact'])}")
        elif record.get("status") == "RUNNING":
            self.client.update_run(self.run_id, status="RUNNING")
        elif "status" in record:
            self.client.set_terminated(self.run_id, record["status"], int(record["t"] * 1000))

    def _find_experiment(self, name: str, artifacts: str | None) -> str:
        if (experiment := self.client.get_experiment_by_name(name)) is not None:
            if experiment.lifecycle_stage != "active":
                raise LookupError(
                    f"the experiment {name!r} was deleted: restore it (mlflow experiments restore --experiment-id "
                    f"{experiment.experiment_id}), and the metrics are shipped; or set tracking.experiment to another name"
                )
            if KIND_TAG not in experiment.tags:
                self.client.set_experiment_tag(experiment.experiment_id, KIND_TAG, OF_TRAININGS[KIND_TAG])
            return experiment.experiment_id
        # If another run creates it first, this fails, and the next try finds it.
        return self.client.create_experiment(name, artifact_location=artifacts, tags=OF_TRAININGS)

    def _find_run(self, named: dict[str, Any]) -> tuple[bool, str]:
        """Returns whether the run existed, and its id. If it or its store was deleted, it is created again from the file."""
        tags = {KEY_TAG: named["key"], PLACE_TAG: self._run_dir, NOTE_TAG: ABOUT}
        if found := self._run_with(named["key"]):
            self.client.set_tag(found, PLACE_TAG, self._run_dir)  # it may have been moved
            return True, found
        return False, self.client.create_run(self._experiment_id, run_name=named["run_name"], tags=tags).info.run_id

    def _run_with(self, key: str) -> str | None:
        runs = self.client.search_runs([self._experiment_id], filter_string=f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
        return runs[0].info.run_id if runs else None

    def _send_params(self, params: dict[str, str]) -> None:
        params = _sendable(params)
        # MLflow refuses a second value of a parameter: it becomes a tag.
        changed = {name: value for name, value in params.items() if self._params.get(name, value) != value}
        fresh = {name: value for name, value in params.items() if name not in self._params}
        self._log_params(self.run_id, fresh)
        self._params |= fresh
        self._send_tags({f"{CHANGED}{name}": value for name, value in changed.items()})

    def _log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        # 100: as many as MLflow takes in one request.
        for some in _chunks(list(params.items()), 100):
            self.client.log_batch(run_id, params=[Param(name, value) for name, value in some])

    def _send_tags(self, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        for some in _chunks(list(_sendable(tags).items()), 100):
            self.client.log_batch(self.run_id, tags=[RunTag(name, value) for name, value in some])

    def _send_artifact(self, path: str, folder: str | None) -> None:
        if documents.is_url(path):
            with tempfile.TemporaryDirectory(prefix="gangway-artifact-") as fetched:
                place = opening.place_of(path)
                place.store.download(place.key, Path(fetched, place.name))
                self.client.log_artifact(self.run_id, os.path.join(fetched, place.name), folder)
            return
        if not os.path.exists(path):
            raise FileNotFoundError(f"artifact {path} is gone: it has to stay until it is shipped")
        send = self.client.log_artifacts if os.path.isdir(path) else self.client.log_artifact
        send(self.run_id, path, folder)

    def describe(self, page: str) -> None:
        """Links a page among the artifacts in the description of the run, unless it has a link, or the words of a person."""
        link = f"[Report](#/experiments/{self._experiment_id}/runs/{self.run_id}/artifactPath/{page})"
        if page.endswith(".html") and self.client.get_run(self.run_id).data.tags.get(NOTE_TAG, ABOUT) == ABOUT:
            self.client.set_tag(self.run_id, NOTE_TAG, f"{ABOUT}\n\n{link}")

    def nested(self, launch: str, name: str, params: Mapping[str, str], began_s: float) -> str:
        """Returns the id of the nested run of a launch, which is made if there is none."""
        key = f"{self._key}/{launch}"
        if found := self._run_with(key):
            return found
        name = sendable(name)
        tags = {KEY_TAG: key, PARENT_TAG: self.run_id, NAME_TAG: name}
        made = self.client.create_run(self._experiment_id, start_time=int(began_s * 1000), run_name=name, tags=tags).info.run_id
        self._log_params(made, _sendable(params))
        return made

    def end_nested(self, run_id: str, status: str, at_s: float) -> None:
        self.client.set_terminated(run_id, status, int(at_s * 1000))

    def register(self, record: Mapping[str, Any]) -> str:
        """Registers the model of a line of the spool; returns its version."""
        checkpoint = identity.outside(record["source"], self._run_dir)
        folder = os.path.dirname(self._path)
        return registration.register(self.client, self.run_id, record["model"], record["step"], checkpoint, folder)


class Shipper:
    def __init__(self, folder: str, drain: threading.Event):
        self._folder, self._drain = folder, drain
        self._spool = documents.join(folder, SPOOL)
        stored = read_document(folder, STATE)
        self._state = State(**{item.name: stored[item.name] for item in fields(State) if item.name in stored})
        self._state.offset = max(0, self._state.offset)
        self._run: MlflowRun | None = None
        self._attempts = 0
        """How many attempts in a row have failed."""

    def ship(self) -> int:
        """Ships until asked to drain, and then until all is shipped. Returns the exit status."""
        while True:
            # Read before the shipping: if nothing is left after that, all lines of the run are shipped.
            draining = self._drain.is_set()
            try:
                if not self._ship_some():
                    if draining:
                        return 0
                    self._drain.wait(POLL_S)
            except Exception as error:  # The shipper must not end: the error is shown, and the batch tried again.
                self._note_problem(error)
                if draining and self._attempts >= ATTEMPTS_AT_END:
                    return LEFT_OVER
                self._drain.wait(POLL_S if draining else min(MAX_BACKOFF_S, POLL_S * 2.0**self._attempts))

    def _ship_some(self) -> bool:
        """Ships a batch, if there is one."""
        lines = read_lines(self._spool, self._state.offset) if os.path.exists(self._spool) else []
        if self._run is None:
            self._run = self._open_run()
            return True  # The lines are read again: a new run begins at offset 0.
        if not lines:
            return False
        batch = next_batch(lines)
        self._send(batch, self._run)
        # After the sending: a shipper that dies in between sends the lines again, and MLflow keeps them once.
        self._state.offset = batch[-1].end
        self._state.problem = None
        self._attempts = 0
        self._save()
        return True

    def _open_run(self) -> MlflowRun:
        run = MlflowRun(self._folder)
        # The state may be that of another store, to which not all was sent.
        if not run.found or self._state.run_id not in (None, run.run_id):
            self._state = State()
        self._state.run_id = run.run_id
        return run

    def _send(self, batch: Sequence[Line], run: MlflowRun) -> None:
        record = batch[0].record
        if record is None:
            self._set_aside("line", batch[0].problem)
        elif "metrics" in record:
            fresh = fresh_values(batch, self._state.last_step)
            for values in _chunks(fresh, MAX_VALUES):
                self._send_values(values, run)
            self._state.last_step |= {value.name: value.step for value in fresh}
            self._state.last_s = batch[-1].record["t"] if batch[-1].record else None
        elif "go_back" in record:
            step = int(record["go_back"])
            if (last := max(self._state.last_step.values(), default=-1)) > step:
                run.send_record({"tags": {LEFT_TAG: f"steps {step + 1} to {last}: the newest point of each counts"}})
            self._state.last_step = {name: min(sent, step) for name, sent in self._state.last_step.items()}
        else:
            try:
                self._send_record(record, run)
            except Exception as error:
                if not self._is_refusal(error, run):
                    raise
                self._set_aside(record, str(error))

    def _send_record(self, record: dict[str, Any], run: MlflowRun) -> None:
        if "model" in record:
            self._state.model = run.register(record)
            return
        if "launch" in record:
            begin_launch(run, self._state, record)  # first: the run still has the settings of before
        run.send_record(record)
        if record.get("status", "RUNNING") != "RUNNING":
            end_launch(run, self._state, record["status"], record["t"])

    def _send_values(self, values: Sequence[Value], run: MlflowRun) -> None:
        """Sends values. If they are refused, it tries the halves, until the wrong value is alone and can be set aside."""
        try:
            run.send_values(values)
        except Exception as error:
            if not self._is_refusal(error, run):
                raise
            if len(values) == 1:
                self._set_aside(values[0]._asdict(), str(error))
                return
            middle = len(values) // 2
            self._send_values(values[:middle], run)
            self._send_values(values[middle:], run)

    def _is_refusal(self, error: Exception, run: MlflowRun) -> bool:
        """True when trying again is of no use. A broken store refuses everything: then the run itself cannot be read."""
        if isinstance(error, FileNotFoundError):
            return True
        code = getattr(error, "error_code", "INTERNAL_ERROR")
        worn_out = code == "INTERNAL_ERROR" and self._attempts >= ATTEMPTS_BEFORE_REFUSED
        return (code in REFUSALS or worn_out) and run.answers()

    def _set_aside(self, what: Any, why: str) -> None:
        with durable.appending(documents.join(self._folder, "rejected.jsonl")) as file:
            file.write(json_text.dumps({"rejected": what, "why": masked(why)}).encode() + b"\n")
        self._state.rejected += 1

    def _note_problem(self, error: Exception) -> None:
        self._attempts += 1
        self._run = None  # The next attempt connects again.
        text = masked(str(error).strip())
        message = (text or type(error).__name__).splitlines()[0][:300]
        is_export = isinstance(error, registration.RegistrationError)
        self._state.problem = message if is_export else f"MLflow does not take metrics now: {message}"
        print(f"attempt {self._attempts}: {type(error).__name__}: {text}", file=sys.stderr, flush=True)
        self._save()

    def _save(self) -> None:
        STATE_KIND.write(documents.join(self._folder, STATE), asdict(self._state))


def die_with(parent_pid: int) -> None:
    """Ends this process, by the kernel, when the process that started it ends in any way."""
    end_with_parent()
    if os.getppid() != parent_pid:  # It ended before we asked.
        sys.exit(LEFT_OVER)


@command()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("orchestrator.tracking", "Ships a run's tracking file to MLflow.", example="runs/spirals")
    parser.add_argument("run_dir", help="the run's folder: STORAGE/NAME")
    parser.add_argument("--follow", type=int, metavar="PID", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    folder = documents.join(identity.local_folder(options.run_dir), FOLDER)
    if not documents.exists(documents.join(folder, RUN)):
        parser.error(f"{folder}/{RUN} does not exist: expected the folder of a run that was tracked with MLflow")
    try:
        RUN_KIND.read(documents.join(folder, RUN))
    except documents.StorageError as error:
        parser.error(str(error))
    drain = threading.Event()
    if options.follow is None:
        drain.set()
    else:
        die_with(options.follow)
        os.nice(10)  # Training comes first.
        threading.Thread(target=_read_orders, args=(drain,), daemon=True).start()
    # One shipper for a run: two would send the same lines and overwrite each other's progress.
    with mlflow_store.locked(documents.join(folder, "shipper.lock")):
        status = Shipper(folder, drain).ship()
    if options.follow is None:
        print(left_over(folder) or "all shipped")
    return status


def _read_orders(drain: threading.Event) -> None:
    """The driver says when to drain; when its end of the pipe closes without a word, it is gone."""
    for _ in sys.stdin:
        drain.set()
    if not drain.is_set():
        # Not `sys.exit`, which would end this thread alone: the main thread may be waiting for a server.
        os._exit(LEFT_OVER)


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


KEY_TAG = "gangway.key"
PARENT_TAG, NAME_TAG = "mlflow.parentRunId", "mlflow.runName"
NOT_SET = "(not set)"
NAMED = 3
"""So many of the changed settings are in the name of a nested run."""


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings that differ, by their new values; where the run is stored is none of them."""
    names = [name for name in (*now, *(name for name in before if name not in now)) if name.partition(".")[0] not in PLACE]
    return {name: now.get(name, NOT_SET) for name in names if before.get(name) != now.get(name)}


def begin_launch(run: Any, state: State, record: Mapping[str, Any]) -> None:
    """Begins the launch of a line of the spool, once for all its drivers. `run` is the `MlflowRun`. What `state` then says is
    kept with the progress of the shipper: a line that comes twice finds the nested run that it has made."""
    if record["launch"] != state.launch:
        end_launch(run, state, "FAILED", state.last_s or record["t"])  # its end was never told
        changed = changes(state.settings, record["params"]) if state.settings else {}
        if changed:
            state.nested = run.nested(record["launch"], _name(changed), changed, record["t"])
        state.launch, state.settings = record["launch"], dict(record["params"])


def end_launch(run: Any, state: State, status: str, at_s: float) -> None:
    """Ends the nested run of the present launch, if it has one."""
    if state.nested is not None:
        run.end_nested(state.nested, status, at_s)
    state.nested = None


def _name(changed: Mapping[str, str]) -> str:
    shown = [f"{name} = {value[:40]}" for name, value in list(changed.items())[:NAMED]]
    return "resumed: " + ", ".join(shown) + (f", and {len(changed) - NAMED} more" if len(changed) > NAMED else "")
