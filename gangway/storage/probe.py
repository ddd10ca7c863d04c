"""Whether a run's storage can do what a run needs, found out before a machine is taken; a refused run leaves no folder."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gangway.storage import durable, mounts, ours
from gangway.storage.documents import StorageError
from gangway.storage.object_store import FOR_PEOPLE, ObjectStore
from gangway.storage.opening import is_url, open_store
from gangway.storage.store import Place, StorageProblem

ANOTHER_STORAGE = (
    "set storage=PATH to a folder or bucket that this user and every host can write to, and that can replace a file, create one "
    "exclusively and rename a folder"
)
ANOTHER_BUCKET = "set storage=URL to a bucket that this user and every host can read, write, list and delete in"
AGAIN = b'{"again": true}\n'


def check_writable(run_dir: str | os.PathLike[str]) -> None:
    """Creates the run's folder, and tries everything in it that a run needs of its storage. Raises StorageError with the reason
    and what to do about it."""
    if not is_url(run_dir) and (problem := mounts.problem_of(run_dir)):
        raise StorageError(f"storage: {problem}")
    try:
        store = open_store(run_dir, FOR_PEOPLE)
    except StorageProblem as error:
        raise StorageError(f"storage: {error.filename}: {error.strerror}") from error
    probe = Place(store) / f".probe-{uuid.uuid4().hex}"
    _try_to("write to", store.url, lambda: probe.put(b"{}\n"))
    try:
        _try_to("replace a file in", store.url, lambda: probe.put(AGAIN))
        if _try_to("read from", store.url, probe.get) != AGAIN:
            raise StorageError(f"storage: {store.url} does not return what was written last; {_another(store.url)}")
        if _try_to("create a file in", store.url, lambda: probe.create(b"{}\n")):
            raise StorageError(f"storage: {store.url} lets two processes create one file; {_another(store.url)}")
        if isinstance(store, ObjectStore):
            _check_bucket(store, probe)
        else:
            _try_to("rename a folder in", store.url, lambda: _rename_a_folder(store.url, probe.name))
    finally:
        with suppress(OSError):  # best effort: a failure here is not the problem to report
            ours.delete(probe, ours.PROBE)


def _check_bucket(store: ObjectStore, probe: Place) -> None:
    listed = probe / ".probe-listed"
    try:
        _try_to("write to", store.url, lambda: listed.put(b""))
        if [entry.name for entry in _try_to("list", store.url, probe.list)] != [listed.name]:
            raise StorageError(f"storage: {store.url} does not list what was just written; {ANOTHER_BUCKET}")
    finally:
        with suppress(OSError):
            ours.delete(listed, ours.PROBE)
    _try_to("delete from", store.url, lambda: ours.delete(probe, ours.PROBE))
    if probe.exists():
        raise StorageError(f"storage: {store.url} keeps what is deleted (retention?); {ANOTHER_BUCKET}")
    if not _try_to("create a file in", store.url, lambda: probe.create(b"{}\n")):
        raise StorageError(f"storage: {store.url} creates no file where there is none; {ANOTHER_BUCKET}")
    if store.keeps_versions:
        raise StorageError(
            f"storage: {store.url} keeps old versions of its objects: deleted checkpoints would stay, and cost; suspend the "
            "versioning of the bucket, or give another one"
        )


def _another(url: str) -> str:
    return ANOTHER_BUCKET if is_url(url) else ANOTHER_STORAGE


def _try_to(do: str, url: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except OSError as error:
        raise StorageError(f"storage: cannot {do} {url}: {error.strerror or error}; {_another(url)}") from error


def _rename_a_folder(root: str, name: str) -> None:
    """Renames a folder with a file in it, as a checkpoint is renamed."""
    source, target = (Path(root, f"{name}-{end}") for end in ("from", "to"))
    source.mkdir()
    try:
        durable.created(source / "file").close()
        source.rename(target)
    finally:
        for folder in (source, target):
            with suppress(OSError):
                ours.delete(folder, ours.PROBE)


@contextmanager
def no_folder_if_refused(path: str) -> Iterator[None]:
    """Removes the folder and those above it again, if they are made within and an error leaves them empty. A URL has no
    folders."""
    folder = Path(path)
    made = [] if is_url(path) else [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):  # the first that has something in it ends this
            for each in made:
                ours.delete_empty(each)
        raise
