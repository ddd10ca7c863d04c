"""The folder of a run's checkpoints: what is committed there, what is read just now, what was left, and whether there is room for
one more. Without JAX.

A checkpoint is the folder `checkpoints/12-3_1_0c9e41aa`: of step 12, written there by generation 1 of driver term 3. It counts if
a record of the run's row names it, on a disk as in a bucket (`gangway.storage.row`): nothing is renamed, and a folder that no
record names is being written, or was left by a process that died.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gangway.errors import CheckpointError, CheckpointUnavailableError
from gangway.storage import documents, durable, ours, row
from gangway.storage.documents import StorageError
from gangway.storage.opening import place_of, place_of_run
from gangway.storage.row import NO_DRIVER, Kept, Record, Row, WriterTerm
from gangway.storage.store import Place
from trainers.checkpoint import manifest
from trainers.checkpoint.retention import MayGo, Retention
from trainers.config import CheckpointConfig, ScoreConfig

MODELS_FOLDER = "models"
ROOM_FACTOR = 1.1
ROOM_MARGIN_BYTES = 4 << 20
PROBE_BYTES = 4096
NAME = re.compile(r"(\d+)-(\d+)_(\d+)_[0-9a-f]{8}")
UNCOMMITTED = ours.named("a checkpoint on its way", NAME.pattern)
_rows: dict[str, Row] = {}
_reading: Counter[str] = Counter()
_lock = threading.Lock()


# ---------------------------------------------------------------------- what is committed


def row_of(folder: Place) -> Row:
    """Returns the row of the run whose checkpoints, or models, are in `folder`: the same one for all who ask in this process, so
    that each asks for what is new only."""
    run = folder.parent
    with _lock:
        if (known := _rows.get(run.url)) is None or known.is_gone():
            known = _rows[run.url] = Row(place_of_run(run) / row.FOLDER)
        return known


def committed_in(folder: Place) -> Mapping[int, Kept]:
    """Returns what is committed in a folder, by step. Raises OSError, or StorageError."""
    newest = row_of(folder).newest()
    kept = newest.of(folder.name) if newest.number else without_row(folder.parent).get(folder.name, {})
    if old := [one.folder for one in kept.values() if one.folder.isdecimal()]:
        raise _too_old(folder / old[-1])
    return kept


def readers(checkpoint: Place | str, more: int = 0) -> int:
    """Returns how many in this process read a checkpoint, an export, say; it is not deleted meanwhile. `more`: 1 by whoever
    begins, -1 by whoever ends. On host 0, which deletes old checkpoints."""
    name = os.path.abspath(str(checkpoint))  # of a URL it is no path, but a name as good as another
    with _lock:
        _reading[name] += more
        return _reading[name]


def steps(folder: Place) -> list[int]:
    """Returns the steps that have a checkpoint, oldest first; none if there is no folder. Raises OSError, or StorageError."""
    return sorted(committed_in(folder))


def at(folder: Place, step: int) -> Place:
    """Returns the folder of the checkpoint of a step. Raises OSError, or StorageError."""
    kept = committed_in(folder).get(step)
    return folder / (kept.folder if kept else str(step))


def named(path: str | os.PathLike[str] | Place) -> Place:
    """Returns the place of a path or a URL; of `RUN/checkpoints/12` that of the checkpoint of step 12, and of `RUN/best` that of
    `best`. Raises StorageRefused for a URL that cannot work, CheckpointError of `best`, OSError, or StorageError."""
    place = place_of(path)
    is_in_folder = place.store.is_local or "/" in place.key
    # A run may have this name, too.
    if place.name == row.BEST and is_in_folder and not place.is_dir() and saved_in(place.parent):
        return best(place.parent)
    if not place.name.isdecimal() or place.key.count("/") < (0 if place.store.is_local else 2):
        return place
    kept = row_of(place.parent).newest().of(place.parent.name).get(int(place.name))
    return place if kept is None else place.with_name(kept.folder)


def saved_in(run: Place) -> dict[int, Place]:
    """Returns the checkpoint of each step of a run, or the parameters alone where these are left. Raises OSError, or
    StorageError."""
    folders = (run / MODELS_FOLDER, run / row.CHECKPOINTS)
    return {step: folder / kept.folder for folder in folders for step, kept in committed_in(folder).items()}


def scored(run: Place) -> list[tuple[float, int, Place]]:
    """Returns (score, step, place) of what is saved of a run, the best first: of what was evaluated at its step, by the metrics
    that count for the newest checkpoint. Raises OSError, or StorageError."""
    saved, metas = saved_in(run), dict[int, dict[str, Any]]()
    for step in sorted(saved):
        with suppress(manifest.DamagedError):
            metas[step] = manifest.read_meta(saved[step])
    config = metas[max(metas)].get("arguments", {}).get("evaluation", {}).get("score") if metas else None
    if config is None:
        return []
    told = ScoreConfig(metrics=tuple(config["metrics"]), lower_better=config["lower_better"])
    rules = Retention.of(CheckpointConfig(), told)
    scores = {step: score for step, meta in metas.items() if (score := rules.score(meta)) is not None}
    return [(scores[step], step, saved[step]) for step in rules.best_first(scores)]


def best(run: Place) -> Place:
    """Returns the whole checkpoint with the best score, or its parameters alone where these are left. Raises CheckpointError if
    none has a score, OSError, or StorageError."""
    if (found := next((place for _, _, place in scored(run) if is_whole(place)), None)) is not None:
        return found
    raise CheckpointError(
        f"{run / row.BEST}: no whole checkpoint of this run has a score. One has if the run is evaluated at its step: set "
        "evaluation.score.metrics, such as [eval_loss], and evaluation.every_steps to checkpoint.save_steps, and train on "
        f"(checkpoint.keep_best=1 keeps the best one); the newest one is {run}"
    )


def models_of(folder: Place) -> Place:
    """Returns the folder for the checkpoints of the parameters alone."""
    return folder.parent / MODELS_FOLDER


def is_whole(path: Place) -> bool:
    """Whether a checkpoint is whole, as far as names and sizes show. Raises StorageProblem of a storage that does not answer."""
    try:
        content = manifest.read(path)
    except manifest.DamagedError:
        return False
    # Sizes only: this runs for every checkpoint after every save, and digests would read all of them.
    return next(content.problems(path, content.files, digest_up_to=0), None) is None


def check(folder: Place, newest: Record, expected: int | None) -> None:
    """Raises CheckpointUnavailableError if there must be a newer checkpoint than the storage shows: it is not mounted, is another
    one, or lags. `newest` is what the row says, and `expected` the highest step that the driver knows of. Raises OSError."""
    highest = max((step for step in (newest.step, expected) if step is not None), default=None)
    if highest is None:
        return
    last = newest_there(folder, newest)
    if last is not None and last >= highest:
        return
    found = f"the newest there is {last}" if last is not None else "none is there"
    raise CheckpointUnavailableError(
        f"checkpoint {highest} of this run was committed, and is not in {folder}: "
        f"{found if folder.is_dir() else 'there is no such folder'}; bring the storage back (is it mounted on this host, and the "
        "right one?); to go on with what is there after all, or to start again from step 0: "
        f"python -m orchestrator.commands.checkpoints {folder.parent} --accept-loss"
    )


def newest_there(folder: Place, newest: Record) -> int | None:
    """Returns the newest step of which the storage shows the folder; None: of no step. Raises OSError, or StorageError."""
    there = {*folder.folders()}
    return max((step for step, kept in newest.of(folder.name).items() if kept.folder in there), default=None)


def lost(folder: Place) -> str:
    """Returns why a run cannot go on: a checkpoint that was committed is not in `folder`; empty if they are. Raises OSError, or
    StorageError."""
    try:
        check(folder, row_of(folder).newest(), None)
    except CheckpointUnavailableError as error:
        return str(error)
    return ""


def accept_loss(folder: Place) -> None:
    """Records that the newest checkpoint that is there is the newest one that was ever committed, and that those count no longer
    which are not there. Raises OSError, or StorageError."""
    # By their objects: some stores list a folder for a while after all that was in it is deleted.
    gone = [step for step, kept in committed_in(folder).items() if not (folder / kept.folder).list()]
    row_of(folder).accept_loss({"hostname": socket.gethostname(), "pid": os.getpid()}, gone, folder.name)


def without_row(run: Place) -> dict[str, dict[int, Kept]]:
    """Returns what there is in the folder of a run that has no row: somebody has copied its checkpoints alone. Those count that
    have a manifest, of each step the newest one. Raises StorageError for those of a version that had no row, and OSError."""
    found: dict[str, dict[int, Kept]] = {}
    for name in (row.CHECKPOINTS, MODELS_FOLDER):
        folders = (run / name).folders()
        if old := [folder for folder in folders if folder.isdecimal()]:
            raise _too_old(run / name / old[-1])
        matches = sorted(filter(None, map(NAME.fullmatch, folders)), key=lambda match: (int(match[2]), int(match[3])))
        for match in matches:
            if (digest := manifest.digest_of(run / name / match[0])) is not None:
                found.setdefault(name, {})[int(match[1])] = Kept(match[0], digest)
    return found


def _too_old(checkpoint: Place) -> StorageError:
    return StorageError(
        f"{checkpoint} was saved by a version of gangway that is too old to go on from: give the run another name, and begin "
        f"with its weights by init_from.path={checkpoint}"
    )


# ---------------------------------------------------------------------- what is on its way, or was left


def name_for(step: int, term: WriterTerm, token: str) -> str:
    """Returns the name of a new folder, which nobody else uses."""
    return f"{step}-{term.driver_term}_{term.generation}_{token}"


def writer_of(name: str) -> WriterTerm:
    """Returns the term of the generation that has saved the folder of this name."""
    match = NAME.fullmatch(name)
    return WriterTerm(int(match[2]), int(match[3])) if match else NO_DRIVER


def unfinished(folder: Place) -> list[tuple[int, Place]]:
    """Returns (step, folder) of what no record names: it is being saved, or a save that was cut short has left it. Raises
    OSError, or StorageError."""
    matches = [*filter(None, map(NAME.fullmatch, folder.folders()))]  # first: what is committed meanwhile has a record then
    names = {kept.folder for kept in committed_in(folder).values()}
    return [(int(match[1]), folder / match[0]) for match in matches if match[0] not in names]


def delete_left(folder: Place, term: WriterTerm) -> None:
    """Deletes what older generations have left in a folder. Raises OSError, or StorageError."""
    for _, place in unfinished(folder):
        if writer_of(place.name) < term:
            ours.delete_folder(place, UNCOMMITTED)
    for name in folder.folders():
        if ours.ON_THE_WAY.is_on(folder / name):  # of a deletion that was cut short
            ours.delete_folder(folder / name, ours.ON_THE_WAY)
    folder.store.delete_left(folder.key)


# ---------------------------------------------------------------------- whether there is room


def obstacle(folder: Place, num_bytes: int) -> str:
    """Returns why a state of `num_bytes` cannot be saved in `folder` now; empty if it can. A bucket is not asked: it has room,
    and whether it answers shows as it is written to."""
    try:
        if not folder.store.is_local:
            return ""
        if not folder.is_dir():
            return f"the folder {folder} is gone: bring the storage back, and the next save goes there"
        if full := no_room(folder, num_bytes):
            return full
        # Free space does not tell whether a quota is used up, or whether the folder may be written to.
        probe = folder / durable.beside(Path("probe")).name
        try:
            probe.put(bytes(PROBE_BYTES), makes_folder=False)
        finally:
            ours.delete(probe, ours.TEMPORARY)
    except OSError as error:
        return unwritable(folder, error)
    return ""


def no_room(folder: Place, num_bytes: int) -> str:
    """Returns that a state of `num_bytes` has no room in `folder`, which need not be there yet; empty if it has, or if nobody can
    tell. Raises OSError."""
    free, needed = folder.store.room(), int(num_bytes * ROOM_FACTOR) + ROOM_MARGIN_BYTES
    if free is None or free >= needed:
        return ""
    return f"no room in {folder}: {_mib(needed)} needed, {_mib(free)} free; free some, or lower save_total_limit"


def unwritable(folder: Place, error: Exception) -> str:
    return f"cannot write to {folder}: {_reason(error)}; make it writable, and the next save goes there"


# ---------------------------------------------------------------------- which may go


def delete_old(
    folder: Place,
    newest: int | None,
    superseded: Iterable[int],
    retention: Retention,
    keep_model: Callable[[Place, int], None] | None = None,
    abandoned_models: Iterable[int] = (),
    is_read: Callable[[Place], bool] = lambda checkpoint: False,
    seen: Seen | None = None,
    *,
    remove: Callable[[Place, int], None],
) -> list[str]:
    """Deletes the checkpoints and models that are no longer needed now that `newest` is committed and its files were read back
    for their digests; None: a model is committed, and models alone may go. Returns what went wrong.

    Steps that training has gone back behind (`superseded`) do not count as good. `keep_model(checkpoint, step)` creates a
    checkpoint of the parameters alone; if it raises, the whole checkpoint stays. `abandoned_models` belong to a course that was
    rolled back, and are deleted. A checkpoint that `is_read` now stays until a later call. `seen` is what earlier calls for this
    folder have found: with it the work does not grow with the number of checkpoints that stay.
    `remove(folder, step)` removes what is saved of a step, and raises OSError if it cannot.
    """
    removals, kept = MayGo([], [], []), committed_in(folder)
    if not retention.keeps_everything:
        whole, models, scores = (seen or Seen()).look(folder, superseded, abandoned_models, newest, retention)
        removals = retention.may_go(kept, whole if newest is None else {newest, *whole}, models, scores)
    problems = []
    for step in removals.checkpoints if newest is not None else ():
        if is_read(checkpoint := folder / kept[step].folder):
            continue
        try:
            if step in removals.into_models and keep_model is not None:
                keep_model(checkpoint, step)
            remove(folder, step)
        except Exception as error:  # a thread's boundary, and Orbax raises what its layers raise: tried again after the next save
            problems.append(f"the old checkpoint {folder / str(step)} could not be deleted: {_reason(error)}")
    for step in {*removals.models, *abandoned_models}:
        try:
            remove(models_of(folder), step)
        except OSError as error:
            problems.append(f"the old model {models_of(folder) / str(step)} could not be deleted: {_reason(error)}")
    return problems


class Seen:
    """What was found of the checkpoints and models of a run. A committed one does not change, so it is looked at once; only the
    newest ones, which the others may be deleted for, are looked at each time. One thread uses it."""

    def __init__(self) -> None:
        self._scores: dict[Place, float | None] = {}
        """The scores of those that are whole, by folder; None: it has none."""

    def look(
        self,
        folder: Place,
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

    def _whole(self, folder: Place, excluded: set[int], newest: int | None, retention: Retention) -> dict[int, Place]:
        kept = committed_in(folder)
        counted = sorted(step for step in kept if step not in excluded)
        # The one of this save too, which need not have the highest step: its name may be that of one that was replaced.
        again = {*counted[-(retention.newest or 1) :], newest}
        whole = {}
        for step in counted:
            path = folder / kept[step].folder
            if step in again or path not in self._scores:
                self._scores.pop(path, None)
                # Not kept of one that is not whole: a storage that does not answer just now makes it look so.
                if not is_whole(path):
                    continue
                self._scores[path] = _score(path, retention)
            whole[step] = path
        return whole


def _score(checkpoint: Place, retention: Retention) -> float | None:
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


# ---------------------------------------------------------------------- what is renamed, outside of a run


def local(path: str) -> Path:
    """Returns the absolute path. Raises CheckpointError for a URL."""
    if documents.is_url(path):
        raise CheckpointError(f"checkpoints need a local or mounted folder, not {path}: mount the bucket, and give the folder")
    return Path(os.path.abspath(path))


def name_on_the_way(name: str, what: str, token: str) -> str:
    return f"{name}.{what}-{token}"


def put_in_place(work: Path, final: Path, *, replace: ours.Mark | None) -> None:
    """Renames a finished folder to `final`. With `replace`, what has that name is removed, if it carries that mark or is an
    empty folder. Raises NotOursError if it does not, and OSError."""
    old = final.with_name(name_on_the_way(final.name, "replaced", uuid.uuid4().hex[:8]))
    # A folder cannot be renamed over one that has files.
    if replace and final.exists() and not ours.is_empty(final):
        ours.check(final, replace)
        os.rename(final, old)
    os.rename(work, final)
    # Before the old one is deleted: until then a power cut could undo the rename, and leave neither.
    durable.sync_folder(final.parent)
    with suppress(OSError):
        ours.delete(old, ours.ON_THE_WAY)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
