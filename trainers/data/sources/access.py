"""Reads files of data: on a disk or a mount, and at URLs that fsspec knows (`gs://`, `s3://`). What goes wrong is reported.

Bytes that are text are UTF-8, or as `data.encoding` says. What is not is an error, and never a sign in its place.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from gangway.errors import DataError, DataMissingError, DataUnavailableError, UsageError
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


UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
BINARY = {
    **{
        b"\x1f\x8b": "compressed by gzip",
        b"BZh": "compressed by bzip2",
        b"\xfd7zXZ": "compressed by xz",
        b"\x28\xb5\x2f\xfd": "zstd",
    },
    **{b"%PDF-": "a PDF", b"PK\x03\x04": "a zip", b"\x89PNG": "a PNG", b"\xff\xd8\xff": "a JPEG", b"SQLite format 3": "SQLite"},
    **{b"PAR1": "Parquet", b"ARROW1": "Arrow"},
}
"""How files begin that are no text in any encoding."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a sign of UTF-16. Alone it is no text: no tokenizer takes it."""


def is_utf_8(encoding: str) -> bool:
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


def text_of(content: bytes, encoding: str = "utf-8", first: int = 0) -> str:
    """Returns the text, without a mark of the encoding in front. `first`: the place of the content in its file, for errors.
    Raises ValueError."""
    try:
        text = content.decode("utf-8" if is_utf_8(encoding) else encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        if kind := next((kind for mark, kind in BINARY.items() if first == 0 and content.startswith(mark)), None):
            raise ValueError(f"it is {kind}, and no text") from error
        utf_16 = "; it begins as UTF-16 does: set data.encoding=utf-16" if content.startswith(UTF_16_MARKS) else ""
        found = f"byte 0x{content[error.start]:02x} at offset {first + error.start}" if error.start < len(content) else "its end"
        raise ValueError(
            f"it is no {encoding}: {found}: {error.reason}{utf_16 or '; say with data.encoding what it is, such as latin-1'}"
        ) from error
    if (place := text.find("\0")) >= 0:
        raise ValueError(
            f"it has a zero byte, which no text has (character {place}): is it UTF-16 (data.encoding=utf-16-le), or no text?"
        )
    if lone := SURROGATE.search(text):
        raise ValueError(f"it has half of a sign of UTF-16 at character {lone.start()}: {lone[0]!r}")
    return text


def read_text(path: str, encoding: str) -> str:
    """Returns the text of a whole file. Raises DataError with the file and the offset of what is no text; DataMissingError or
    DataUnavailableError."""
    try:
        return text_of(read_bytes(path), encoding)
    except ValueError as error:
        raise DataError(f"data.paths: {path}: {error}") from error


def ranges_of(path: str, encoding: str) -> ByteRanges | Recoded:
    """Returns the file for reading parts of it as UTF-8."""
    return ByteRanges(path) if is_utf_8(encoding) else Recoded(path, encoding)


class Recoded:
    """A file of another encoding as UTF-8, in memory: a newline may be another byte there, or several."""

    def __init__(self, path: str, encoding: str):
        self.path, self.encoding = path, encoding

    @cached_property
    def _content(self) -> bytes:
        return read_text(self.path, self.encoding).encode()

    def open(self) -> Any:
        return io.BytesIO(self._content)

    def read(self, start: int, stop: int) -> bytes:
        """Returns the bytes from `start` up to `stop`; fewer at the end of the file."""
        return self._content[start:stop]
