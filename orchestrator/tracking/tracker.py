"""Experiment tracking that is never in the way: the driver appends lines to a file, another process brings them to MLflow.

`RUN_DIR/tracking/metrics.jsonl` is the record: everything said of the run, in order, one JSON object a line, over all its
restarts. The shipper (`orchestrator/tracking/shipper.py`) reads it and remembers in `shipped.json` how far it came. So a tracking
server that is slow, down or gone costs the run nothing, and what it missed is sent when it is back, or at the next start.
The driver never imports MLflow, which alone takes seconds of CPU.

    python -m orchestrator.tracking RUN_DIR        ships what an earlier run could not

Where `tracking.uri` holds a user and a password, that command is to be given it whole in MLFLOW_TRACKING_URI: it is not stored.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orchestrator
from cluster.agent.child_process import child_env
from trainers.config.masking import MASK, masked
from trainers.config.section import Section, require
from trainers.storage import documents

FOLDER = "tracking"
SPOOL = "metrics.jsonl"
RUN = "mlflow.json"
"""Which MLflow run this is. The driver writes it first; the shipper adds `run_id`."""
STATE = "shipped.json"
"""The shipper's: how far it came, and what is wrong."""
URI_VARIABLE = "MLFLOW_TRACKING_URI"
"""MLflow's own. In the shipper's environment, where it may hold a user and a password; in files they are masked."""
DRAIN = b"drain\n"
"""On the shipper's standard input: ship the rest and leave."""
LEFT_OVER = 3
"""Exit status of a shipper that had to leave with lines unshipped."""
RESTART_DELAYS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
ENDINGS = ("FINISHED", "FAILED", "KILLED")


@dataclass(frozen=True, kw_only=True)
class TrackingConfig(Section):
    mlflow: bool = True
    """false: metrics are written to `tracking/metrics.jsonl` only."""
    uri: str | None = field(default=None, repr=False)
    """An MLflow tracking server, or `sqlite:///PATH`. Default: `mlflow.db` in the storage folder, shared by its runs. User
    information in it (`http://user:password@host`) is used, and never shown or stored."""
    experiment: str = "gangway"

    def __post_init__(self):
        require(bool(self.experiment.strip()), f"experiment = {self.experiment!r}: expected a name")
        require(
            self.uri is None or "://" in self.uri,
            f"uri = {self._shown()!r}: expected a URL such as http://host:5000 or sqlite:////path/mlflow.db",
        )

    def _shown(self) -> str:
        """Without what may be user information, though it is no URL."""
        *user, rest = (self.uri or "").rpartition("@")
        return f"{MASK}@{rest}" if any(user) else rest

    def resolved_uri(self, run_dir: str) -> str:
        if self.uri is None:
            return f"sqlite:///{os.path.dirname(os.path.abspath(run_dir))}/mlflow.db"
        if self.uri.startswith("sqlite:///"):
            return f"sqlite:///{os.path.abspath(self.uri.removeprefix('sqlite:///'))}"
        return self.uri


