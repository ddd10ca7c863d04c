"""Writes files that survive a power cut, on file systems that can do less than a local disk. Without JAX."""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trainers.storage import ours

NOT_OFFERED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""The errors of a file system that has no fsync, or none for folders. It decides by itself when data is safe."""


def write(path: Path, text: str) -> None:
    """Writes the file atomically, also with regard to a power cut. Nobody else may write it at the same time. Raises OSError."""
    _write(path, path.with_name(f"{path.name}.tmp"), text.encode(), 0o666)


def write_shared(path: Path, contents: bytes, mode: int) -> None:
    """Like `write`, but several processes may write at the same time: the last one wins. The umask applies to `mode`.

    A process that is killed leaves a file whose name ends in `.tmp`, which no later write replaces.
    """
    _write(path, path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp"), contents, mode)


def _write(path: Path, temporary: Path, contents: bytes, mode: int) -> None:
    try:
        # By `os.open`, for the mode: a chmod afterwards would leave a moment with other rights.
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(contents)
            file.flush()
            sync(file.fileno())
        # Only after the sync: otherwise a power cut could leave the new name on an empty file.
        os.replace(temporary, path)
    # Whatever ended the write: a temporary file with a unique name would stay for ever.
    except BaseException:
        ours.delete(temporary, ours.TEMPORARY)
        raise
    # The folder too: its new entry could be lost in a power cut although the file is not.
    sync_folder(path.parent)


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Yields a file beside `path`, which gets that name when the block ends: for what is written bit by bit. Nothing is left if
    the block raises. A process that is killed leaves a file whose name ends in `.tmp`, which the next one writes anew.

    Raises BlockingIOError if another process of this machine is writing it, and OSError.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    locked = os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        # Before anything is changed: of two processes, the first one's file stays whole.
        _lock(locked, temporary)
        try:
            os.ftruncate(locked, 0)
            # Closed before it is renamed, as in `_write`, and locked until after that.
            with open(os.dup(locked), "wb") as file:
                yield file
                file.flush()
                sync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            ours.delete(temporary, ours.TEMPORARY)
            raise
    finally:
        os.close(locked)
    sync_folder(path.parent)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NOT_OFFERED | {errno.ENOLCK}:
            raise
    if not (path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())):
        raise BlockingIOError(errno.EAGAIN, "another process has just finished it", str(path))


def sync(descriptor: int) -> None:
    """Returns when the written data is on the disk, if the file system can tell. Raises OSError (no room, a failed disk)."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise


def sync_folder(folder: Path) -> None:
    """Makes new names in `folder` survive a power cut."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except IsADirectoryError:
        return  # some file systems cannot open folders
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
