"""Saves and loads a state by itself, not as a checkpoint of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

from gangway.errors import CheckpointError, CheckpointUnavailableError
from gangway.storage import ours
from gangway.storage.documents import StorageError
from gangway.storage.opening import place_of
from gangway.storage.store import Place, StorageProblem
from trainers.checkpoint import assets, layout, manifest
from trainers.checkpoint.array_io import ArrayFiles, outages_told
from trainers.checkpoint.commit import Commit, CommitError, Exchange, begin
from trainers.checkpoint.validate import check_files, check_same_model, num_bytes_of, shapes
from trainers.runtime import multihost
from trainers.runtime.multihost import first_problem
from trainers.step.state import TrainState

NO_ASSETS: Mapping[str, Any] = MappingProxyType({})


def save_to(path: str, state: TrainState, meta: dict[str, Any], model_assets: Mapping[str, Any] = NO_ASSETS) -> None:
    """Writes `state`, `meta` and the assets to the new folder `path`, and waits. All hosts must call this. Raises
    CheckpointError."""
    final, arrays, size = layout.local(path), ArrayFiles(), num_bytes_of(state)
    around = place_of(final.parent)

    def obstacle() -> str:
        if os.path.lexists(final):
            return "it exists already: give a new folder"
        around.make(around=True)
        return layout.obstacle(around, size)

    try:
        work = begin(around, lambda token: layout.name_on_the_way(final.name, "saving", token), obstacle)
    except CommitError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    meta = {**meta, "format": manifest.FORMAT, "shapes": shapes(state)}

    def write(folder: Place) -> None:
        arrays.write(folder, lambda: state, lambda: None)

    def merge(folder: Place) -> None:
        arrays.merge(folder)
        # On host 0 alone, before the digests are taken: so the manifest covers the assets too.
        assets.write(work.path, model_assets)

    def put_in_place(name: str, digest: str) -> None:
        layout.put_in_place(work.path, final, replace=None)

    def discard(folder: Place) -> None:
        ours.delete_folder(folder, ours.ON_THE_WAY)

    save = Commit(work, lambda: meta, Exchange(work.name), write, merge, put_in_place, discard)
    with ThreadPoolExecutor(1) as thread:  # a thread that has an event loop, as in a notebook, cannot run Orbax's
        try:
            thread.submit(save.run).result()
        except CommitError as error:
            raise CheckpointError(f"{path} was not written: {error}") from error


def load_from(path: str, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """Loads what `save_to` or a run's checkpoint wrote, with the shapes and shardings of `abstract`. All hosts must call this.

    Every file is checked against the manifest. Raises CheckpointError if any is not what was saved.
    """
    folder = layout.named(path)
    meta = _checked_meta(folder, path)
    # Before the arrays are read: the error of Orbax would not say which arrays differ.
    check_same_model(meta, abstract, path)
    with outages_told(folder):
        return ArrayFiles().read(folder / manifest.STATE_FOLDER, abstract), meta


def _checked_meta(folder: Place, path: str) -> dict[str, Any]:
    """Returns the meta. Raises CheckpointError on all hosts if one of them finds a file that is not what was saved, and
    CheckpointUnavailableError if the storage does not answer one of them."""
    meta, problem, absent = {}, "", ""
    try:
        meta = check_files(folder, digest_up_to=None)
    except manifest.DamagedError as error:
        problem = str(error)
    except (StorageProblem, StorageError) as error:
        absent = str(error)
    answers = multihost.all_hosts("checkpoint files", {"problem": problem, "absent": absent})
    if absent := first_problem([answer["absent"] for answer in answers]):
        raise CheckpointUnavailableError(f"{path} cannot be read: {absent}")
    if problem := first_problem([answer["problem"] for answer in answers]):
        raise CheckpointError(f"{path} is not whole: {problem}")
    return meta