class Tracker:
    """The driver's end. Every method returns at once; none of them raises because of MLflow, or of a full disk."""

    def __init__(
        self,
        run_dir: str,
        config: TrackingConfig,
        run_name: str,
        params: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
    ):
        if documents.is_url(run_dir):
            raise documents.StorageError(
                f"storage: {run_dir} is no folder: the file of metrics is appended to, which object storage cannot do; "
                "set storage=PATH to a local or mounted folder"
            )
        self._folder = documents.join(os.path.abspath(run_dir), FOLDER)
        self._clock = clock
        self._not_numbers: set[str] = set()
        self._spool = Spool(documents.join(self._folder, SPOOL))
        self._shipper: ShipperProcess | None = None
        self._closed = False
        self._append(status="RUNNING")
        if params:
            self.set_params(params)
        if config.mlflow:
            _name_run(self._folder, run_dir, config, run_name)
            self._shipper = ShipperProcess(os.path.abspath(run_dir), config.resolved_uri(run_dir))

    def log_metrics(self, step: int, metrics: Mapping[str, float], at_s: float | None = None) -> None:
        """A step that was logged before (it is replayed after a restart) is kept in the file, and shipped once."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        self._not_numbers |= set(metrics) - set(numbers)
        if numbers:
            self._append(at_s, step=step, metrics=numbers)

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Nested mappings become dotted names. MLflow keeps the first value of a parameter; a later one becomes a tag."""
        self._append(params=flatten(params))

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        self._append(tags={name: str(value) for name, value in tags.items()})

    def log_artifact(self, path: str | os.PathLike[str], folder: str = "") -> None:
        """The file or folder must still be there when it is shipped."""
        self._append(artifact=os.path.abspath(path), folder=folder)

    def register_model(self, name: str, path: str) -> None:
        """A new version of the model `name`, whose files are at `path` (a folder or URL)."""
        self._append(model=name, source=path if documents.is_url(path) else Path(path).absolute().as_uri())

    def problem(self) -> str | None:
        """What a person should know about tracking now, or None."""
        state = read_document(self._folder, STATE)
        problems = [state.get("problem"), self._spool.problem, self._shipper.problem if self._shipper else None]
        if state.get("rejected"):
            problems.append(f"{state['rejected']} entries that MLflow refuses are set aside in {self._folder}/rejected.jsonl")
        if self._not_numbers:
            problems.append(f"metrics left out, since they are not numbers: {', '.join(sorted(self._not_numbers))}")
        return "; ".join(filter(None, problems)) or None

    def where(self) -> dict[str, str | None]:
        """How to look at it: `uri`, `run_id` (None until the shipper has made the run) and `command`."""
        run = read_document(self._folder, RUN)
        if self._shipper is None or not run:
            return {"uri": None, "run_id": None, "command": None}
        is_server = run["uri"].startswith("http")
        command = None if is_server else f"mlflow ui --backend-store-uri {shlex.quote(run['uri'])}"
        return {"uri": run["uri"], "run_id": run.get("run_id"), "command": command}

    def close(self, timeout_s: float = 10.0, status: str = "FINISHED") -> str | None:
        """Ships the rest, for at most `timeout_s`. Returns a sentence about what was left, or None when all was shipped.

        `status` is one of FINISHED, FAILED, KILLED.
        """
        require(status in ENDINGS, f"status {status!r}: expected one of {', '.join(ENDINGS)}")
        if not self._closed:
            self._append(status=status)
            self._spool.close()
        self._closed = True
        if self._shipper is None:
            return self._spool.problem
        self._shipper.close(timeout_s)
        return left_over(self._folder) or self._spool.problem

    def _append(self, at_s: float | None = None, **record: Any) -> None:
        self._spool.append({"t": self._clock() if at_s is None else at_s, **record})


class Spool:
    """An append-only file of JSON lines. What a full disk refuses is kept in memory and tried again with the next line."""

    def __init__(self, path: str):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 (until `close()`)
        self._lock = threading.Lock()
        # A line that a dying driver left unfinished must not swallow ours.
        self._pending = bytearray(b"" if _ends_with_newline(self._file.fileno()) else b"\n")
        self.problem: str | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            self._pending += json.dumps(record).encode() + b"\n"
            self._write()

    def close(self) -> None:
        with self._lock:
            self._write()
            self._file.close()

    def _write(self) -> None:
        try:
            while self._pending:
                del self._pending[: self._file.write(self._pending)]
            self.problem = None
        except OSError as error:
            self.problem = f"metrics cannot be written: {error.strerror}; {len(self._pending)} bytes wait in memory"


