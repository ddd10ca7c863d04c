"""Writes an export to a bucket: made in a temporary folder of this machine, and then put there, whole or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from gangway.errors import CheckpointError
from gangway.storage import ours
from gangway.storage.opening import place_of
from gangway.storage.store import Place
from trainers.checkpoint import manifest, mlflow_model, weights
from trainers.config.hf_files import CONFIG_FILE
from trainers.models.hf import peft_in

LAST = (CONFIG_FILE, peft_in.CONFIG, mlflow_model.FILE)
"""Put after all else of a folder: without it nobody takes the folder for a model."""


def export(out: str, write: Callable[[Path], None]) -> None:
    """Puts at the URL `out` what `write` makes of a path on this machine: a file, with the folder of its assets, or a folder. The
    machine needs room for it. Raises CheckpointError if there is something already, CheckpointUnavailableError if the storage
    does not take it, and what `write` raises."""
    with weights.reading(out):
        target = place_of(out)
        _check_new(target, beside := _assets_of(target))
    with tempfile.TemporaryDirectory(prefix="gangway-export-") as made:
        local = Path(made, target.name)
        write(local)
        with weights.reading(out):
            if local.is_dir():
                names = sorted(manifest.names_below(local), key=lambda name: (name in LAST, name))
                _put([(target / name, local / name) for name in names])
                return
            assets = local.with_name(beside.name)
            names = manifest.names_below(assets) if assets.is_dir() else []
            _put([*((beside / name, assets / name) for name in names), (target, local)])


def _assets_of(target: Place) -> Place:
    if not target.key:
        raise CheckpointError(f"{target} is a whole bucket: give a new name in it")
    return target.with_name(Path(target.name).with_suffix(".assets").name)


def _check_new(*places: Place) -> None:
    for place in places:
        if place.exists() or place.is_dir():
            raise CheckpointError(f"{place} exists already: give a new name")


def _put(files: Iterable[tuple[Place, Path]]) -> None:
    """Puts the files there in this order. If one fails, those before it are deleted again."""
    done: list[Place] = []
    try:
        for place, path in files:
            done.append(place)
            place.store.upload(place.key, path)
    except BaseException:
        with suppress(OSError):
            for place in done:
                ours.delete(place, ours.among("a part of an export that failed", done))
        raise
