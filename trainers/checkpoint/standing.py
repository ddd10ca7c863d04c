"""What is committed in a bucket, where nothing can be renamed: the row of the run says which folder counts. Without JAX.

On a disk a committed checkpoint is the folder `checkpoints/12`, or has the name of a bucket if it was copied from one. In a
bucket it is `checkpoints/12-3_1_0c9e41aa`, written there by generation 1 of driver term 3, if a record of the run's row names
it. A folder that no record names is what a process has left.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

from gangway.storage import ours, row
from gangway.storage.opening import place_of
from gangway.storage.row import Kept, Row, WriterTerm
from gangway.storage.store import Place

Folder = Path | Place
"""A folder of a disk, or a place in a bucket: never one on a disk."""
_NAME = re.compile(r"(\d+)-(\d+)_(\d+)_[0-9a-f]{8}")
UNCOMMITTED = ours.named("a checkpoint on its way", _NAME.pattern)
_rows: dict[str, Row] = {}
_lock = threading.Lock()


def row_of(folder: Folder) -> Row:
    """Returns the row of the run whose checkpoints, or models, are in `folder`: the same one for all who ask in this process, so
    that each asks for what is new only."""
    run = place_of(folder).parent
    if run.store.is_local:
        return Row(run / row.FOLDER)
    with _lock:
        return _rows.setdefault(run.url, Row(run / row.FOLDER))


def committed_in(folder: Place) -> Mapping[int, Kept]:
    """Returns what is committed in the folder of a bucket, by step. Raises OSError, or StorageError."""
    return row_of(folder).newest().of(folder.name)


def at(folder: Folder, step: int) -> Folder:
    """Returns the folder of the checkpoint of a step. Raises OSError, or StorageError."""
    if not isinstance(folder, Place):
        plain = folder / str(step)
        return plain if plain.exists() else folder / copied_in(folder).get(step, plain.name)
    kept = committed_in(folder).get(step)
    return folder / (kept.folder if kept else str(step))


def copied_in(folder: Path) -> dict[int, str]:
    """Returns, by step, the names of the checkpoints in the folder of a disk that are named as in a bucket: the run was copied
    from there. As there, those count that a record names; if none names one, because no record was copied, the newest of each
    step. Raises OSError, or StorageError."""
    try:
        matches = [match for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    if not matches:
        return {}  # as of all runs that have begun on a disk: then nothing more is asked
    recorded = {kept.folder for kept in row_of(folder).newest().of(folder.name).values()}
    named = [match for match in matches if match[0] in recorded]
    return {int(match[1]): match[0] for match in sorted(named or matches, key=lambda match: (int(match[2]), int(match[3])))}


def name_for(step: int, term: WriterTerm, token: str) -> str:
    """Returns the name of a new folder in a bucket, which nobody else uses."""
    return f"{step}-{term.driver_term}_{term.generation}_{token}"


def unrecorded(folder: Place) -> list[Place]:
    """Returns the folders of a bucket that no record names: they are being written, or were left. Raises OSError, or
    StorageError."""
    found = folder.folders()  # first: what is committed meanwhile has a record then
    names = {kept.folder for kept in committed_in(folder).values()}
    return [folder / name for name in found if _NAME.fullmatch(name) and name not in names]


def left_by_others(folder: Place, term: WriterTerm) -> list[Place]:
    """Returns those of `unrecorded` that older generations have left. Raises OSError, or StorageError."""
    matches = [(place, _NAME.fullmatch(place.name)) for place in unrecorded(folder)]
    return [place for place, match in matches if match and WriterTerm(int(match[2]), int(match[3])) < term]


def accept_loss(folder: Place) -> None:
    """Records that the newest checkpoint that is there in a bucket is the newest one that was ever committed, and that those
    count no longer which are not there. Raises OSError, or StorageError."""
    # By their objects: some stores list a folder for a while after all that was in it is deleted.
    gone = [step for step, kept in committed_in(folder).items() if not (folder / kept.folder).list()]
    row_of(folder).accept_loss({"hostname": socket.gethostname(), "pid": os.getpid()}, gone, folder.name)
