"""What is kept on this machine between two processes: the tokens and indices of data. Without it everything only takes longer."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gangway.storage import durable, ours

FOLDER = "~/.cache/gangway"
TOKENS, INDICES, CHECKED, LOCKS = "tokens", "records", "checked", "locks"
KEPT_BYTES = 20 << 30
"""How much of each is kept."""
ENTRY = ours.named("kept data", r"[0-9a-f]{64}(\..+)?")
"""Each is named after a digest of what it was made of."""


def folder(kind: str) -> Path:
    return Path(os.path.expanduser(FOLDER)) / kind


def used(path: Path) -> None:
    """Notes that a file or folder was used just now."""
    with suppress(OSError):  # it was deleted just now, or is not ours
        os.utime(path)


def tidy(place: Path) -> None:
    """Deletes what was used least recently, until the rest is no more than `KEPT_BYTES`. What was used last stays, however large:
    the next start needs it. Entries that differ only in their endings go together."""
    with suppress(OSError):  # another process deletes at the same time
        _tidy(place)


def _tidy(place: Path) -> None:
    entries: dict[str, list[Path]] = {}
    for path in filter(ENTRY.is_on, place.iterdir()):
        entries.setdefault(path.name.partition(".")[0], []).append(path)
    newest_first = sorted(entries.values(), key=lambda paths: -max(path.stat().st_mtime for path in paths))
    num_bytes = 0
    for number, paths in enumerate(newest_first):
        num_bytes += sum(_num_bytes(path) for path in paths)
        if number > 0 and num_bytes > KEPT_BYTES:
            for path in paths:
                ours.delete(path, ENTRY)


@contextmanager
def whole(made: Path, folder: Path) -> Iterator[None]:
    """Gives the folder `made`, which the block fills, the name `folder` when the block ends. Nothing is left of it if the block
    raises, or if the name is taken (OSError)."""
    try:
        yield
        durable.sync_folder(made)
        os.rename(made, folder)
    except BaseException:
        with suppress(OSError):
            ours.delete(made, ours.TEMPORARY)
        raise
    durable.sync_folder(folder.parent)


@contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Lets the processes of this machine in one after the other, for one `name`. A process that is killed makes room."""
    path = folder(LOCKS) / hashlib.sha256(name.encode()).hexdigest()[:2]  # few files: two names may share one
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", opener=durable.no_link) as file:
        with suppress(OSError):  # a file system without locks: then all of them do the work
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _num_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
