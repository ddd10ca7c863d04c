"""The folder of a run's checkpoints: what lies in it, whether there is room for one more, and which may go. Without JAX.

`12` is a checkpoint of step 12. `12.saving-TOKEN` is one being written, or what a process that died has left of it;
`12.replaced-TOKEN` and `12.deleted-TOKEN` are on their way out: renamed first, so that half of one is never taken for a whole.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from trainers.checkpoint import manifest
from trainers.checkpoint.retention import Retention
from trainers.errors import CheckpointError
from trainers.storage import durable

MODELS_FOLDER = "models"

ROOM_FACTOR = 1.1
ROOM_MARGIN_BYTES = 4 << 20
PROBE, PROBE_BYTES = ".probe-", 4096
_ON_THE_WAY = re.compile(r"(\d+)\.(saving|replaced|deleted)-\w+")


def local(path: str) -> Path:
    """Raises CheckpointError for a URL."""
    if "://" in path:
        raise CheckpointError(f"checkpoints need a local or mounted folder, not {path}: mount the bucket, and give the folder")
    return Path(os.path.abspath(path))


def steps(folder: Path) -> list[int]:
    """Steps with a checkpoint, oldest first; none where there is no folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if name.isdecimal())


def on_the_way(folder: Path) -> list[Path]:
    """What is being written or removed, or was when a process died."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(folder / name for name in names if _ON_THE_WAY.fullmatch(name))


def replaced(folder: Path) -> list[int]:
    """Steps whose checkpoint was making way for another of its step when a process died."""
    return [int(path.name.partition(".")[0]) for path in on_the_way(folder) if ".replaced-" in path.name]


def name_on_the_way(step: int | str, what: str, token: str) -> str:
    return f"{step}.{what}-{token}"


def obstacle(folder: Path, num_bytes: int) -> str:
    """Why a state of `num_bytes` cannot be saved in `folder` now; empty if nothing stands in the way."""
    if not folder.is_dir():
        return f"the folder {folder} is gone: bring the storage back, and the next save goes there"
    probe = folder / f"{PROBE}{uuid.uuid4().hex}"
    try:
        space = os.statvfs(folder)
        free, needed = space.f_bavail * space.f_frsize, int(num_bytes * ROOM_FACTOR) + ROOM_MARGIN_BYTES
        if free < needed:
            return f"no room in {folder}: {_mib(needed)} needed, {_mib(free)} free; free some, or lower save_total_limit"
        try:
            probe.write_bytes(bytes(PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        return unwritable(folder, error)
    return ""


def unwritable(folder: Path, error: OSError) -> str:
    return f"cannot write to {folder}: {error.strerror or error}; make it writable, and the next save goes there"


def models_of(folder: Path) -> Path:
    """Where the parameters of checkpoints in `folder` lie whose other arrays are gone."""
    return folder.parent / MODELS_FOLDER


def delete_old(
    folder: Path,
    newest: int,
    superseded: Iterable[int],
    retention: Retention,
    keep_model: Callable[[Path, Path], None] | None = None,
    abandoned_models: Iterable[int] = (),
) -> list[str]:
    """Deletes what is superfluous now that `newest` was committed, and its files read back for their digests. Steps that training
    has gone back on (`superseded`) do not count as good. Returns what went wrong.

    `keep_model(checkpoint, new folder)` makes a checkpoint of the parameters alone; where it raises, the whole one stays.
    `abandoned_models` are of a course that training has gone back on: they go."""
    found, only = steps(folder), models_of(folder)
    good = {newest, *_whole(folder, set(superseded))}
    models = _whole(only, set(abandoned_models))
    gone = retention.may_go(found, good, models, _scores(folder, good, retention) | _scores(only, models - good, retention))
    problems = []
    for step in gone.checkpoints:
        try:
            if step in gone.into_models and keep_model is not None:
                keep_model(folder / str(step), only / str(step))
            delete(folder / str(step))
        except Exception as error:  # a thread's boundary, and Orbax raises what its layers raise: tried again after the next save
            problems.append(f"the old checkpoint {folder / str(step)} could not be deleted: {_reason(error)}")
    for step in {*gone.models, *abandoned_models}:
        try:
            delete(only / str(step))
        except OSError as error:
            problems.append(f"the old model {only / str(step)} could not be deleted: {_reason(error)}")
    return problems


def _whole(folder: Path, left_behind: set[int]) -> set[int]:
    return {step for step in steps(folder) if step not in left_behind and is_whole(folder / str(step))}


def _scores(folder: Path, steps: Iterable[int], retention: Retention) -> dict[int, float]:
    """Read from the checkpoints themselves: a restart finds them there, and they go where their checkpoint goes. An evaluation
    that is due at the step of a save comes first, so that the save can tell of it."""
    found = {}
    for step in steps if retention.best else ():
        try:
            score = retention.score(manifest.read_meta(folder / str(step)))
        except (manifest.DamagedError, KeyError):
            continue  # without a score it is kept or not by its age
        if score is not None:
            found[step] = score
    return found


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def is_whole(path: Path) -> bool:
    """As far as names and sizes tell."""
    try:
        content = manifest.read(path)
    except manifest.DamagedError:
        return False
    return next(content.problems(path, content.files, digest_up_to=0), None) is None


def put_in_place(work: Path, final: Path, *, replace: bool) -> None:
    """Gives a finished checkpoint its name; with `replace`, one that has the name makes way. Raises OSError."""
    old = final.with_name(name_on_the_way(final.name, "replaced", uuid.uuid4().hex[:8]))
    if replace and final.exists():
        os.rename(final, old)
    os.rename(work, final)
    durable.sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def delete(path: Path) -> None:
    """Removes a checkpoint so that no part of it is ever taken for a checkpoint. Raises OSError."""
    going = path.with_name(name_on_the_way(path.name, "deleted", uuid.uuid4().hex[:8]))
    os.rename(path, going)
    shutil.rmtree(going)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
