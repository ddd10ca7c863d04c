"""A copy of a run that is being made: a document in it says so until all of it is there. Without JAX."""

from __future__ import annotations

from typing import TypedDict

from gangway.storage.documents import DocumentKind, StorageError
from gangway.storage.store import Place


class _Copying(TypedDict):
    source: str
    """The folder or the URL of the run that is copied."""


KIND = DocumentKind("copying.json", _Copying, "nobody knows of which run it is a copy", without_format=False)


def check_whole(run: Place) -> None:
    """Raises StorageError if the run is a copy that is not complete, and OSError."""
    if (copying := KIND.read(run / KIND.name)) is not None:
        raise StorageError(
            f"{run.url} is a copy of {copying['source']} that is not complete: give the command that copies it again "
            f"(gangway checkpoints {copying['source']} --copy-to {run.url}), or delete it"
        )
