"""The assets of a model, beside its arrays: a tokenizer, a prompt format, labels. They are files in a folder `assets`: of a
run, or of what `save_pretrained` wrote."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypedDict

from gangway.errors import CheckpointError, CheckpointUnavailableError, UsageError
from gangway.storage import documents, durable, ours
from gangway.storage.documents import DocumentKind, StorageError
from gangway.storage.opening import place_of
from gangway.storage.store import Place
from trainers.checkpoint import layout, manifest, model_files

FOLDER = "assets"
INDEX = "assets.json"
"""The kind of each asset by name."""
ASSETS = ours.with_any_of("the assets of a model", INDEX)


class _Index(TypedDict):
    assets: dict[str, Literal["text", "bytes", "json", "folder"]]


INDEX_KIND = DocumentKind(INDEX, _Index, "the assets are not read")


def named(assets: Mapping[str, Any] | Sequence[Any] | None) -> dict[str, Any]:
    """Returns what `build_model_assets` has returned, by name. Of a list, an object that saves itself is called like its class,
    and anything else like its place. Raises UsageError for a name that cannot be one of a file."""
    if assets is None:
        return {}
    if isinstance(assets, Mapping):
        result = dict(assets)
    elif isinstance(assets, list | tuple):
        result = {}
        for place, asset in enumerate(assets):
            name = str(place) if _saver_of(asset) is None else type(asset).__name__
            result[f"{name}-{place}" if name in result else name] = asset
    else:
        raise UsageError(f"build_model_assets returned {type(assets).__name__}: expected a dict of assets by name, or a list")
    for name in result:
        _check_name(name)
    return result


def write(checkpoint: Path, assets: Mapping[str, Any]) -> None:
    """Writes the assets to the folder `assets` of a checkpoint, on host 0: text, bytes, JSON values, and objects with
    `save_pretrained(folder)` or `save(folder)`. Raises UsageError."""
    if assets:
        # Before the digests are taken: the manifest covers these files too.
        _write_to(checkpoint / FOLDER, assets)


def keep(run_folder: str, assets: Mapping[str, Any]) -> None:
    """Writes the assets to the folder `assets` of a run, on host 0, atomically; the same ones are not written again. Raises
    UsageError, or OSError."""
    if not assets:
        return
    place = place_of(run_folder)
    if not place.store.is_local:
        _upload(place / FOLDER, assets)
        return
    folder = place.path
    folder.mkdir(parents=True, exist_ok=True)
    for left in (*folder.glob(f"{FOLDER}.saving-*"), *folder.glob(f"{FOLDER}.replaced-*")):
        with suppress(OSError):  # by a process that died
            ours.delete(left, ours.ON_THE_WAY)
    work, final = folder / layout.name_on_the_way(FOLDER, "saving", uuid.uuid4().hex[:8]), folder / FOLDER
    try:
        _write_to(work, assets)
        if _contents(work) != _contents(final):
            for name in _names(work):
                # Otherwise a power cut could leave the new names on empty files.
                with open(work / name, "rb") as file:
                    durable.sync(file.fileno())
            layout.put_in_place(work, final, replace=ASSETS)
    finally:
        with suppress(OSError):
            ours.delete(work, ours.ON_THE_WAY)


def _upload(place: Place, assets: Mapping[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="gangway-assets-") as made:
        work = Path(made, FOLDER)
        _write_to(work, assets)
        # The index last: it is what is read first.
        for name in sorted(_names(work), key=lambda name: name == INDEX):
            (place / name).store.upload((place / name).key, work / name)


def folder_of(checkpoint: Place) -> Path | None:
    """Returns the folder with the assets of a checkpoint: its own, or that of its run; None if it has none. Of a bucket it is a
    copy (`model_files.here`). Raises StorageProblem of a bucket that does not answer."""
    is_in_run = checkpoint.store.is_local or checkpoint.key.count("/") > 1
    for folder in (checkpoint, *((checkpoint.parent.parent,) if is_in_run else ())):
        index = folder / FOLDER / INDEX
        if index.exists() or index.is_dir():  # a folder in its place is damage, which reading it shows
            return model_files.here(folder / FOLDER)
    return None


def read(path: str) -> dict[str, Any]:
    """Returns the assets in what `save_pretrained` wrote, in a run's folder or in a run's checkpoint, by name: text, bytes and
    JSON values as they were; for an object, the folder that it saved itself to. Raises CheckpointError, or
    CheckpointUnavailableError if the storage does not answer."""
    folder = _found(layout.named(path))
    return {} if folder is None else _read(folder)


def _found(checkpoint: Place) -> Path | None:
    try:
        return folder_of(checkpoint)
    except OSError as error:
        raise CheckpointUnavailableError(f"the assets of {checkpoint} cannot be read: {error}") from error


def _read(folder: Path) -> dict[str, Any]:
    """Returns the assets in a folder of this machine."""
    try:
        return {name: _read_asset(folder / name, kind) for name, kind in _kinds(folder / INDEX).items()}
    except OSError as error:
        raise CheckpointUnavailableError(f"the assets in {folder} cannot be read: {error}") from error
    except (ValueError, StorageError) as error:
        raise CheckpointError(f"the assets in {folder} cannot be read: {error}") from error


def copy_into(folder: Path, checkpoint: Place) -> None:
    """Copies the assets of a checkpoint, if it has some, to the folder of an export: what an object has saved lies there among
    the other files. Raises what `read` raises, or OSError."""
    if (kept := _found(checkpoint)) is None:
        return
    for name in _read(kept):
        if (kept / name).is_dir():
            # Several objects may bring files: all go to the same folder.
            for file in _names(kept / name):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                # Not `copytree`: the export has the permissions that new files have, not those of the run's folder.
                shutil.copyfile(kept / name / file, folder / file)
        else:
            shutil.copyfile(kept / name, folder / name)


def _kinds(path: Path) -> dict[str, str]:
    """Returns the kind of each asset by name. Raises StorageError, UsageError or OSError."""
    content = documents.read_bytes(path)
    if content is None:
        raise FileNotFoundError(f"there is no {path}")
    document = documents.parse(content, path)
    # Of a program before there were formats.
    is_old = isinstance(document, dict) and document and "format" not in document
    kinds = INDEX_KIND.checked({"assets": document} if is_old else document, path)["assets"]
    for name in kinds:
        _check_name(name)  # it becomes a path
    return kinds


def _names(folder: Path) -> list[str]:
    """Returns the names of the files below a folder of this machine."""
    return manifest.names_below(place_of(folder))


def _contents(folder: Path) -> dict[str, manifest.Entry]:
    return {name: manifest.digest(place_of(folder / name)) for name in _names(folder)}


def _write_to(folder: Path, assets: Mapping[str, Any]) -> None:
    folder.mkdir()
    kinds = {name: _write_asset(folder / name, value) for name, value in assets.items()}
    (folder / INDEX).write_text(INDEX_KIND.text({"assets": kinds}))


def _saver_of(value: Any) -> Any:
    save = getattr(value, "save_pretrained", None) or getattr(value, "save", None)
    return save if callable(save) else None


def _write_asset(path: Path, value: Any) -> str:
    save = _saver_of(value)
    if save is not None:
        path.mkdir()
        save(str(path))
        return "folder"
    if isinstance(value, str | bytes):
        path.write_bytes(value.encode() if isinstance(value, str) else value)
        return "text" if isinstance(value, str) else "bytes"
    try:
        path.write_text(json.dumps(value))
    except TypeError:
        raise UsageError(
            f"build_model_assets: {path.name} is a {type(value).__name__}: expected text, bytes, what JSON can hold, or an "
            "object with save_pretrained(folder) or save(folder)"
        ) from None
    return "json"


def _read_asset(path: Path, kind: str) -> Any:
    if kind == "folder":
        return path
    content = path.read_bytes()
    if kind == "bytes":
        return content
    return content.decode() if kind == "text" else json.loads(content)


def _check_name(name: str) -> None:
    # Names become file names: without a separator, and with no dot in front, none lies outside the folder.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or name == INDEX:
        raise UsageError(f"build_model_assets: {name!r}: expected letters, digits, '.', '_' and '-', and not {INDEX}")
