"""What a run needs of its storage, the same for a folder and for a bucket: whole objects by name, and nothing more. Without JAX.

Nothing is appended to, renamed, locked or linked, because a bucket cannot do that. An object that is not there is None. That
nobody can tell whether it is there is an error of one of three kinds, and never None.
"""

from __future__ import annotations

import errno
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")
_PART = re.compile(r"[^/\0]+")


class StorageProblem(OSError):
    """The storage did not do what it was asked for: one of the three kinds below. `filename` is the URL or the path."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}" if self.filename else super().__str__()


class StorageUnavailable(StorageProblem):
    """The storage does not answer, or not in time. The same call may work later; nothing is known of what is there."""


class StorageRefused(StorageProblem):
    """The storage answers no, and will again: credentials, rights, a bucket that is not there, something else in the place."""


class StorageFull(StorageProblem):
    """There is no room, or the quota is used up."""


class Entry(NamedTuple):
    """An object of a listing."""

    name: str
    """The name in the store, such as `checkpoints/12/meta.json`."""
    size: int
    """Bytes."""
    tag: str
    """Another one if the object is another one: the ETag of a bucket, and of a file its time and number."""
    changed_s: float
    """Unix time of its last write, by the clock of the storage."""


class Store(ABC):
    """A folder or a bucket with a prefix, by the names of the objects in it: parts with `/` between them.

    Every method raises StorageUnavailable, StorageRefused or StorageFull; each waits only a limited time. Threads may share one.
    """

    url: str
    """Where it is: a path, or the URL of a bucket with the prefix; without a slash at the end."""
    is_local: bool
    """Whether it is a folder: local or mounted."""
    tags_last: bool
    """Whether an object has the same tag as long as it is the same: then its contents need no digest."""

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """Returns the object; None if there is none."""

    @abstractmethod
    def get_part(self, name: str, start: int, stop: int) -> bytes | None:
        """Returns the bytes from `start` up to `stop`, fewer where the object ends; None if there is no object."""

    @abstractmethod
    def entry(self, name: str) -> Entry | None:
        """Returns size and tag of an object; None if there is none."""

    @abstractmethod
    def put(self, name: str, data: bytes, *, makes_folder: bool = True) -> None:
        """Writes the object, in place of the one that was there. Readers find the old one or the new one, never a part. Without
        `makes_folder` a folder of this machine must be there already: if it is not, the storage is gone, and a new one would be
        on whatever disk is below the mount point."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Writes the object if there is none, and returns whether it did: at most one of several writers gets True.

        `data` must have an id of its writer in it. A store that has done the work may not have said so; then the bytes that are
        there show whose they are.
        """

    @abstractmethod
    def list(self, prefix: str = "", after: str = "") -> Sequence[Entry]:
        """Returns all objects below the folder `prefix`, by name; with `after`, those with a greater name only. A listing may
        lack what was written just now, if the store is one of the few that are not consistent."""

    @abstractmethod
    def has_folder(self, prefix: str) -> bool:
        """Whether there are objects below the folder `prefix`. A folder of this machine counts if it is empty, too."""

    @abstractmethod
    def folders(self, prefix: str = "") -> Sequence[str]:
        """Returns the names of the folders directly in the folder `prefix`, sorted; each without the prefix. A folder of a disk,
        and of a store such as SeaweedFS for a while, is named although all that was in it is deleted."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Deletes an object, if there is one. Called by `gangway.storage.ours` alone, which looks at the mark first."""

    @abstractmethod
    def delete_all(self, prefix: str) -> None:
        """Deletes all objects below the folder `prefix`. Called by `gangway.storage.ours` alone. What could be deleted is gone
        if this raises."""

    @abstractmethod
    def upload(self, name: str, path: Path) -> None:
        """Writes a file of this machine as an object, like `put`. Raises OSError if the file cannot be read."""

    @abstractmethod
    def download(self, name: str, path: Path) -> None:
        """Writes an object as a file of this machine, whole or not at all. Raises FileNotFoundError if there is no object, and
        OSError if the file cannot be written."""

    @abstractmethod
    def room(self) -> int | None:
        """Returns the free bytes; None if there is no limit that can be asked for."""

    @abstractmethod
    def make_folder(self, prefix: str, *, around: bool = False) -> None:
        """Makes a folder, if there is none; with `around` also those that it is in. A bucket has no folders to make."""

    @abstractmethod
    def settle(self, prefix: str) -> None:
        """Returns when the names in a folder would outlive a power cut. What a bucket has answered does."""

    @abstractmethod
    def delete_left(self, prefix: str) -> None:
        """Deletes what writers that died have left in a folder, under names that are no objects. A bucket has none."""

    @abstractmethod
    def around(self) -> Store:
        """Returns the folder around the whole store. Raises ValueError for a bucket: what is around that may be anybody's."""


