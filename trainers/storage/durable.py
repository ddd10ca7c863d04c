"""Files that outlive a power cut, on file systems that can do less than a local disk. Without JAX."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

NOT_OFFERED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""A file system that has no fsync, or none for folders, says one of these: then it has its own time at which data is safe."""


def write(path: Path, text: str) -> None:
    """All of it or nothing, also after a power cut. Nobody else may write it at the same time. Raises OSError."""
    _write(path, path.with_name(f"{path.name}.tmp"), text.encode(), 0o666)


def write_shared(path: Path, contents: bytes, mode: int) -> None:
    """The same, where several may write it at the same time: the last one wins. The umask applies to `mode`.

    A process that is killed leaves a file whose name ends in `.tmp`, which no later write replaces.
    """
    _write(path, path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp"), contents, mode)


def _write(path: Path, temporary: Path, contents: bytes, mode: int) -> None:
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(contents)
            file.flush()
            sync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync(descriptor: int) -> None:
    """Returns when what was written is on the disk, where the file system can tell. Raises OSError: no room, a failed disk."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise


def sync_folder(folder: Path) -> None:
    """Makes new names in `folder` outlive a power cut."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except IsADirectoryError:
        return  # some file systems open no folder
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
