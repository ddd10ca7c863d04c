"""Reads and writes the files in a run's folder that a driver leaves for the next one."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from typing import Any

from orchestrator.run_state import requests
from orchestrator.run_state.requests import Request
from trainers.storage import documents, durable
from trainers.storage.document_kind import DocumentKind, set_aside
from trainers.storage.opening import place_of

READ_BYTES = 16 << 20
"""How much is read from the end of a file of lines."""
ROTATE_BYTES = 64 << 20
"""A larger file of lines is renamed to `NAME.old`, and a new one begins."""


class RunFolder:
    """The folder of a run. Every method may wait for the storage, and raises OSError when it fails."""

    def __init__(self, path: str):
        self.path = path

    def read(self, kind: DocumentKind) -> dict[str, Any] | None:
        """Returns a document; None if there is none. Raises DamagedDocument or NewerDocument."""
        return kind.read(documents.join(self.path, kind.name))

    def set_aside(self, kind: DocumentKind, why: Exception) -> str:
        """Gives a damaged document another name; returns a sentence about it."""
        return kind.set_aside(documents.join(self.path, kind.name), why)

    def write(self, kind: DocumentKind, document: Mapping[str, Any], name: str | None = None) -> None:
        """Writes a document, by default under the name of its kind."""
        kind.write(documents.join(self.path, name or kind.name), document)

    def append(self, name: str, text: str) -> None:
        """Appends lines to a file, and syncs it to the disk."""
        path = documents.join(self.path, name)
        if documents.is_url(path):
            # A bucket has nothing to append to: each time an object, and by their names they are in order.
            (place_of(path) / f"{time.time_ns():020}-{uuid.uuid4().hex[:8]}").put(text.encode())
            return
        if durable.is_in_the_way(path):
            set_aside(path)
        elif os.path.exists(path) and os.path.getsize(path) > ROTATE_BYTES:
            os.replace(path, f"{path}.old")
        with durable.appending(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                file.write(b"\n")  # else the unfinished line of a driver that died would swallow ours
            file.write(text.encode())
            file.flush()
            durable.sync(file.fileno())

    def take_requests(self, launch_id: str) -> list[Request]:
        """Returns what is asked of a launch, once."""
        return requests.take(self.path, launch_id)

    def last_lines(self, name: str) -> list[str]:
        """Returns the lines at the end of a file; none if there is no file."""
        if documents.is_url(self.path):
            return self._last_objects(documents.join(self.path, name))
        try:
            with durable.reading(documents.join(self.path, name)) as file:
                begin = max(0, os.fstat(file.fileno()).st_size - READ_BYTES)
                file.seek(begin)
                lines = file.read().decode(errors="replace").splitlines()
                return lines[1:] if begin else lines  # the first one began before
        except (FileNotFoundError, IsADirectoryError):
            return []

    def _last_objects(self, url: str) -> list[str]:
        place, found, num_bytes = place_of(url), [], 0
        for entry in reversed(place.list()):
            num_bytes += entry.size
            if num_bytes > READ_BYTES:
                break
            found.append((place / entry.name).get() or b"")
        return b"".join(reversed(found)).decode(errors="replace").splitlines()
