"""A state saved and loaded by itself, not as a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainers.checkpoint import assets, layout, manifest, model_only
from trainers.checkpoint.array_io import ArrayFiles
from trainers.checkpoint.commit import Commit, CommitError, Exchange, begin
from trainers.checkpoint.validate import check_files, check_same_model, num_bytes_of, shapes
from trainers.errors import CheckpointError
from trainers.runtime import multihost
from trainers.runtime.multihost import first_problem
from trainers.step.state import TrainState


def save_to(path: str, state: TrainState, meta: dict[str, Any], build_assets: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Writes `state`, `meta` and, called on host 0, what `build_assets` gives to the new folder `path` and waits. All hosts must
    call this. Raises CheckpointError."""
    final, arrays, size = layout.local(path), ArrayFiles(), num_bytes_of(state)

    def obstacle() -> str:
        if final.exists():
            return "it exists already: give a new folder"
        final.parent.mkdir(parents=True, exist_ok=True)
        return layout.obstacle(final.parent, size)

    work, problem = begin(final, obstacle)
    if problem:
        raise CheckpointError(f"{path} cannot be written: {problem}")
    meta = {**meta, "format": manifest.FORMAT, "shapes": shapes(state)}

    def merge(folder: Path) -> None:
        arrays.merge(folder)
        assets.write(work, build_assets())

    save = Commit(work, final, meta, Exchange(work.name), lambda to: arrays.write(to, lambda: state, lambda: None), merge)
    with ThreadPoolExecutor(1) as thread:  # where the caller has an event loop, as in a notebook, Orbax's would be refused
        try:
            thread.submit(save.run).result()
        except CommitError as error:
            raise CheckpointError(f"{path} was not written: {error}") from error


def load_from(path: str, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """What `save_to` or a run's checkpoint wrote, with the shapes and shardings of `abstract`. All hosts must call this.

    Every file is checked against the manifest. Raises CheckpointError if any is not what was saved.
    """
    folder = layout.local(path)
    meta, problem = check_files(folder, digest_up_to=None)
    if problem := first_problem(multihost.all_hosts("checkpoint files", problem)):
        raise CheckpointError(f"{path} is not whole: {problem}")
    check_same_model(meta, abstract, path)
    return ArrayFiles().read(folder / manifest.STATE_FOLDER, abstract), meta


def load_model(path: str, abstract: Any) -> tuple[Any, dict[str, Any]]:
    """(parameters, meta) of what `save_to` wrote, of a run's checkpoint, or of a checkpoint in its folder `models`, which has the
    parameters alone. `abstract`: the parameters' shapes and shardings. All hosts must call this.

    Every file is checked against the manifest. Raises CheckpointError if any is not what was saved.
    """
    folder = layout.local(path)
    meta, problem = check_files(folder, digest_up_to=None)
    if problem := first_problem(multihost.all_hosts("model files", problem)):
        raise CheckpointError(f"{path} is not whole: {problem}")
    check_same_model({"shapes": model_only.of_parameters(meta["shapes"])}, {model_only.PART: abstract}, path)
    return ArrayFiles().read(folder / manifest.STATE_FOLDER, {model_only.PART: abstract}, partly=True)[model_only.PART], meta
