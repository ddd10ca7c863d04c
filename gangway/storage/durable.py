"""Writes files that survive a power cut, on file systems that can do less than a local disk. Without JAX.

The folder of a run may be shared. Whoever may write there may plant a link under a name that we are going to use, to a file of
ours elsewhere. So a file beside another one has a random name and is created by us alone, and nothing is opened through a link.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from gangway.storage import ours

T = TypeVar("T")
TEMPORARY = re.compile(r".+\.[0-9a-f]{32}\.tmp")
"""The name of a file of `beside`: one that is being written, or that a killed process has left."""
TRIES = 5
"""How often a file is written whose temporary file another process deletes as left behind."""
NOT_OFFERED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""The errors of a file system that has no fsync, or none for folders. It decides by itself when data is safe."""


def write(path: Path, text: str) -> None:
    """Writes the file atomically, also with regard to a power cut. Several processes may write it at the same time: the last one
    wins. Raises OSError."""
    write_shared(path, text.encode(), 0o666)


def write_shared(path: Path, contents: bytes, mode: int) -> None:
    """Like `write`, with a mode, to which the umask applies."""

    def once() -> None:
        with replaced(path, mode) as file:
            file.write(contents)

    again_if_deleted(once)


def again_if_deleted(work: Callable[[], T]) -> T:
    """Returns what `work` returns. It is called again while its temporary file is missing: another process may have deleted that
    as left behind (`delete_left`). Raises what the last call raises."""
    for _ in range(TRIES - 1):
        with suppress(FileNotFoundError):
            return work()
    return work()


@contextmanager
def replaced(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yields a file beside `path`, which gets that name when the block ends; nothing is left if the block raises. Several
    processes may do so at the same time: the last one wins. Raises OSError. For one writer at a time see `whole`.

    A process that is killed leaves a file whose name ends in `.tmp`, which no later write replaces: see `delete_left`.
    """
    temporary = beside(path)
    try:
        with created(temporary, mode) as file:
            yield file
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


def beside(path: Path) -> Path:
    """Returns a new name beside `path` that nobody can guess."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")


def delete_left(folder: Path) -> None:
    """Deletes the files of `beside` in a folder, which killed processes have left there. One that lives and is just writing
    such a file writes it again (`write_shared`, `LocalStore.create`). Raises OSError."""
    try:
        with os.scandir(folder) as found:
            left = [one.path for one in found if TEMPORARY.fullmatch(one.name) and one.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return
    for path in left:
        ours.delete(path, ours.TEMPORARY)


def created(path: Path, mode: int = 0o666) -> BinaryIO:
    """Returns a new file, open for writing. Raises FileExistsError if there is anything of that name, a link included."""
    # By `os.open`, for the mode: a chmod afterwards would leave a moment with other rights.
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb")


def appending(path: str | os.PathLike[str], mode: int = 0o666, *, buffering: int = -1) -> BinaryIO:
    """Returns a file, created if there is none, open for reading and for writing at its end. `buffering` is that of `open`.
    Raises OSError if it is a link, or has another name as well."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, mode)
    try:
        _check_own_name(descriptor, path)
        return cast(BinaryIO, open(descriptor, "ab+", buffering=buffering))
    except BaseException:
        os.close(descriptor)
        raise


def reading(path: str | os.PathLike[str], *, follows_links: bool = True) -> BinaryIO:
    """Returns a file, open for reading. Never waits: a pipe in its place would never end. Raises OSError, IsADirectoryError for
    anything that is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW))
    except OSError as error:
        raise is_a_link(path) if error.errno == errno.ELOOP else error from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, "it is no file", os.fspath(path))
    return open(descriptor, "rb")


def is_a_link(path: str | os.PathLike[str]) -> OSError:
    """Returns the error for a link where nothing is reached through one."""
    what = "it is a link, and nothing of a run is reached through one: put what it leads to in its place, or move it away"
    return OSError(errno.ELOOP, what, os.fspath(path))


def make_folder(path: str | os.PathLike[str]) -> None:
    """Makes a folder of a run, if there is none, for files that are written by their paths. Raises OSError, also for a link to
    one."""
    if os.path.islink(path):
        raise is_a_link(path)
    os.makedirs(path, exist_ok=True)


def is_in_the_way(path: str | os.PathLike[str]) -> bool:
    """Whether there is something at `path` that is not written to: a folder, a pipe, a link that somebody may have planted."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISCHR(mode))


def no_link(path: str, flags: int) -> int:
    """The `opener` of `open` for a file that is written: raises OSError if the path is a link, which somebody else may
    have planted in a shared folder."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _check_own_name(descriptor: int, path: str | os.PathLike[str]) -> None:
    """Raises OSError if an open file has another name as well: what is written would be in both."""
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        raise OSError(
            errno.EMLINK, "it is linked to another file, and nothing is written through it: move it away", os.fspath(path)
        )


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Yields a file beside `path`, which gets that name when the block ends: for what is written bit by bit. Nothing is left if
    the block raises. A process that is killed leaves a file whose name ends in `.tmp`, which the next one writes anew.

    Raises BlockingIOError if another process of this machine is writing it, and OSError.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    locked = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        _check_own_name(locked, temporary)
        # Before anything is changed: of two processes, the first one's file stays whole.
        _lock(locked, temporary)
        try:
            os.ftruncate(locked, 0)
            # Synced and closed before it is renamed, as in `replaced`, and locked until after that.
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


def ends_with_newline(descriptor: int) -> bool:
    """Returns whether a file of lines is empty or whole: a process that died may have left a part of one."""
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


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
