"""Experiment tracking that never blocks the driver: it appends lines to a file, and another process sends them to MLflow.

`RUN_DIR/tracking/metrics.jsonl` has all entries of the run in order, over all its restarts, one JSON object per line. The
shipper (`orchestrator/tracking/mlflow_shipper.py`) reads it and remembers in `shipped.json` how far it came. So a tracking server
that is slow, down or gone costs the run nothing, and what it missed is sent when it is back, or at the next start. The driver
never imports MLflow, which alone takes seconds of CPU.

    python -m orchestrator.tracking RUN_DIR        ships what an earlier run could not

Where `tracking.uri` holds a user and a password, that command is to be given it whole in MLFLOW_TRACKING_URI: it is not stored.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gangway.storage import documents, durable, identity
from orchestrator.tracking.config import OWN_STORE, TrackingConfig, is_plain, own_store
from orchestrator.tracking.of_bucket import SEGMENTS, Segments, fetch
from orchestrator.tracking.shipper_process import ShipperProcess
from orchestrator.tracking.spool import FOLDER, RUN, RUN_KIND, SPOOL, STATE, Spool, read_document, set_damaged_aside


class Tracker:
    """The driver's side of tracking. Every method returns at once. None raises because of MLflow or a full disk."""

    def __init__(
        self,
        run_dir: str,
        config: TrackingConfig,
        run_name: str,
        params: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.time,
        launch: tuple[str, float] | None = None,
        driver_term: int = 0,
    ):
        """`launch`: the id and the beginning, in unix seconds, of the launch that these parameters belong to. `driver_term`: that
        of the driver, by which what it writes to a bucket is in order."""
        self._run_dir = identity.local_folder(run_dir)
        """On this machine: for a run in a bucket, the folder that stands for it."""
        self._folder = documents.join(self._run_dir, FOLDER)
        self.problems: list[str] = []
        """What was found damaged, as sentences."""
        # A folder has segments if it is a copy of a run in a bucket.
        if documents.is_url(run_dir) or Path(self._folder, SEGMENTS).is_dir():
            try:
                fetch(run_dir)
            except (OSError, documents.StorageError) as error:
                self.problems.append(f"the metrics of earlier launches are not here, and are not sent to MLflow: {error}")
        self.problems += set_damaged_aside(self._folder)
        self._clock = clock
        self._not_numbers: set[str] = set()
        self._spool = Spool(documents.join(self._folder, SPOOL))
        spool = documents.join(self._folder, SPOOL)
        self._segments = Segments(run_dir, spool, driver_term) if documents.is_url(run_dir) else None
        self._shipper: ShipperProcess | None = None
        self._closed = False
        self._model: dict[str, Any] | None = None
        self._wait_s: Callable[[], float] = lambda: 0.0
        named = identity.of(run_dir)
        self.problems += named.notes
        self.identity = named.id
        # An earlier launch may have marked the run as ended.
        self._append(status="RUNNING")
        if params and launch is not None:
            self._append(launch[1], launch=launch[0], params=flatten(params))
        elif params:
            self.set_params(params)
        if config.mlflow:
            # Before the shipper starts, which reads it.
            _name_run(self._folder, named.id, config, run_name)
            self._shipper = ShipperProcess(self._run_dir, config.resolved_uri(self._run_dir))

    def log_metrics(self, step: int, metrics: Mapping[str, float], at_s: float | None = None) -> None:
        """A step that was logged before (it is replayed after a restart) is kept in the file, and shipped once."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        self._not_numbers |= set(metrics) - set(numbers)
        if numbers:
            self._append(at_s, step=step, metrics=numbers)

    def go_back(self, step: int) -> None:
        """Tells that training takes another course from `step` on: what is logged of later steps takes the place of what was."""
        self._append(go_back=step)

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Nested mappings become dotted names. MLflow keeps the first value of a parameter; a later one becomes a tag."""
        self._append(params=flatten(params))

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        self._append(tags={name: str(value) for name, value in tags.items()})

    def log_artifact(self, path: str | os.PathLike[str], folder: str = "") -> None:
        """The file or folder must still be there when it is shipped."""
        self._append(artifact=self._named(path), folder=folder)

    def register_model(self, name: str, checkpoint: str, step: int, wait_s: Callable[[], float]) -> None:
        """Registers this checkpoint under `name`, after all else is shipped. `close` waits longer for it, as long as `wait_s`
        says, which it asks again and again."""
        self._model = {"model": name, "source": self._named(checkpoint), "step": step}
        self._wait_s = wait_s

    def problem(self) -> str | None:
        """Returns the present problems of tracking, for people; None if there are none."""
        state, odd = read_document(self._folder, STATE), ", ".join(sorted(self._not_numbers))
        rejected = state.get("rejected")
        problems = [
            state.get("problem"),
            self._spool.problem,
            self._shipper.problem if self._shipper else None,
            self._segments.problem if self._segments else None,
            f"{rejected} entries that MLflow refuses are set aside in {self._folder}/rejected.jsonl" if rejected else None,
            f"metrics left out, since they are not numbers: {odd}" if odd else None,
        ]
        return "; ".join(filter(None, problems)) or None

    def where(self) -> dict[str, str | None]:
        """Returns how to look at the run in MLflow: `uri`, `run_id` (None until the shipper has created it) and `command`."""
        run = read_document(self._folder, RUN)
        if self._shipper is None or not run:
            return {"uri": None, "run_id": None, "command": None}
        uri = run["uri"] or own_store(self._run_dir)
        where = "" if run["uri"] or is_plain(self._run_dir) else f"cd {shlex.quote(os.path.dirname(self._run_dir))} && "
        command = f"{where}mlflow ui --backend-store-uri {shlex.quote(OWN_STORE if where else uri)}"
        return {"uri": uri, "run_id": run.get("run_id"), "command": None if uri.startswith("http") else command}

    def close(self, timeout_s: float = 10.0, status: str = "FINISHED") -> str | None:
        """Ships the rest, for at most `timeout_s`. Returns a sentence about what was left, or None when all was shipped.

        `status` is one of FINISHED, FAILED, KILLED.
        """
        if not self._closed:
            self._append(status=status)
            if self._model is not None:
                # After the status: an export that takes long, or fails, holds nothing else up.
                self._append(**self._model)
            self._spool.close()
            if self._segments is not None:
                self._segments.close(timeout_s)
        self._closed = True
        if self._shipper is None:
            return self._spool.problem
        self._shipper.close(lambda: timeout_s + self._wait_s())
        return left_over(self._folder) or self._spool.problem or self._not_registered()

    def registered(self) -> str | None:
        """Returns the newest version of the registered model that this run has made, such as `models:/tiny/3`; None: none."""
        return read_document(self._folder, STATE).get("model")

    def _not_registered(self) -> str | None:
        """Returns what MLflow, or the export, has said against the model for good."""
        if self._model is None or (self.registered() or "").startswith(f"models:/{self._model['model']}/"):
            return None
        return f"the model is not registered as {self._model['model']}: {self._folder}/rejected.jsonl says why"

    def _named(self, path: str | os.PathLike[str]) -> str:
        """Returns a path or a URL as the lines name it."""
        where = os.fspath(path)
        return where if documents.is_url(where) else identity.inside(os.path.abspath(where), self._run_dir)

    def _append(self, at_s: float | None = None, **record: Any) -> None:
        self._spool.append({"t": self._clock() if at_s is None else at_s, **record})


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} as {"a.b": "1"}."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {prefix + name: str(value)}
    return flat


def left_over(folder: str) -> str | None:
    """Returns a sentence about the lines that have not reached MLflow; None if all have."""
    state = read_document(folder, STATE)
    with durable.reading(documents.join(folder, SPOOL)) as file:
        file.seek(max(0, state.get("offset", 0)))
        num_lines = sum(1 for _ in file)
    if not num_lines:
        return None
    why = state.get("problem") or "there was no time to"
    return (
        f"{num_lines} tracking entries are not in MLflow yet ({why}); they are kept in {folder}/{SPOOL} and shipped at the next "
        f"start, or by: python -m orchestrator.tracking {shlex.quote(os.path.dirname(folder))}"
    )


def _name_run(folder: str, its_id: str, config: TrackingConfig, run_name: str) -> None:
    """Writes which MLflow run the lines belong to. It stays the same over restarts, unless the store or experiment changes."""
    target = {"uri": config.stored_uri(), "experiment": config.experiment, "run_name": run_name, "identity": its_id}
    current = read_document(folder, RUN)
    if {name: current.get(name) for name in target} == target:
        return
    RUN_KIND.write(documents.join(folder, RUN), target | {"key": its_id})
