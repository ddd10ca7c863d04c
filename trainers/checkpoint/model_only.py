"""Checkpoints of the parameters alone: what is left of one whose other arrays are not needed any more. Made of its files."""

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
"""Of the state: its name in a TrainState, and in the files."""


def keep(arrays: ArrayFiles, checkpoint: Path, final: Path, *, forbidden: Callable[[], str]) -> None:
    """Makes `final` of the parameters in `checkpoint`, at once or not at all. Every byte is checked first: the whole checkpoint
    goes afterwards. On one host, which needs memory for all parameters. Raises what went wrong, or what `forbidden` says."""
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
        if problem := forbidden():
            raise CommitError(problem)
        layout.put_in_place(work, final, replace=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def meta_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What the meta of a whole checkpoint says of its parameters, by their names in a state."""
    return {**meta, **{name: _below_part(meta[name]) for name in ("shapes", "fingerprints")}}


def of_parameters(shapes: Mapping[str, str]) -> dict[str, str]:
    """Of the shapes in a checkpoint's meta those of the parameters, named as in a tree {PART: parameters}."""
    return {f"['{PART}']{name.removeprefix(f'.{PART}')}": shape for name, shape in _below_part(shapes).items()}


def _below_part(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name.startswith(f".{PART}[")}
