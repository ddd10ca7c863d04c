"""A run that begins anew: the folder of the earlier one is moved aside, and never deleted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gangway.storage import documents, ours
from gangway.storage.row import FOLDER
from orchestrator.run_state import lease


def is_begun(run_dir: str) -> bool:
    """Whether there is something in the folder of a run."""
    return not documents.is_url(run_dir) and os.path.isdir(run_dir) and bool(os.listdir(run_dir))


def place_for(run_dir: str) -> str:
    """Returns where the folder of a run would be moved to: `RUN.before-1`, or the next free number."""
    number = 1
    while os.path.lexists(place := f"{run_dir}.before-{number}"):
        number += 1
    return place


@contextmanager
def moved_aside(run_dir: str, asked: bool, check_free: Callable[[str], None]) -> Iterator[str]:
    """Moves the folder of an earlier run aside, if that is asked for and there is one; back again if an error follows within.
    Yields the line that says so, or an empty one. Raises StorageError for a bucket, and what `check_free(run_dir)` raises.

    The numbers of drivers go on: a process of the earlier run that still trains somewhere cannot save into the new folder.
    """
    if asked and documents.is_url(run_dir):
        raise documents.StorageError(f"--fresh: {run_dir} is no folder that can be moved aside: give the run another name")
    if not asked or not is_begun(run_dir):
        yield ""
        return
    check_free(run_dir)
    place = place_for(run_dir)
    os.rename(run_dir, place)
    copies = _with_drivers(place, run_dir)
    try:
        yield f"begins anew: the earlier run is in {place}"
    except BaseException:
        _back(run_dir, place, copies)
        raise


def _with_drivers(source: str, folder: str) -> list[Path]:
    """Makes the folder, with what says who has driven the run. Returns what was made, the innermost first."""
    newest = lease.row_of(source).newest()
    made = [Path(folder), Path(folder, FOLDER)]
    made[1].mkdir(parents=True)
    lease.row_of(folder).copied(newest, newest.holder, None, {})
    made += made[1].iterdir()
    if (document := Path(source, lease.LEASE)).is_file():
        made.append(Path(folder, lease.LEASE))
        shutil.copyfile(document, made[-1])
    return made[::-1]


def _back(run_dir: str, place: str, copies: list[Path]) -> None:
    with suppress(OSError):  # somebody has begun another run there: both stay
        for path in copies:
            if path.is_dir():
                ours.delete_empty(path)
            else:
                ours.delete(path, ours.among("a copy that was just made", copies))
        os.rename(place, run_dir)
