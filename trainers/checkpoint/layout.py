"""The folder of a run's checkpoints: its names, whether there is room for one more, and which may be deleted. Without JAX.

On a disk:

`12` is a checkpoint of step 12. `12.saving-TOKEN` is one that is being written, or that a process left when it died.
`12.replaced-TOKEN` and `12.deleted-TOKEN` are about to be deleted. They are renamed first, so that a half-deleted checkpoint is
never taken for a whole one. In a bucket nothing is renamed: see `trainers.checkpoint.standing`.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from gangway.errors import CheckpointError
from gangway.storage import documents, durable, ours
from gangway.storage.opening import place_of
from gangway.storage.store import Place
from trainers.checkpoint import manifest
from trainers.checkpoint.retention import Retention
from trainers.checkpoint.standing import Folder, at, committed_in, copied_in, unrecorded

MODELS_FOLDER = "models"
Remove = Callable[[Folder, int], None]
"""Removes what is saved of a step in a folder, and raises OSError if it cannot."""

ROOM_FACTOR = 1.1
ROOM_MARGIN_BYTES = 4 << 20
PROBE, PROBE_BYTES = ".probe-", 4096
CHECKPOINT = ours.with_any_of("a checkpoint", manifest.MANIFEST_FILE, manifest.META_FILE)
"""A damaged one is one too. A folder whose name is a number may be a user's own."""
_ON_THE_WAY = re.compile(r"(\d+)(-\d+_\d+_[0-9a-f]{8})?\.(saving|replaced|deleted)-\w+")


def local(path: str) -> Path:
    """Returns the absolute path. Raises CheckpointError for a URL."""
    if "://" in path:
        raise CheckpointError(f"checkpoints need a local or mounted folder, not {path}: mount the bucket, and give the folder")
    return Path(os.path.abspath(path))


def folder_of(path: str) -> Folder:
    """Returns the absolute path, or the place in a bucket. Raises StorageRefused for a URL that cannot work."""
    return place_of(path) if documents.is_url(path) else Path(os.path.abspath(path))


def steps(folder: Folder) -> list[int]:
    """Returns the steps that have a checkpoint, oldest first; none if there is no folder. Raises OSError, or StorageError of a
    bucket."""
    if isinstance(folder, Place):
        return sorted(committed_in(folder))
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    # Digits alone: a folder on the way has a suffix, and is never taken for a checkpoint.
    return sorted({*(int(name) for name in names if name.isdecimal()), *copied_in(folder)})


def on_the_way(folder: Folder) -> list[Path]:
    """Returns the folders of a disk that are being written or removed, or were when a process died."""
    if not isinstance(folder, Path):
        return []
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(folder / name for name in names if _ON_THE_WAY.fullmatch(name))


def unfinished(folder: Folder) -> list[tuple[int, Folder]]:
    """Returns (step, folder) of what is being saved, or what a save that was cut short has left. Raises OSError, or StorageError
    of a bucket."""
    if isinstance(folder, Place):
        return [(int(place.name.partition("-")[0]), place) for place in unrecorded(folder)]
    return [(step_on_the_way(path), path) for path in on_the_way(folder) if ".saving-" in path.name]


def replaced(folder: Folder) -> list[int]:
    """Returns the steps whose checkpoint was being replaced by another of the same step when a process died."""
    return [step_on_the_way(path) for path in on_the_way(folder) if ".replaced-" in path.name]


def step_on_the_way(path: Path) -> int:
    """Returns the step of one of `on_the_way`."""
    return int(path.name.partition(".")[0].partition("-")[0])


def name_on_the_way(step: int | str, what: str, token: str) -> str:
    return f"{step}.{what}-{token}"


