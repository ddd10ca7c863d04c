"""A folder as the storage of a run: on a disk, or on a mount that can do less. Without JAX.

An object is a file. It is written under another name, flushed and renamed, so that a power cut leaves the old one or the new one.

The folder of a run may be shared, and whoever may write there may plant a link under a name that we use. So the store of a run
reaches nothing through a link: it opens one folder in the other, from its own downwards, and works in the one that it has open.
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


OPEN_FOLDERS = Path("/proc/self/fd")
"""Where Linux has a name for each folder that this process has open: whatever is renamed meanwhile, it leads to that one."""


class LocalStore(Store):
    is_local, tags_last = True, False

    def __init__(self, folder: str | os.PathLike[str], *, follows_links: bool = True):
        """`follows_links`: whether objects and folders in it may be links, as in a cache of models. Its own path may always have
        some."""
        self.url = os.path.abspath(folder)
        self._follows_links = follows_links

    def path(self, name: str, *, is_folder: bool = False) -> Path:
        """Returns the file of an object, or a folder of objects: for an empty name that of all."""
        return Path(self.url) if is_folder and not name else Path(self.url, checked_name(name))

    @contextmanager
    def _at(self, name: str, *, is_folder: bool = False, makes_folder: bool = False, may_lack: bool = False) -> Iterator[Path]:
        """Yields the file of an object, or a folder of objects, by a path that leads there through no link. Errors within become
        those of a store; with `may_lack` those of ABSENT stay what they are."""
        where = self.path(name, is_folder=is_folder)
        with _problems(where, may_lack=may_lack):
            if self._follows_links or not OPEN_FOLDERS.is_dir():
                if makes_folder:
                    _make(where.parent)
                yield where
                return
            parts = name.split("/") if name else []
            opened = _open_folder(self.url, parts if is_folder else parts[:-1], makes_folder=makes_folder)
            try:
                yield OPEN_FOLDERS / str(opened) if is_folder else OPEN_FOLDERS / str(opened) / parts[-1]
            finally:
                os.close(opened)

    def get(self, name: str) -> bytes | None:
        with (
            suppress(*ABSENT),
            self._at(name, may_lack=True) as path,
            durable.reading(path, follows_links=self._follows_links) as file,
        ):
            return file.read()
        return None

    def get_part(self, name: str, start: int, stop: int) -> bytes | None:
        with (
            suppress(*ABSENT),
            self._at(name, may_lack=True) as path,
            durable.reading(path, follows_links=self._follows_links) as file,
        ):
            file.seek(start)
            return file.read(max(stop - start, 0))
        return None

    def entry(self, name: str) -> Entry | None:
        with suppress(*ABSENT), self._at(name, may_lack=True) as path:
            status = os.stat(path, follow_symlinks=self._follows_links)
            # Of a folder nothing is to be had, though it is in the way of an object.
            return None if stat.S_ISDIR(status.st_mode) else _entry(name, status)
        return None

    def put(self, name: str, data: bytes, *, makes_folder: bool = True) -> None:
        with self._at(name, makes_folder=makes_folder) as path:
            durable.write_shared(path, data, 0o666)

    def create(self, name: str, data: bytes) -> bool:
        """If the file system has no hard links, a reader may find the object empty or incomplete while it is written; it belongs
        to its writer all the same."""
        with self._at(name, makes_folder=True) as path:
            made = durable.again_if_deleted(lambda: _create(path, data))
            if made:
                durable.sync_folder(path.parent)
            return made

    def list(self, prefix: str = "", after: str = "") -> Sequence[Entry]:
        with suppress(*ABSENT), self._at(prefix, is_folder=True, may_lack=True) as folder:
            return sorted(_below(folder, f"{prefix}/" if prefix else "", after, follows_links=self._follows_links))
        return []

    def has_folder(self, prefix: str) -> bool:
        with suppress(*ABSENT), self._at(prefix, is_folder=True, may_lack=True) as folder:
            return stat.S_ISDIR(os.stat(folder).st_mode)
        return False

    def folders(self, prefix: str = "") -> Sequence[str]:
        with suppress(*ABSENT), self._at(prefix, is_folder=True, may_lack=True) as folder, os.scandir(folder) as found:
            return sorted(one.name for one in found if one.is_dir(follow_symlinks=False))
        return []

    def delete(self, name: str) -> None:
        with suppress(*ABSENT), self._at(name, may_lack=True) as path:
            ours.delete(path, ours.LOOKED_AT)

    def delete_all(self, prefix: str) -> None:
        with suppress(*ABSENT), self._at(prefix, may_lack=True) as path:
            renamed = path.with_name(f"{path.name}.deleted-{uuid.uuid4().hex[:8]}")
            # First: a half-deleted folder must not be taken for a whole one.
            os.rename(path, renamed)
            ours.delete(renamed, ours.ON_THE_WAY)

    def upload(self, name: str, path: Path) -> None:
        with open(path, "rb") as source, self._at(name, makes_folder=True) as target, durable.replaced(target) as file:
            shutil.copyfileobj(source, file, 1 << 20)

    def download(self, name: str, path: Path) -> None:
        source = None
        with suppress(*ABSENT), self._at(name, may_lack=True) as found:
            source = durable.reading(found, follows_links=self._follows_links)
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
        if not prefix:
            with _problems(folder):
                _make(folder)
            return
        with self._at(prefix, makes_folder=around) as path:
            path.mkdir(exist_ok=True)
            if around:
                durable.sync_folder(path.parent)

    def settle(self, prefix: str) -> None:
        with self._at(prefix, is_folder=True) as folder:
            durable.sync_folder(folder)

    def delete_left(self, prefix: str) -> None:
        with suppress(*ABSENT), self._at(prefix, is_folder=True, may_lack=True) as folder:
            durable.delete_left(folder)

    def around(self) -> Store:
        return LocalStore(os.path.dirname(self.url))


def problem_of(error: OSError, where: str | os.PathLike[str]) -> StorageProblem:
    """Returns an error of the file system as one of the three kinds; `errno` and `strerror` are kept."""
    kind = StorageFull if error.errno in FULL else StorageRefused if error.errno in REFUSED else StorageUnavailable
    filename = error.filename if error.filename and not str(error.filename).startswith(f"{OPEN_FOLDERS}/") else os.fspath(where)
    return kind(error.errno or errno.EIO, error.strerror or str(error), filename)


@contextmanager
def _problems(where: Path, *, may_lack: bool = False) -> Iterator[None]:
    try:
        yield
    except (StorageProblem, ours.NotOursError):
        raise
    except OSError as error:
        if may_lack and isinstance(error, ABSENT):
            raise
        raise problem_of(error, where) from error


def _entry(name: str, status: os.stat_result) -> Entry:
    return Entry(name, status.st_size, f"{status.st_mtime_ns:x}-{status.st_ino:x}", status.st_mtime)


def _open_folder(root: str, names: Sequence[str], *, makes_folder: bool) -> int:
    """Returns the descriptor of a folder that lies so deep in `root`, and is reached through no link. Raises OSError."""
    if makes_folder and not os.path.isdir(root):
        _make(Path(root))
    opened, where = os.open(root, os.O_RDONLY | os.O_DIRECTORY), root
    for name in names:
        around, where = opened, os.path.join(where, name)
        try:
            if makes_folder:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=around)
                    durable.sync(around)  # a power cut must not leave what is in it without its name
            opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=around)
        except NotADirectoryError as error:
            if stat.S_ISLNK(os.lstat(name, dir_fd=around).st_mode):
                raise durable.is_a_link(where) from error
            raise
        finally:
            os.close(around)
    return opened


def _below(folder: Path, prefix: str, after: str, *, follows_links: bool) -> Iterator[Entry]:
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
            yield from _below(Path(one.path), f"{name}/", after, follows_links=follows_links)
        elif name > after:  # first: the size of each file costs a request to a file server
            with suppress(FileNotFoundError):
                if one.is_file(follow_symlinks=follows_links):
                    yield _entry(name, one.stat(follow_symlinks=follows_links))


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
