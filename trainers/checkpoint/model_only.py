"""Checkpoints of the model alone, made from the files of a whole checkpoint whose other arrays are no longer needed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gangway.storage import json_text
from gangway.storage.store import Place
from trainers.checkpoint import manifest
from trainers.checkpoint.array_io import ArrayFiles

if TYPE_CHECKING:
    from trainers.checkpoint.ownership import Ownership

PART = "params"
"""The name of the parameters in a TrainState, and in the files."""
STATE = "model_state"
"""The same for the model's other state. A model that has none has no such files."""


def keep(arrays: ArrayFiles, checkpoint: Place, models: Place, step: int, owner: Ownership, name: str) -> None:
    """Copies the model in `checkpoint` to the folder `name` of `models`, and records it. Every byte is checked first, because the
    whole checkpoint is deleted afterwards. One host calls this; it needs memory for the whole model. What a process that died has
    left of it is in no record, and a later generation deletes it. Raises what went wrong; nothing is left then, if that can be
    told."""
    content = manifest.read(checkpoint)
    if problem := next(content.problems(checkpoint, content.files, digest_up_to=None), ""):
        raise manifest.DamagedError(problem)
    work, meta, recording = models / name, manifest.read_meta(checkpoint), False
    try:
        (work / manifest.STATE_FOLDER).make(around=True)
        arrays.copy_parts(checkpoint / manifest.STATE_FOLDER, work / manifest.STATE_FOLDER, parts_in(meta["shapes"]))
        (work / manifest.META_FILE).put(json_text.seal(meta_of(meta)).encode())
        files = {} if work.store.tags_last else {file: manifest.digest(work / file) for file in manifest.names_below(work)}
        digest = manifest.write(work, manifest.of_files(work, content.step, time.time(), files))
        models.settle()
        recording = True  # whether it was recorded cannot be told from here on, if that raises
        owner.commit(models, step, name, digest)
    except BaseException:
        if not recording:
            with suppress(OSError):
                owner.discard(work)
        raise


def meta_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the meta of a whole checkpoint, with the shapes and fingerprints of the model only, by their names in a state."""

    def of_model(named: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in named.items() if part_of(name)}

    return {**meta, **{name: of_model(meta[name]) for name in ("shapes", "fingerprints")}}


def part_of(name: str) -> str:
    """Returns PART or STATE, of which an array with this name in a state is one; empty for an array that is not of the model."""
    return next((part for part in (PART, STATE) if name.startswith(f".{part}[")), "")


def parts_in(shapes: Mapping[str, str]) -> list[str]:
    """Returns which of PART and STATE a checkpoint has. `shapes` are those of its meta."""
    return sorted({part_of(name) for name in shapes} - {""})
