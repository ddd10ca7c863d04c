"""Checkpoints of the parameters alone, made from the files of a whole checkpoint whose other arrays are no longer needed."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainers.checkpoint import layout, manifest
from trainers.checkpoint.array_io import ArrayFiles
from trainers.checkpoint.commit import CommitError
from trainers.storage import durable, sealed

PART = "params"
"""The name of the parameters in a TrainState, and in the files."""


def keep(arrays: ArrayFiles, checkpoint: Path, final: Path, *, forbidden: Callable[[], str]) -> None:
    """Creates `final` from the parameters in `checkpoint`, atomically. Every byte is checked first, because the whole
    checkpoint is deleted afterwards. One host calls this; it needs memory for all parameters. Raises what went wrong, or what
    `forbidden` returns."""
    content = manifest.read(checkpoint)
    if problem := next(content.problems(checkpoint, content.files, digest_up_to=None), ""):
        raise manifest.DamagedError(problem)
    work = final.with_name(layout.name_on_the_way(final.name, "saving", uuid.uuid4().hex[:8]))
    try:
        (work / manifest.STATE_FOLDER).mkdir(parents=True)
        arrays.copy_part(checkpoint / manifest.STATE_FOLDER, work / manifest.STATE_FOLDER, PART)
        durable.write(work / manifest.META_FILE, sealed.seal(meta_of(manifest.read_meta(checkpoint))))
        files = {name: manifest.digest(work / name) for name in manifest.names_below(work)}
        manifest.write(work, manifest.Manifest(content.step, time.time(), files))
        # At the last moment: copying may have taken long, and another driver may have taken over meanwhile.
        if problem := forbidden():
            raise CommitError(problem)
        # What is there already is damaged, or of an abandoned course: a whole one is not made again.
        layout.put_in_place(work, final, replace=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def meta_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the meta of a whole checkpoint, with the shapes and fingerprints of the parameters only, by their names in a
    state."""
    return {**meta, **{name: _below_part(meta[name]) for name in ("shapes", "fingerprints")}}


def of_parameters(shapes: Mapping[str, str]) -> dict[str, str]:
    """Returns the shapes of the parameters from a checkpoint's meta, named as in a tree {PART: parameters}."""
    return {f"['{PART}']{name.removeprefix(f'.{PART}')}": shape for name, shape in _below_part(shapes).items()}


def _below_part(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name.startswith(f".{PART}[")}
