"""What belongs to a model beside its arrays: a tokenizer, a prompt format, labels. Files in a checkpoint's folder `assets`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.checkpoint import layout
from trainers.errors import CheckpointError, CheckpointUnavailableError, UsageError

FOLDER = "assets"
INDEX = "assets.json"
"""The kind of each asset by name."""


def write(checkpoint: Path, assets: Mapping[str, Any]) -> None:
    """Text, bytes, what JSON can hold, and objects with `save_pretrained(folder)` or `save(folder)`. Raises UsageError."""
    if not assets:
        return
    folder = checkpoint / FOLDER
    folder.mkdir()
    kinds = {name: _write_one(folder / _file_name(name), value) for name, value in assets.items()}
    (folder / INDEX).write_text(json.dumps(kinds, indent=2) + "\n")


def read(path: str) -> dict[str, Any]:
    """The assets in a checkpoint, by name: text, bytes and JSON as they were, of an object the folder that it saved itself to.
    Raises CheckpointError, or CheckpointUnavailableError where the storage does not answer."""
    folder = layout.local(path) / FOLDER
    try:
        kinds = json.loads((folder / INDEX).read_text()) if folder.is_dir() else {}
        return {name: _read_one(folder / name, kind) for name, kind in kinds.items()}
    except OSError as error:
        raise CheckpointUnavailableError(f"the assets in {folder} cannot be read: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"the assets in {folder} cannot be read: {error}") from error


def _write_one(path: Path, value: Any) -> str:
    save = getattr(value, "save_pretrained", None) or getattr(value, "save", None)
    if callable(save):
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


def _read_one(path: Path, kind: str) -> Any:
    if kind == "folder":
        return path
    content = path.read_bytes()
    if kind == "bytes":
        return content
    return content.decode() if kind == "text" else json.loads(content)


def _file_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or name == INDEX:
        raise UsageError(f"build_model_assets: {name!r}: expected letters, digits, '.', '_' and '-', and not {INDEX}")
    return name
