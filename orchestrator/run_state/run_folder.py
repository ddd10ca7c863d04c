"""Reads and writes the files in a run's folder that a driver leaves for the next one."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gangway.storage import documents, durable, row
from gangway.storage.opening import place_of_run
from gangway.storage.store import StorageRefused
from orchestrator.run_state import lines, requests
from orchestrator.run_state.requests import Request

READ_BYTES = 16 << 20
"""How much is read from the end of lines."""
ROTATE_BYTES = 64 << 20
"""A larger file of lines is renamed to `NAME.old`, and a new one begins."""

WRITTEN_IN = ("", row.FOLDER, row.CHECKPOINTS, "tracking", "requests")
"""The folders of a run in which files are written under another name first."""


class RunFolder:
    """The folder of a run. Every method may wait for the storage, and raises OSError when it fails. Who appends to it has the
    term of a driver."""

    def __init__(self, path: str, driver_term: int = 0):
        self.path = path
        self._place = place_of_run(path)
        self._parts = lines.part_names(driver_term)

    def salvaged(self, kind: documents.DocumentKind) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """Returns a document; see `DocumentKind.salvaged`."""
        return kind.salvaged(self._place / kind.name)

    def write(self, kind: documents.DocumentKind, document: Mapping[str, Any], name: str | None = None) -> None:
        """Writes a document, by default under the name of its kind."""
        kind.write(self._place / (name or kind.name), document)

    def append(self, name: str, text: str) -> None:
        """Appends lines to a file, and syncs it to the disk."""
        path = documents.join(self.path, name)
        if lines.is_in_parts(self._place / name):
            (self._place / name / next(self._parts)).put(text.encode())
            return
        if durable.is_in_the_way(path):
            documents.set_aside(path)
        elif os.path.exists(path) and os.path.getsize(path) > ROTATE_BYTES:
            os.replace(path, f"{path}.old")
        with durable.appending(path) as file:
            if not durable.ends_with_newline(file.fileno()):
                file.write(b"\n")  # else the unfinished line of a driver that died would swallow ours
            file.write(text.encode())
            file.flush()
            durable.sync(file.fileno())

    def take_requests(self, launch_id: str) -> list[Request]:
        """Returns what is asked of a launch, once."""
        return requests.take(self.path, launch_id)

    def last_lines(self, name: str) -> list[str]:
        """Returns the lines at the end of a file; none if there is no file."""
        try:
            found = lines.newest(self._place / name, READ_BYTES)
        except StorageRefused as error:
            if error.errno == errno.EISDIR:  # what lies there is no file: it is set aside when lines are appended
                return []
            raise
        return [line.decode(errors="replace") for line in found]

    def delete_left(self) -> None:
        """Deletes the temporary files that killed processes have left. An object of a bucket has none. Raises nothing: one that
        cannot be deleted stays until the next time, and what else fails on such a storage is reported."""
        for name in WRITTEN_IN:
            with suppress(OSError):
                self._place.store.delete_left(documents.join(self._place.key, name) if name and self._place.key else name)
