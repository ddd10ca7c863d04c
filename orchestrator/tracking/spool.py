"""The files in the folder `tracking` of a run: the lines to ship, and the progress of the shipper."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from gangway.storage import documents, durable, json_text, shapes

FOLDER = "tracking"
SPOOL = "metrics.jsonl"
RUN = "mlflow.json"
"""Which MLflow run this is. The driver writes it first; the shipper adds `run_id`."""
STATE = "shipped.json"
"""The shipper's: how far it came, and what is wrong."""


class _Run(TypedDict):
    uri: str | None
    """None: the store in the storage of the run (`TrackingConfig.uri`), wherever that is now."""
    experiment: str
    run_name: str
    key: str
    """The tag by which the run is found in the store."""
    identity: NotRequired[str]
    """The identity of the run (`gangway.storage.identity`) for which the key was made."""
    run_id: NotRequired[str | None]


@dataclass
class State:
    """The progress of the shipper: `shipped.json`."""

    offset: int = 0
    last_step: dict[str, int] = field(default_factory=dict)
    """The last step that was sent, by metric."""
    rejected: int = 0
    problem: str | None = None
    run_id: str | None = None
    """The run of MLflow to which all of this was sent."""
    last_s: float | None = None
    """When the last metrics that were sent were taken."""
    launch: str | None = None
    """The newest launch."""
    settings: dict[str, str] = field(default_factory=dict)
    """Its settings."""
    nested: str | None = None
    """Its nested run, while it goes on."""
    model: str | None = None
    """The newest version of a registered model, such as `models:/tiny/3`."""


RUN_KIND = documents.DocumentKind(RUN, _Run, "the run is looked for in MLflow again")
STATE_KIND = documents.DocumentKind(STATE, State, "all metrics are sent to MLflow again, which keeps each once")
KINDS = {kind.name: kind for kind in (RUN_KIND, STATE_KIND)}


_NOT_FINITE = json_text.SUFFIX.encode()


class _Entry(TypedDict):
    """A line of the spool. Which of the other keys it has says what it is."""

    t: float
    step: NotRequired[int]
    metrics: NotRequired[dict[str, float | None]]
    go_back: NotRequired[int]
    params: NotRequired[dict[str, str]]
    tags: NotRequired[dict[str, str]]
    artifact: NotRequired[str]
    folder: NotRequired[str]
    launch: NotRequired[str]
    model: NotRequired[str]
    source: NotRequired[str]
    status: NotRequired[str]


NEEDED_WITH = {"metrics": ("step",), "artifact": ("folder",), "model": ("source", "step"), "launch": ("params",)}
"""What an entry must have beside a key."""


def entry(line: bytes) -> dict[str, Any]:
    """Returns the entry in a line of the spool. Raises DamagedDocument."""
    record = documents.parse(line, SPOOL)
    if _NOT_FINITE in line:  # of a hundred thousand lines almost none
        record = json_text.show_not_finite(record)
    problem = shapes.problem(_Entry, record)
    missing = [
        f"{other} is missing"
        for key, others in NEEDED_WITH.items()
        for other in others
        if not problem and key in record and other not in record
    ]
    if problem or missing:
        raise documents.DamagedDocument(f"not an entry of tracking: {problem or missing[0]}")
    return record


class Spool:
    """An append-only file of JSON lines. Lines that a full disk refuses are kept in memory and written with the next line."""

    def __init__(self, path: str):
        durable.make_folder(os.path.dirname(path))
        if durable.is_in_the_way(path):
            documents.set_aside(path)
        # Unbuffered: what was appended is in the file even if this process is killed.
        self._file = durable.appending(path, buffering=0)
        self._lock = threading.Lock()
        # Otherwise the unfinished line of a driver that died would swallow our first line.
        self._pending = bytearray(b"" if durable.ends_with_newline(self._file.fileno()) else b"\n")
        self.problem: str | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            self._pending += json_text.dumps(record).encode() + b"\n"
            self._write()

    def close(self) -> None:
        with self._lock:
            self._write()
            self._file.close()

    def _write(self) -> None:
        try:
            while self._pending:
                # An unbuffered write may take only a part: the rest stays pending.
                del self._pending[: self._file.write(self._pending)]
            self.problem = None
        except OSError as error:
            self.problem = f"metrics cannot be written: {error.strerror}; {len(self._pending)} bytes wait in memory"


def read_document(folder: str, name: str) -> dict[str, Any]:
    """Returns the document; empty if it does not exist or is damaged: everything can be made again from the spool. Raises
    NewerDocument."""
    return KINDS[name].if_whole(documents.join(folder, name)) or {}


def set_damaged_aside(folder: str) -> list[str]:
    """Sets the damaged documents of the folder aside; returns a sentence about each. Raises NewerDocument."""
    return [note for name, kind in KINDS.items() for note in kind.salvaged(documents.join(folder, name))[1]]