def obstacle(folder: Folder, num_bytes: int) -> str:
    """Returns why a state of `num_bytes` cannot be saved in `folder` now; empty if it can. A bucket is not asked: it has room,
    and whether it answers shows as it is written to."""
    if not isinstance(folder, Path):
        return ""
    if not folder.is_dir():
        return f"the folder {folder} is gone: bring the storage back, and the next save goes there"
    probe = folder / f"{PROBE}{uuid.uuid4().hex}"
    try:
        space = os.statvfs(folder)
        # `f_bavail`, not `f_bfree`: without the blocks that are kept for root.
        free, needed = space.f_bavail * space.f_frsize, int(num_bytes * ROOM_FACTOR) + ROOM_MARGIN_BYTES
        if free < needed:
            return f"no room in {folder}: {_mib(needed)} needed, {_mib(free)} free; free some, or lower save_total_limit"
        try:
            # Free space does not tell whether a quota is used up, or whether the folder may be written to.
            with durable.created(probe) as file:
                file.write(bytes(PROBE_BYTES))
        finally:
            ours.delete(probe, ours.PROBE)
    except OSError as error:
        return unwritable(folder, error)
    return ""


def unwritable(folder: Folder, error: Exception) -> str:
    return f"cannot write to {folder}: {_reason(error)}; make it writable, and the next save goes there"


def models_of(folder: Folder) -> Folder:
    """Returns the folder for the checkpoints of the parameters alone."""
    return folder.parent / MODELS_FOLDER


def delete_old(
    folder: Folder,
    newest: int,
    superseded: Iterable[int],
    retention: Retention,
    keep_model: Callable[[Folder, int], None] | None = None,
    abandoned_models: Iterable[int] = (),
    is_read: Callable[[Folder], bool] = lambda checkpoint: False,
    seen: Seen | None = None,
    remove: Remove | None = None,
) -> list[str]:
    """Deletes the checkpoints that are no longer needed now that `newest` is committed and its files were read back for their
    digests. Returns what went wrong.

    Steps that training has gone back behind (`superseded`) do not count as good. `keep_model(checkpoint, step)` creates a
    checkpoint of the parameters alone; if it raises, the whole checkpoint stays. `abandoned_models` belong to a course that was
    rolled back, and are deleted. A checkpoint that `is_read` now stays until a later call. `seen` is what earlier calls for this
    folder have found: with it the work does not grow with the number of checkpoints that stay.
    `remove` is by default `remove_from_disk`.
    """
    models_folder, remove = models_of(folder), remove or remove_from_disk
    if retention.keeps_everything:
        return _delete_models(models_folder, abandoned_models, remove)
    whole, models, scores = (seen or Seen()).look(folder, superseded, abandoned_models, newest, retention)
    removals = retention.may_go(steps(folder), {newest, *whole}, models, scores)
    problems = []
    for step in removals.checkpoints:
        if is_read(at(folder, step)):
            continue
        try:
            if step in removals.into_models and keep_model is not None:
                keep_model(at(folder, step), step)
            remove(folder, step)
        except Exception as error:  # a thread's boundary, and Orbax raises what its layers raise: tried again after the next save
            problems.append(f"the old checkpoint {folder / str(step)} could not be deleted: {_reason(error)}")
    return problems + _delete_models(models_folder, {*removals.models, *abandoned_models}, remove)


def delete_old_models(
    folder: Folder, superseded: Iterable[int], retention: Retention, seen: Seen | None = None, remove: Remove | None = None
) -> list[str]:
    """Deletes the models that may go, now that a newer one is committed. `folder` is that of the checkpoints; `seen` and `remove`
    are as in `delete_old`. Returns what went wrong."""
    if retention.keeps_everything:
        return []
    whole, models, scores = (seen or Seen()).look(folder, superseded, (), None, retention)
    removals = retention.may_go(steps(folder), whole, models, scores)
    return _delete_models(models_of(folder), removals.models, remove or remove_from_disk)


