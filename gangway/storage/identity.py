"""The identity of a run: an id in its folder, the same wherever the folder is, and under whatever name. Without JAX.

What other systems keep of a run (MLflow, W&B, the cluster) goes by this id. A path would change when storage is moved, or
is reached through a link.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from typing import NamedTuple, NotRequired, TypedDict

from gangway.storage import documents
from gangway.storage.mounts import TABLE, mount_of, parse
from gangway.storage.object_store import BRIEFLY
from gangway.storage.opening import place_of

HOME = "~/.gangway/runs"
OWN = "from here on it is a run of its own, and MLflow and W&B begin a new one, with all that was recorded so far"
COPY = f"{{}} is a copy of {{}}, which is still there: {OWN}"
UNASKED = (
    "{} was at {} before, where nobody can look now ({}): it is taken for the same run, moved here; if it is still there too, it "
    "is a copy, and needs a name and a run of its own"
)
COPY_OF_MOVED = f"{{}} is a copy of a run that was at {{}} and has gone from there: {OWN}"


class _Document(TypedDict):
    id: str
    folder: str
    """Where the run was when somebody last asked for its identity."""
    disk: NotRequired[list[int]]
    """Which folder of which disk that was: a folder that is moved on its disk stays the same, and a copy is another one."""


KIND = documents.DocumentKind("run.json", _Document, "MLflow and W&B begin a new run", without_format=False)


class Identity(NamedTuple):
    id: str
    notes: tuple[str, ...] = ()
    """What people must know about it, as sentences."""


def of(run_folder: str | os.PathLike[str]) -> Identity:
    """Returns the identity of the run in this folder; it is given one if it has none. A copy of a run gets one of its own, as
    long as the other run is where it was. Raises NewerDocument or OSError."""
    path = documents.join(run_folder, KIND.name)
    if documents.is_url(run_folder):
        return _of_bucket(os.fspath(run_folder))
    folder = os.path.realpath(run_folder)
    known, notes = KIND.salvaged(path)
    moved = known is None or known["folder"] != folder
    disk = _disk(folder) if moved else None
    if known is None:
        known = {"id": uuid.uuid4().hex[:16], "folder": ""}
    elif moved:
        before = known.get("disk")
        is_another, notes = _another(known["folder"], folder, known["id"])
        if not is_another and disk and before and disk[:-1] == before[:-1] and disk != before:
            is_another, notes = True, (COPY_OF_MOVED.format(folder, known["folder"]),)
        if is_another:
            known = {"id": uuid.uuid4().hex[:16], "folder": ""}
    if moved:
        KIND.write(path, {"id": known["id"], "folder": folder, **({"disk": disk} if disk else {})})
    return Identity(known["id"], notes)


def name_in_cluster(name: str, run_folder: str | os.PathLike[str], its_id: str) -> str:
    """Returns the name of a run in a Ray cluster: two runs of one name in different storages may share one. Copies may have one
    identity, where nobody can tell which of them is the copy: so the name has their folders in it."""
    folder = os.fspath(run_folder) if documents.is_url(run_folder) else os.path.realpath(run_folder)
    return f"{name}-{hashlib.sha256(f'{its_id} {folder}'.encode()).hexdigest()[:8]}"


def _disk(folder: str) -> list[int] | None:
    """Returns what distinguishes this folder from all others on its disk, last, after what distinguishes the disk; None for a
    mounted bucket and the like, which number their folders anew."""
    mount = mount_of(folder, [*parse(TABLE.read_text(errors="surrogateescape"))]) if TABLE.exists() else None
    if mount is not None and mount.kind.startswith("fuse"):
        return None
    status = os.stat(folder)
    return [os.statvfs(folder).f_fsid, status.st_dev, status.st_ino]


def local_folder(run_folder: str | os.PathLike[str]) -> str:
    """Returns the folder of this machine for what cannot be in a bucket, such as files that lines are appended to: that of the
    run, and for a run in a bucket one below `~/.gangway/runs`. Raises NewerDocument or OSError."""
    if not documents.is_url(run_folder):
        return os.path.abspath(run_folder)
    return os.path.join(os.path.expanduser(HOME), of(run_folder).id)


def _of_bucket(url: str) -> Identity:
    place = place_of(url) / KIND.name
    mine = {"id": uuid.uuid4().hex[:16], "folder": place.parent.url}
    known, notes = KIND.salvaged(place)
    if known is None:
        # Several may ask for it at once.
        known = mine if KIND.create(place, mine) else KIND.read(place) or mine
    if known["folder"] != mine["folder"]:
        is_another, told = _another(known["folder"], mine["folder"], known["id"])
        known, notes = mine if is_another else known, (*notes, *told)
        KIND.write(place, {"id": known["id"], "folder": mine["folder"]})
    return Identity(known["id"], notes)


def _another(before: str, folder: str, its_id: str) -> tuple[bool, tuple[str, ...]]:
    """Returns whether the run of that id is still in the folder where it was, which is not this one; and what to tell of it."""
    in_bucket = documents.is_url(before) or documents.is_url(folder)
    try:
        there = KIND.read(place_of(before, BRIEFLY) / KIND.name) if before else None
        if there is not None and there["id"] == its_id and (in_bucket or not os.path.samefile(before, folder)):
            return True, (COPY.format(folder, before),)
    except documents.StorageError:
        pass  # what is there is damaged, or of another version: no run could go on from it
    except OSError as error:
        return False, (UNASKED.format(folder, before, error.strerror or error),) if documents.is_url(before) else ()
    return False, ()


def inside(path: str, run_folder: str) -> str:
    """Returns a path as the documents of a run name it: relative to the run's folder if it lies there, or in the storage beside
    it, such as `../mine/8`; unchanged otherwise."""
    if documents.is_url(path) or not os.path.isabs(path):
        return path
    both = ((path, os.path.abspath(run_folder)), (os.path.realpath(path), os.path.realpath(run_folder)))
    for base_of in (lambda folder: folder, os.path.dirname):
        for found, folder in both:
            base = base_of(folder)
            if base != os.sep and f"{found}{os.sep}".startswith(base + os.sep):
                return os.path.relpath(found, folder)
    return path


def outside(path: str, run_folder: str) -> str:
    """Returns the path that `inside` was given, in the folder where the run is now."""
    return path if documents.is_url(path) or os.path.isabs(path) else os.path.normpath(os.path.join(run_folder, path))