@dataclass(frozen=True, eq=False)
class Place:
    """A place in a store, which stands for a path. It is none for Python: `Path("s3://b/x")` would be the folder `s3:` here, and
    nobody would notice. So it has no `__fspath__`, and `os`, `open` and `Path` raise TypeError.

    Two places are equal if they have the same URL."""

    store: Store
    key: str = ""
    """The name in the store; empty for all of it."""

    def __truediv__(self, name: str) -> Place:
        return Place(self.store, checked_name(f"{self.key}/{name}" if self.key else name))

    @property
    def name(self) -> str:
        """The last part."""
        return (self.key or self.store.url).rstrip("/").rpartition("/")[2]

    @property
    def url(self) -> str:
        return f"{self.store.url}/{self.key}" if self.key else self.store.url

    @property
    def parent(self) -> Place:
        """The folder around it. Raises ValueError for a whole bucket: what is around that may be anybody's."""
        return Place(self.store, self.key.rpartition("/")[0]) if self.key else Place(self.store.around())

    def with_name(self, name: str) -> Place:
        """Returns the place beside this one that has another last part."""
        return self.parent / name

    @property
    def path(self) -> Path:
        """The file or folder of this machine. Raises TypeError for a place in a bucket."""
        if not self.store.is_local:
            raise TypeError(f"{self.url} is no path of this machine")
        return Path(self.url)

    def __str__(self) -> str:
        return self.url

    def __eq__(self, other: object) -> bool:
        return type(other) is Place and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def get(self) -> bytes | None:
        return self.store.get(self.key)

    def put(self, data: bytes, *, makes_folder: bool = True) -> None:
        self.store.put(self.key, data, makes_folder=makes_folder)

    def content(self) -> bytes:
        """Returns what is in the object. Raises FileNotFoundError if there is none."""
        return self._there(self.get())

    def size(self) -> int:
        """Returns the bytes of the object. Raises FileNotFoundError if there is none."""
        return self._there(self.store.entry(self.key)).size

    def part(self, start: int, stop: int) -> bytes:
        """Returns the bytes from `start` up to `stop`, fewer where the object ends. Raises FileNotFoundError if there is none."""
        return self._there(self.store.get_part(self.key, start, stop))

    def _there(self, found: T | None) -> T:
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url)
        return found

    def make(self, *, around: bool = False) -> None:
        """Makes the folder (`Store.make_folder`)."""
        self.store.make_folder(self.key, around=around)

    def settle(self) -> None:
        """Returns when the names in this folder would outlive a power cut."""
        self.store.settle(self.key)

    def create(self, data: bytes) -> bool:
        return self.store.create(self.key, data)

    def exists(self) -> bool:
        """Whether there is an object of this name. A folder is none."""
        return bool(self.key) and self.store.entry(self.key) is not None

    def is_dir(self) -> bool:
        """Whether there are objects below this name."""
        return self.store.has_folder(self.key)

    def list(self, after: str = "") -> Sequence[Entry]:
        """Like `Store.list`, for the folder of this name; the names of the entries are those in this folder."""
        cut = len(self.key) + 1 if self.key else 0
        found = self.store.list(self.key, f"{self.key}/{after}" if after and self.key else after)
        return [entry._replace(name=entry.name[cut:]) for entry in found]

    def folders(self) -> Sequence[str]:
        return self.store.folders(self.key)


def checked_name(name: str) -> str:
    """Returns the name of an object. Raises ValueError if it would lead out of the store, or to no object."""
    parts = name.split("/")
    if all(_PART.fullmatch(part) and part not in (".", "..") for part in parts):
        return name
    raise ValueError(f"{name!r} is no name in a store: expected parts with / between them, none of them empty, . or ..")
