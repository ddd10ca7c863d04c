"""Reads files of data: on a disk or a mount, and at URLs that fsspec knows (`gs://`, `s3://`). What goes wrong is reported."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from gangway.errors import DataMissingError, DataUnavailableError, UsageError
from gangway.storage.documents import is_url

MAX_OPEN_FILES = 256
EXTRA = "pip install 'gangway[cloud]'"
CREDENTIALS = (
    "has this machine credentials for it? Google: `gcloud auth application-default login` or GOOGLE_APPLICATION_CREDENTIALS; "
    "Amazon: AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
)


class Stamp(NamedTuple):
    """What tells that a file is the one that was read before."""

    num_bytes: int
    changed: str
    """The time of the last change in nanoseconds; of a URL, what its store has in its place."""


def stamp(path: str) -> Stamp:
    """Raises DataMissingError or DataUnavailableError."""
    with reading(path):
        if not is_url(path):
            about = os.stat(path)
            return Stamp(about.st_size, str(about.st_mtime_ns))
        filesystem, name = remote(path)
        info = filesystem.info(name)
        changed = next((info[key] for key in ("etag", "ETag", "mtime", "updated", "LastModified", "created") if key in info), "")
        return Stamp(info["size"], str(changed))


def open_binary(path: str) -> Any:
    """Returns the file, open for reading bytes. Use it within `reading`."""
    if not is_url(path):
        return open(path, "rb")
    filesystem, name = remote(path)
    return filesystem.open(name, "rb")


def read_bytes(path: str) -> bytes:
    with reading(path), open_binary(path) as file:
        return file.read()


class ByteRanges:
    """Parts of one file, for any number of threads at once."""

    _open: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
    """The files that are kept open: there may be more files than a process may have open."""

    def __init__(self, path: str):
        self.path = path

    def open(self) -> Any:
        """Returns the whole file, open for reading bytes. Use it within `reading`."""
        return open_binary(self.path)

    def read(self, start: int, stop: int) -> bytes:
        """Returns the bytes from `start` up to `stop`; fewer at the end of the file."""
        with reading(self.path):
            if is_url(self.path):
                filesystem, name = remote(self.path)
                return filesystem.cat_file(name, start=start, end=stop)
            if self._file is not None:
                return _pread(self._file, start, stop)
            with open(self.path, "rb") as file:
                return _pread(file, start, stop)

    @cached_property
    def _file(self) -> Any:
        if len(self._open) >= MAX_OPEN_FILES:
            return None
        file = open(self.path, "rb")  # noqa: SIM115 - as long as this object
        self._open.add(file)
        return file


def _pread(file: Any, start: int, stop: int) -> bytes:
    # By its own position: threads would share that of the file.
    found = os.pread(file.fileno(), stop - start, start)
    while len(found) < stop - start and (more := os.pread(file.fileno(), stop - start - len(found), start + len(found))):
        found += more
    return found


def remote(url: str) -> tuple[Any, str]:
    """Returns the filesystem of a URL, and the path in it. Raises UsageError for one that cannot be read here."""
    if url.startswith("hf://"):
        raise UsageError(
            f"data.paths: {url} is not read over the network: download it, as with `hf download --repo-type dataset NAME "
            "--local-dir FOLDER`, or mount it, and give that folder"
        )
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        # Of an unknown scheme too: it lists those that there are.
        raise UsageError(f"data.paths: {url} cannot be read here: {error}; {EXTRA}") from error
    except Exception as error:  # each store has errors of its own
        raise _of_store(url, error) from error


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns the errors of files and stores into DataMissingError and DataUnavailableError."""
    try:
        yield
    except (UsageError, DataUnavailableError):
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:
        if not is_url(path):
            raise
        raise _of_store(path, error) from error


def unreadable(path: str, error: OSError) -> DataUnavailableError:
    if is_url(path):
        return _of_store(path, error)
    kind = DataMissingError if isinstance(error, FileNotFoundError | PermissionError) else DataUnavailableError
    why = os.strerror(error.errno) if error.errno else error
    return kind(f"data.paths: {path} cannot be read: {why}; is it there, and yours to read?")


def _of_store(url: str, error: Exception) -> DataUnavailableError:
    if isinstance(error, FileNotFoundError):
        return DataMissingError(f"data.paths: {url} does not exist ({error})")
    return DataUnavailableError(f"data.paths: {url} cannot be read: {type(error).__name__}: {error}; {CREDENTIALS}")
