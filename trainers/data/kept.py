"""What is kept on this machine between two processes: the tokens and indices of data. Without it everything only takes longer."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = "~/.cache/gangway"
TOKENS, INDICES, CHECKED, LOCKS = "tokens", "records", "checked", "locks"
KEPT_BYTES = 20 << 30
"""How much of each is kept: what was used last."""


def folder(kind: str) -> Path:
    return Path(os.path.expanduser(FOLDER)) / kind


def used(path: Path) -> None:
    """Notes that a file or folder was used just now."""
    with suppress(OSError):  # it was deleted just now, or is not ours
        os.utime(path)


def tidy(place: Path) -> None:
    """Deletes the entries that were used least recently, until the others are no more than `KEPT_BYTES`."""
    entries = sorted(((path.stat().st_mtime, path) for path in place.iterdir()), reverse=True)
    kept = 0
    for _, path in entries:
        kept += _num_bytes(path)
        if kept > KEPT_BYTES:
            delete(path)


@contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Lets the processes of this machine in one after the other, for one `name`. A process that is killed makes room."""
    path = folder(LOCKS) / hashlib.sha256(name.encode()).hexdigest()[:2]  # few files: two names may share one
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        with suppress(OSError):  # a file system without locks: then all of them do the work
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):  # it is gone
            path.unlink()


def _num_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