class Seen:
    """What was found of the checkpoints and models of a run. A committed one does not change, so it is looked at once; only the
    newest ones, which the others may be deleted for, are looked at each time. One thread uses it."""

    def __init__(self) -> None:
        self._scores: dict[Folder, float | None] = {}
        """The scores of those that are whole, by folder; None: it has none."""

    def look(
        self,
        folder: Folder,
        superseded: Iterable[int],
        abandoned_models: Iterable[int],
        newest: int | None,
        retention: Retention,
    ) -> tuple[set[int], set[int], dict[int, float]]:
        """Returns the steps of the checkpoints in `folder` that are whole and not superseded, the same of the models, and their
        scores by step."""
        whole = self._whole(folder, set(superseded), newest, retention)
        models = self._whole(models_of(folder), set(abandoned_models), newest, retention)
        found = {step: self._scores[path] for step, path in models.items()}
        found |= {step: self._scores[path] for step, path in whole.items()}
        return {*whole}, {*models}, {step: score for step, score in found.items() if score is not None}

    def _whole(self, folder: Folder, excluded: set[int], newest: int | None, retention: Retention) -> dict[int, Folder]:
        counted = [step for step in steps(folder) if step not in excluded]
        # The one of this save too, which need not have the highest step: its name may be that of one that was replaced.
        again = {*counted[-(retention.newest or 1) :], newest}
        whole = {}
        for step in counted:
            path = at(folder, step)
            if step in again or path not in self._scores:
                self._scores.pop(path, None)
                # Not kept of one that is not whole: a storage that does not answer just now makes it look so.
                if not is_whole(path):
                    continue
                self._scores[path] = _score(path, retention)
            whole[step] = path
        return whole


def _delete_models(folder: Folder, steps: Iterable[int], remove: Remove) -> list[str]:
    problems = []
    for step in steps:
        try:
            remove(folder, step)
        except OSError as error:
            problems.append(f"the old model {folder / str(step)} could not be deleted: {_reason(error)}")
    return problems


def _score(checkpoint: Folder, retention: Retention) -> float | None:
    """Returns the score; None if it has none. It is read from the checkpoint itself: so a restart finds it, and it is deleted
    with the checkpoint. An evaluation that is due at the step of a save runs first, so that the save records its score."""
    if not retention.best:
        return None
    try:
        return retention.score(manifest.read_meta(checkpoint))
    except (manifest.DamagedError, KeyError):
        return None  # then only its age decides whether it is kept


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def is_whole(path: Folder) -> bool:
    """Whether a checkpoint is whole, as far as names and sizes show. Raises StorageProblem of a bucket that does not answer."""
    try:
        content = manifest.read(path)
    except manifest.DamagedError:
        return False
    # Sizes only: this runs for every checkpoint after every save, and digests would read all of them.
    return next(content.problems(path, content.files, digest_up_to=0), None) is None


def put_in_place(work: Path, final: Path, *, replace: ours.Mark | None) -> None:
    """Renames a finished checkpoint to `final`. With `replace`, what has that name is removed, if it carries that mark or is an
    empty folder. Raises NotOursError if it does not, and OSError."""
    old = final.with_name(name_on_the_way(final.name, "replaced", uuid.uuid4().hex[:8]))
    # A folder cannot be renamed over one that has files. If the process dies between the two renames, `committed.check`
    # still counts the old one.
    if replace and final.exists() and not ours.is_empty(final):
        ours.check(final, replace)
        os.rename(final, old)
    os.rename(work, final)
    # Before the old one is deleted: until then a power cut could undo the rename, and leave neither.
    durable.sync_folder(final.parent)
    with suppress(OSError):
        ours.delete(old, ours.ON_THE_WAY)


def remove_from_disk(folder: Folder, step: int) -> None:
    """Removes what is saved of a step in the folder of a disk. Raises NotOursError if it is no checkpoint, and OSError."""
    path = at(folder, step)
    assert isinstance(path, Path)
    delete(path)


def delete(path: Path) -> None:
    """Removes a checkpoint so that no part of it is ever taken for one. Raises NotOursError if it is none, and OSError."""
    ours.check(path, CHECKPOINT)
    renamed = path.with_name(name_on_the_way(path.name, "deleted", uuid.uuid4().hex[:8]))
    os.rename(path, renamed)
    ours.delete(renamed, ours.ON_THE_WAY)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
