"""The files in the folder `tracking` of a run: the lines to ship, and the progress of the shipper."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from typing import Any

from trainers.storage import documents

FOLDER = "tracking"
SPOOL = "metrics.jsonl"
RUN = "mlflow.json"
"""Which MLflow run this is. The driver writes it first; the shipper adds `run_id`."""
STATE = "shipped.json"
"""The shipper's: how far it came, and what is wrong."""


class Spool:
    """An append-only file of JSON lines. Lines that a full disk refuses are kept in memory and written with the next line."""

    def __init__(self, path: str):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # Unbuffered: what was appended is in the file even if this process is killed.
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 (until `close()`)
        self._lock = threading.Lock()
        # Otherwise the unfinished line of a driver that died would swallow our first line.
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
                # An unbuffered write may take only a part: the rest stays pending.
                del self._pending[: self._file.write(self._pending)]
            self.problem = None
        except OSError as error:
            self.problem = f"metrics cannot be written: {error.strerror}; {len(self._pending)} bytes wait in memory"


def read_document(folder: str, name: str) -> dict[str, Any]:
    """Returns the document; empty if it does not exist or is damaged: everything can be made again from the spool."""
    try:
        return documents.read_json(documents.join(folder, name)) or {}
    except documents.StorageError:
        return {}


def _ends_with_newline(file: int) -> bool:
    size = os.fstat(file).st_size
    return size == 0 or os.pread(file, 1, size - 1) == b"\n"
