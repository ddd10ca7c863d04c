"""Small JSON documents in a run's storage: always written whole, never appended to, renamed or locked.

The run's storage may be a bucket. So only what an object store can do is used here: read an object, replace it whole, create it
if it is absent, list a prefix. On a local path a temporary file gives the same guarantees. Mounted storage may be able to do
less than a local disk: `check_writable` says what is missing.
"""

from __future__ import annotations

import errno
import json
import os
import posixpath
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainers.storage import durable, not_finite, ours

ANOTHER_STORAGE = (
    "set storage=PATH to a folder or bucket that this user and every host can write to, and that can replace a file, create one "
    "exclusively and rename a folder"
)
DOCUMENT = ours.named("a document of a run", r"[\w.-]+\.json")


class StorageError(Exception):
    """The run's storage cannot be used, or has a document that cannot."""


class DamagedDocument(StorageError):
    """A document is not what was written: its bits have changed, or something else lies in its place."""


class NewerDocument(StorageError):
    """A document was written by a newer program, which knows more than this one."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """True for `gs://bucket/run`; a local or mounted path has no scheme."""
    return "://" in os.fspath(path)


def join(folder: str | os.PathLike[str], *names: str) -> str:
    return posixpath.join(os.fspath(folder), *names)


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Replaces the document atomically: a reader finds the old one or the new one, never a part."""
    write_text(path, not_finite.dumps(data, indent=1) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Like `write_json`, for a document that is text already."""
    if is_url(path):
        filesystem, name = _remote(path)
        filesystem.pipe_file(name, text.encode())
        return
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    durable.write_shared(Path(path), text.encode(), 0o666)


def create_json(path: str | os.PathLike[str], data: Any) -> bool:
    """Writes the document if there is none, and returns whether it did. Of several writers at most one gets True.

    If the file system has no hard links, a reader may find the document empty or incomplete while it is written. `read_json`
    then raises DamagedDocument; the document belongs to its writer all the same.
    """
    return create_text(path, not_finite.dumps(data, indent=1) + "\n")


def create_text(path: str | os.PathLike[str], text: str) -> bool:
    """Like `create_json`, for a document that is text already."""
    if is_url(path):
        return _create_remote(path, text)
    temporary = _write_beside(os.fspath(path), text)
    try:
        # A link, unlike a rename, fails when the name exists; and unlike an exclusive open it shows the whole text at once.
        os.link(temporary, path)
    except OSError as error:
        if _was_linked(temporary):
            return True  # the server made the link and its answer was lost; the client's retry then found the name
        return not isinstance(error, FileExistsError) and _create_exclusively(os.fspath(path), text)
    finally:
        ours.delete(temporary, ours.TEMPORARY)
    return True


def read_json(path: str | os.PathLike[str]) -> Any | None:
    """Returns the document; None if there is none. Raises DamagedDocument if it is not JSON, and OSError."""
    content = read_bytes(path)
    return None if content is None else not_finite.shown(parse(content, path))


def read_bytes(path: str | os.PathLike[str]) -> bytes | None:
    """Returns the bytes of a document; None if there is none. Raises DamagedDocument if a folder is in its place, and OSError."""
    try:
        return _read_remote(path) if is_url(path) else _read_local(path)
    except FileNotFoundError:
        return None
    except IsADirectoryError as error:
        message = f"{path}: damaged: expected a file, found something else; delete or repair it and start again"
        raise DamagedDocument(message) from error


def parse(content: str | bytes, where: object) -> Any:
    """Returns what a text of JSON says. Raises DamagedDocument, which names it as `where`."""
    try:
        return json.loads(content)
    # RecursionError: a text of a hundred thousand brackets.
    except (ValueError, RecursionError) as error:
        message = f"{where}: damaged: expected a JSON document ({error}); delete or repair it and start again"
        raise DamagedDocument(message) from error


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether the document exists. Raises OSError if that cannot be found out."""
    try:
        if is_url(path):
            filesystem, name = _remote(path)
            filesystem.info(name)  # not `exists`, which returns False for every error
        else:
            os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def delete(path: str | os.PathLike[str]) -> None:
    """Deletes one document of a run, if there is one. Raises OSError."""
    ours.delete(path, DOCUMENT)


def check_writable(run_dir: str | os.PathLike[str]) -> None:
    """Creates the run's folder, and tries everything in it that a run needs of its storage. Raises StorageError with the reason
    and what to do about it."""
    token = uuid.uuid4().hex
    probe = join(run_dir, f".probe-{token}")
    try:
        _try_to("write to", run_dir, lambda: write_json(probe, {}))
        _try_to("replace a file in", run_dir, lambda: write_json(probe, {"again": True}))
        if _try_to("create a file in", run_dir, lambda: create_json(probe, {})):
            raise StorageError(f"storage: {os.fspath(run_dir)} lets two processes create one file; {ANOTHER_STORAGE}")
        if not is_url(run_dir):
            _try_to("rename a folder in", run_dir, lambda: _rename_a_folder(f"{probe}-from", f"{probe}-to"))
    finally:
        with suppress(OSError):  # best effort: a failure here is not the problem to report
            ours.delete(probe, ours.PROBE)


def _try_to(do: str, run_dir: str | os.PathLike[str], work: Callable[[], Any]) -> Any:
    try:
        return work()
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"storage: cannot {do} {os.fspath(run_dir)}: {reason}; {ANOTHER_STORAGE}") from error


def _rename_a_folder(source: str, target: str) -> None:
    """Renames a folder with a file in it, as a checkpoint is renamed."""
    os.mkdir(source)
    folder = source
    try:
        with open(os.path.join(folder, "file"), "wb"):
            pass
        os.rename(source, target)
        folder = target
    finally:
        with suppress(OSError):
            ours.delete(folder, ours.PROBE)


def _remote(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """Returns the filesystem of a URL, with an empty cache, and the path in it."""
    import fsspec  # Costs 0.1 s: not paid by a run on a local folder.

    filesystem, name = fsspec.core.url_to_fs(os.fspath(path))
    # fsspec keeps listings: an old one would hide what another process has written.
    filesystem.invalidate_cache()
    return filesystem, name


def _create_remote(path: str | os.PathLike[str], text: str) -> bool:
    filesystem, name = _remote(path)
    try:
        # The object store itself decides who was first: a look beforehand would leave a gap.
        filesystem.pipe_file(name, text.encode(), mode="create")
    except FileExistsError:
        return False
    return True


def _read_remote(path: str | os.PathLike[str]) -> bytes:
    filesystem, name = _remote(path)
    return filesystem.cat_file(name)


def _read_local(path: str | os.PathLike[str]) -> bytes:
    with durable.reading(path) as file:
        return file.read()


def _write_beside(path: str, text: str) -> str:
    """Writes a finished file in the folder of `path`, under a unique name, and returns its path."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            durable.sync(file.fileno())  # without it a power cut can leave the new name on an empty file
    except OSError:
        ours.delete(temporary, ours.TEMPORARY)
        raise
    return temporary


def _was_linked(temporary: str) -> bool:
    # A second name for this file can only be the one that was to be created.
    return os.stat(temporary).st_nlink > 1


def _create_exclusively(path: str, text: str) -> bool:
    """Creates the file on a file system without hard links. A mounted bucket may report only on close that another file came
    first."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
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
            ours.delete(path, ours.among("a document made just now", [Path(path)]))
        raise
    # A mounted bucket may accept two writers; the contents show which one won.
    return _read_local(path) == text.encode()
