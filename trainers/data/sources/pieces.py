"""The data of `trainers.library`: any that a trainer takes, also a pair of arrays (x, y), or a function that returns it; and
arrays that other processes read from the run's folder."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gangway.config.section import PATH
from gangway.errors import DataMissingError, UsageError
from gangway.storage import durable
from trainers.config.arguments import load_object
from trainers.config.keywords import PiecesArguments
from trainers.data import kept
from trainers.data.sources.iterable import Columns, as_example, held_out_examples, random_access


def datasets(arguments: PiecesArguments) -> tuple[Any, Any]:
    """Returns the training data and the held-out data that `pieces` names: for `data.dataset`."""
    pieces = arguments.pieces
    if pieces.data is None:
        raise UsageError("pieces.data was given as an object to the training that made this run: only that program has it")
    return named(pieces.data), None if pieces.eval_data is None else named(pieces.eval_data)


def named(name: str) -> Any:
    """Returns the data of a function, or the columns in a folder."""
    return as_data(load_object(name)) if PATH.fullmatch(name) else read(Path(name))


def as_data(value: Any) -> Any:
    """Returns data as a trainer takes it."""
    data = value() if is_function(value) else value
    # Taken for a sequence it would be two examples, which nobody trains on.
    if isinstance(data, tuple) and len(data) == 2 and not any(isinstance(part, Mapping) for part in data):
        return Columns({"x": data[0], "y": data[1]}).columns
    return data


def check(data: Any, arguments: PiecesArguments) -> None:
    """Raises UsageError if nothing can be trained on `data`."""
    random_access(as_data(data), arguments, lambda text: None)


def check_held_out(data: Any) -> None:
    """Raises UsageError if nothing can be evaluated on `data`, which may be None."""
    if data is not None:
        held_out_examples(as_data(data), 0)


def is_function(value: Any) -> bool:
    return callable(value) and not any(hasattr(value, name) for name in ("__getitem__", "__iter__"))


GIVE_A_FUNCTION = "give a function, at the top level of a file, that returns the data"


def columns_of(value: Any) -> dict[str, np.ndarray]:
    """Returns data in memory as columns [N, ...] of numbers. Raises UsageError if it is no arrays."""
    data = as_data(value)
    if isinstance(data, list | tuple | np.ndarray):
        data = _stacked(data)
    if not isinstance(data, Mapping):
        raise UsageError(f"{type(data).__name__} cannot be written as arrays: {GIVE_A_FUNCTION}")
    columns = Columns(data).columns
    if wrong := [name for name, column in columns.items() if column.dtype.hasobject]:
        raise UsageError(f"{', '.join(wrong)} cannot be written as arrays, for they are no numbers: {GIVE_A_FUNCTION}")
    if wrong := [name for name in columns if not isinstance(name, str) or Path(name).name != name]:
        raise UsageError(f"columns {wrong} cannot be names of files: rename them")
    return columns


def _stacked(examples: Any) -> dict[str, np.ndarray]:
    if isinstance(examples, np.ndarray):
        return {"x": examples}
    rows = [as_example(example) for example in examples]
    try:
        return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in (rows[0] if rows else ())}
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"a list of examples of different shapes or names cannot be written as arrays ({error}): {GIVE_A_FUNCTION}"
        ) from error


def digest(columns: Mapping[str, np.ndarray]) -> str:
    """Returns a short name for what the columns hold."""
    found = hashlib.sha256()
    for name, column in sorted(columns.items()):
        found.update(f"{name} {column.dtype.str} {column.shape} ".encode())
        found.update(np.ascontiguousarray(column).data)
    return found.hexdigest()[:16]


def write(columns: Mapping[str, np.ndarray], folder: Path, *, private: bool = True) -> None:
    """Writes the columns to a new folder, all of them or none. Does nothing if the folder is there: it is named after what it
    holds. `private`: only this user can enter the folders that are made."""
    if folder.is_dir():
        return
    work = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
    # Not by the umask, which all threads of the user's program share.
    for path in reversed([parent for parent in (work, *work.parents) if not parent.exists()]):
        path.mkdir(0o700 if private else 0o777, exist_ok=path != work)
    try:
        with kept.whole(work, folder):
            for name, column in columns.items():
                with durable.replaced(work / f"{name}.npy") as file:
                    np.save(file, column, allow_pickle=False)
    except OSError:
        if not folder.is_dir():  # else another launch has just written the same
            raise


def read(folder: Path) -> dict[str, np.ndarray]:
    """Returns the columns in a folder, which stay on the disk until they are used. Raises DataMissingError."""
    files = sorted(folder.glob("*.npy"))
    if not files:
        raise DataMissingError(f"there are no arrays in {folder}: it was deleted, or this host does not share the run's storage")
    return {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in files}
