"""Writes files that survive a power cut, on file systems that can do less than a local disk. Without JAX."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

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
        temporary.unlink(missing_ok=True)
        raise
    # The folder too: its new entry could be lost in a power cut although the file is not.
    sync_folder(path.parent)


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
