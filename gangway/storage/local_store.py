"""A folder as the storage of a run: on a disk, or on a mount that can do less. Without JAX.

An object is a file. It is written under another name, flushed and renamed, so that a power cut leaves the old one or the new one.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gangway.storage import durable, ours
from gangway.storage.store import (
    Entry,
    StorageFull,
    StorageProblem,
    StorageRefused,
    StorageUnavailable,
    Store,
    checked_name,
)

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
REFUSED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EEXIST}
    | {errno.EMLINK, errno.EXDEV, errno.ENOTEMPTY, *durable.NOT_OFFERED}
)
"""What a folder answers again if it is asked again. All else may pass: EIO, ESTALE, ETIMEDOUT, a server that is away."""
ABSENT = (FileNotFoundError, NotADirectoryError)
"""How a file system says that there is no such object: below a file there is none either."""


class LocalStore(Store):
    is_local, tags_last = True, False

    def __init__(self, folder: str | os.PathLike[str]):
        self.url = os.path.abspath(folder)

    def path(self, name: str, *, is_folder: bool = False) -> Path:
        """Returns the file of an object, or a folder of objects: for an empty name that of all."""
        return Path(self.url) if is_folder and not name else Path(self.url, checked_name(name))

    def get(self, name: str) -> bytes | None:
        with _problems(self.path(name)), suppress(*ABSENT):
            with durable.reading(self.path(name)) as file:
                return file.read()
        return None

    def get_part(self, name: str, start: int, stop: int) -> bytes | None:
        with _problems(self.path(name)), suppress(*ABSENT):
            with durable.reading(self.path(name)) as file:
                file.seek(start)
                return file.read(max(stop - start, 0))
        return None

    def entry(self, name: str) -> Entry | None:
        with _problems(self.path(name)), suppress(*ABSENT):
            status = os.stat(self.path(name))
            # Of a folder nothing is to be had, though it is in the way of an object.
            return None if stat.S_ISDIR(status.st_mode) else _entry(name, status)
        return None

    def put(self, name: str, data: bytes, *, makes_folder: bool = True) -> None:
        path = self.path(name)
        with _problems(path):
            if makes_folder:
                _make(path.parent)
            durable.write_shared(path, data, 0o666)

    def create(self, name: str, data: bytes) -> bool:
        """If the file system has no hard links, a reader may find the object empty or incomplete while it is written; it belongs
        to its writer all the same."""
        path = self.path(name)
        with _problems(path):
            made = durable.again_if_deleted(lambda: _create(path, data))
            if made:
                durable.sync_folder(path.parent)
            return made

    def list(self, prefix: str = "", after: str = "") -> Sequence[Entry]:
        with _problems(self.path(prefix, is_folder=True)):
            return sorted(_below(self.path(prefix, is_folder=True), f"{prefix}/" if prefix else "", after))

    def has_folder(self, prefix: str) -> bool:
        with _problems(self.path(prefix, is_folder=True)), suppress(*ABSENT):
            return stat.S_ISDIR(os.stat(self.path(prefix, is_folder=True)).st_mode)
        return False

    def folders(self, prefix: str = "") -> Sequence[str]:
        with _problems(self.path(prefix, is_folder=True)), suppress(*ABSENT):
            with os.scandir(self.path(prefix, is_folder=True)) as found:
                return sorted(one.name for one in found if one.is_dir(follow_symlinks=False))
        return []

    def delete(self, name: str) -> None:
        with _problems(self.path(name)):
            ours.delete(self.path(name), ours.LOOKED_AT)

    def delete_all(self, prefix: str) -> None:
        path = self.path(prefix)
        renamed = path.with_name(f"{path.name}.deleted-{uuid.uuid4().hex[:8]}")
        with _problems(path), suppress(FileNotFoundError):
            # First: a half-deleted folder must not be taken for a whole one.
            os.rename(path, renamed)
            ours.delete(renamed, ours.ON_THE_WAY)

    def upload(self, name: str, path: Path) -> None:
        target = self.path(name)
        with open(path, "rb") as source, _problems(target):
            _make(target.parent)
            with durable.replaced(target) as file:
                shutil.copyfileobj(source, file, 1 << 20)

    def download(self, name: str, path: Path) -> None:
        with _problems(self.path(name)):
            try:
                source = durable.reading(self.path(name))
            except ABSENT:
                source = None
        if source is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path(name)))
        with source, durable.whole(path) as file:
            shutil.copyfileobj(source, file, 1 << 20)

    def room(self) -> int | None:
        folder = Path(self.url)
        with _problems(folder):
            nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
            space = os.statvfs(nearest)
        # `f_bavail`, not `f_bfree`: without the blocks that are kept for root.
        return space.f_bavail * space.f_frsize

    def make_folder(self, prefix: str, *, around: bool = False) -> None:
        folder = self.path(prefix, is_folder=True)
        with _problems(folder):
            if around:
                _make(folder)
            else:
                folder.mkdir(exist_ok=True)

    def settle(self, prefix: str) -> None:
        with _problems(self.path(prefix, is_folder=True)):
            durable.sync_folder(self.path(prefix, is_folder=True))

    def delete_left(self, prefix: str) -> None:
        with _problems(self.path(prefix, is_folder=True)):
            durable.delete_left(self.path(prefix, is_folder=True))

    def around(self) -> Store:
        return LocalStore(os.path.dirname(self.url))


def problem_of(error: OSError, where: str | os.PathLike[str]) -> StorageProblem:
    """Returns an error of the file system as one of the three kinds; `errno` and `strerror` are kept."""
    kind = StorageFull if error.errno in FULL else StorageRefused if error.errno in REFUSED else StorageUnavailable
    return kind(error.errno or errno.EIO, error.strerror or str(error), error.filename or os.fspath(where))


@contextmanager
def _problems(where: Path) -> Iterator[None]:
    try:
        yield
    except (StorageProblem, ours.NotOursError):
        raise
    except OSError as error:
        raise problem_of(error, where) from error


def _entry(name: str, status: os.stat_result) -> Entry:
    return Entry(name, status.st_size, f"{status.st_mtime_ns:x}-{status.st_ino:x}", status.st_mtime)


def _below(folder: Path, prefix: str, after: str) -> Iterator[Entry]:
    """Yields the objects of a folder and of those in it, with names greater than `after`; links to folders are not followed. What
    is deleted meanwhile is left out."""
    try:
        with os.scandir(folder) as found:
            inside = [one for one in found if not durable.TEMPORARY.fullmatch(one.name)]
    except ABSENT:
        return
    for one in inside:
        name = prefix + one.name
        if one.is_dir(follow_symlinks=False):
            yield from _below(Path(one.path), f"{name}/", after)
        elif name > after:  # first: the size of each file costs a request to a file server
            with suppress(FileNotFoundError):
                if one.is_file():
                    yield _entry(name, one.stat())


def _make(folder: Path) -> None:
    try:
        if not folder.is_dir():
            os.makedirs(folder, exist_ok=True)
            durable.sync_folder(folder.parent)  # a power cut must not leave what is in it without its name
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from error


def _create(path: Path, data: bytes) -> bool:
    temporary = _write_beside(path, data)
    try:
        # A link, unlike a rename, fails when the name exists; and unlike an exclusive open it shows all at once.
        os.link(temporary, path)
        return True
    except FileNotFoundError:  # for `again_if_deleted`
        raise
    except OSError as error:
        if _was_linked(temporary, path, data):
            return True  # the server made the link and its answer was lost; the client's retry then found the name
        return not isinstance(error, FileExistsError) and _create_exclusively(path, data)
    finally:
        ours.delete(temporary, ours.TEMPORARY)


def _write_beside(path: Path, data: bytes) -> Path:
    """Writes a finished file in the folder of `path`, under a unique name, and returns its path."""
    _make(path.parent)
    temporary = durable.beside(path)
    try:
        with durable.created(temporary) as file:
            file.write(data)
            file.flush()
            durable.sync(file.fileno())  # without it a power cut can leave the new name on an empty file
    except OSError:
        ours.delete(temporary, ours.TEMPORARY)
        raise
    return temporary


def _was_linked(temporary: Path, path: Path, data: bytes) -> bool:
    try:
        # A second name for this file can only be the one that was to be created.
        return os.stat(temporary).st_nlink > 1
    except FileNotFoundError:  # deleted by another process; the contents show whose the object is
        return _has_contents(path, data)


def _create_exclusively(path: Path, data: bytes) -> bool:
    """Creates the file on a file system without hard links. A mounted bucket may report only on close that another file came
    first."""
    try:
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            durable.sync(file.fileno())
    except FileExistsError:
        return False
    except OSError as error:
        # So a mounted bucket reports, on close, that another writer came first.
        if error.errno == errno.ESTALE:
            return False
        with suppress(OSError):
            # Made here just now: left there, it would block every later writer.
            ours.delete(path, ours.among("a document made just now", [path]))
        raise
    # A mounted bucket may accept two writers; the contents show which one won.
    return _has_contents(path, data)


def _has_contents(path: Path, data: bytes) -> bool:
    with durable.reading(path) as file:
        return file.read() == data
