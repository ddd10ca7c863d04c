"""The files in a run's folder that drivers keep for the drivers after them."""

from __future__ import annotations

import os
from typing import Any

from trainers.storage import documents, durable

READ_BYTES = 16 << 20
"""Of a file of lines, at most: from its end."""
ROTATE_BYTES = 64 << 20
"""A file of lines that is larger begins anew; the old one is kept beside it."""


class RunFolder:
    """Every method may wait for the storage, and raises OSError when it fails."""

    def __init__(self, path: str):
        self.path = path

    def read(self, name: str) -> dict[str, Any] | None:
        """A document; None where there is none. Raises StorageError when it is damaged."""
        return documents.read_json(documents.join(self.path, name))

    def write(self, name: str, document: dict[str, Any]) -> None:
        documents.write_json(documents.join(self.path, name), document)

    def set_aside(self, name: str) -> str:
        """Takes a damaged document out of the way; returns where it is now."""
        path = documents.join(self.path, name)
        os.replace(path, f"{path}.damaged")
        return f"{path}.damaged"

    def append(self, name: str, text: str) -> None:
        """Adds lines to a file of lines, and sees them to the disk."""
        path = documents.join(self.path, name)
        if os.path.exists(path) and os.path.getsize(path) > ROTATE_BYTES:
            os.replace(path, f"{path}.old")
        with open(path, "ab+") as file:
            size = os.fstat(file.fileno()).st_size
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                file.write(b"\n")  # a line that a dying driver left unfinished must not swallow ours
            file.write(text.encode())
            file.flush()
            durable.sync(file.fileno())

    def last_lines(self, name: str) -> list[str]:
        """The lines at the end of a file of lines; none where there is no file."""
        try:
            with open(documents.join(self.path, name), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - READ_BYTES))
                return file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []
