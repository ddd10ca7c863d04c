"""Makes of a user's values what JSON can hold. Without JAX: arrays are known by what they can do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from typing import Any

MAX_VALUES = 10_000
"""Arrays with more values are no part of an event."""


def plain(value: Any) -> Any:
    """Returns the value as JSON can hold it: scalars of NumPy and JAX become numbers, paths text, tuples and sets lists. An array
    on a device is waited for. Raises TypeError for what is none of these, and what an array raises that cannot be read here."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {key if type(key) is str else str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return _of_scalar(value)


def number(value: Any) -> float | int:
    """Returns a number for one, or for an array with one value. Raises TypeError for anything else."""
    found = plain(value)
    if isinstance(found, list) and len(found) == 1:
        return number(found[0])
    if not isinstance(found, int | float):
        raise TypeError(f"{type(value).__name__} is no number")
    return int(found) if isinstance(found, bool) else found


def whole_number(value: Any) -> int:
    """Returns an integer for one, or for a number that is one. Raises TypeError for anything else."""
    found = number(value)
    if isinstance(found, float) and not found.is_integer():
        raise TypeError(f"{found} is no integer")
    return int(found)


def _of_scalar(value: Any) -> Any:
    if isinstance(value, Enum):
        return plain(value.value)
    # Subclasses, such as numpy.float64.
    if (kind := next((kind for kind in (str, int, float) if isinstance(value, kind)), None)) is not None:
        return kind(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else _of_array(value)


def _of_array(value: Any) -> Any:
    size, as_list = getattr(value, "size", None), getattr(value, "tolist", None)
    if not isinstance(size, int) or not callable(as_list):
        raise TypeError(f"{type(value).__name__} is nothing that JSON can hold")
    if size > MAX_VALUES:
        raise TypeError(f"{type(value).__name__} of {size} values: at most {MAX_VALUES} are passed on")
    found = as_list()
    # A scalar of another library, such as one of bfloat16.
    return float(found) if type(found) not in (bool, int, float, str, list) and hasattr(found, "__float__") else plain(found)