class ShipperProcess:
    """Keeps one shipper running, whatever happens to it."""

    def __init__(self, run_dir: str, uri: str):
        self._run_dir, self._uri = run_dir, uri
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._out_of_time = threading.Event()
        self._lock = threading.Lock()
        self.problem: str | None = None
        # The kernel ends a shipper when the *thread* that started it ends: this one lives as long as the driver does.
        self._thread = threading.Thread(target=self._keep_running, name="shipper", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Lets it ship the rest for at most `timeout_s`, and leaves no process behind."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._closing.set()
            _tell(self._process, DRAIN)
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        with self._lock:
            self._out_of_time.set()
            if self._process is not None:
                self._process.kill()  # Safe at any moment: what it sent twice is one entry in MLflow.
        self._thread.join()

    def _keep_running(self) -> None:
        for delay_s in _delays_s():
            status = self._run_one()
            if self._closing.is_set() and (status in (0, LEFT_OVER) or self._out_of_time.is_set()):
                return
            (self._out_of_time if self._closing.is_set() else self._closing).wait(delay_s)

    def _run_one(self) -> int | None:
        """Starts a shipper and waits for its end; its exit status, or None if it could not be started."""
        with self._lock:
            if self._out_of_time.is_set():
                return None
            try:
                self._process = _start_shipper(self._run_dir, self._uri)
                self.problem = None
            except OSError as error:
                self.problem = f"cannot start the process that ships metrics to MLflow: {error.strerror}"
                return None
            if self._closing.is_set():
                _tell(self._process, DRAIN)
        return self._process.wait()


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} as {"a.b": "1"}."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {prefix + name: str(value)}
    return flat


def left_over(folder: str) -> str | None:
    """A sentence about the lines that have not reached MLflow, or None."""
    state = read_document(folder, STATE)
    with open(documents.join(folder, SPOOL), "rb") as file:
        file.seek(state.get("offset", 0))
        num_lines = sum(1 for _ in file)
    if not num_lines:
        return None
    why = state.get("problem") or "there was no time to"
    return (
        f"{num_lines} tracking entries are not in MLflow yet ({why}); they are kept in {folder}/{SPOOL} and shipped at the next "
        f"start, or by: python -m orchestrator.tracking {shlex.quote(os.path.dirname(folder))}"
    )


def read_document(folder: str, name: str) -> dict[str, Any]:
    """What is noted there; nothing if it was never written, or is damaged: all can be made again from the spool."""
    try:
        return documents.read_json(documents.join(folder, name)) or {}
    except documents.StorageError:
        return {}


def _name_run(folder: str, run_dir: str, config: TrackingConfig, run_name: str) -> None:
    """Says which MLflow run the lines belong to. It stays the same over restarts, unless the store or experiment changes."""
    wanted = {"uri": masked(config.resolved_uri(run_dir)), "experiment": config.experiment, "run_name": run_name}
    found = read_document(folder, RUN)
    if {name: found.get(name) for name in wanted} == wanted:
        return
    if documents.exists(documents.join(folder, STATE)):
        documents.delete(documents.join(folder, STATE))  # Another run of MLflow's: it gets everything.
    documents.write_json(documents.join(folder, RUN), wanted | {"key": uuid.uuid4().hex})


def _start_shipper(run_dir: str, uri: str) -> subprocess.Popen[bytes]:
    root = str(Path(orchestrator.__file__).resolve().parents[1])
    defaults = {
        # A server that does not answer is tried again by the shipper, which does so for ever but can be interrupted.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    with open(documents.join(run_dir, FOLDER, "shipper.log"), "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator.tracking", run_dir, "--follow", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=child_env(defaults | os.environ, {"PYTHONPATH": os.pathsep.join(paths), URI_VARIABLE: uri}),
            start_new_session=True,  # A Ctrl-C at the terminal is for the driver, which then lets the shipper finish.
        )


def _delays_s() -> Iterator[float]:
    yield from RESTART_DELAYS_S
    while True:
        yield RESTART_DELAYS_S[-1]


def _tell(process: subprocess.Popen[bytes] | None, line: bytes) -> None:
    if process is None or process.stdin is None:
        return
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return  # It has died: the next one is told.


def _ends_with_newline(file: int) -> bool:
    size = os.fstat(file).st_size
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"
