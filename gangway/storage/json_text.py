"""The text of JSON documents, for any parser: with their own digest, so that a changed byte is noticed, and without the numbers
that JSON does not have. NaN and the infinities are null, and a *sibling* says which it was:

    {"loss": NaN, "scores": [1.0, inf]}
    {"loss": null, "loss_not_finite": "nan", "scores": [1.0, null], "scores_not_finite": {"1": "inf"}}
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

SUFFIX = "_not_finite"
NAMES = ("nan", "inf", "-inf")
Marks = str | dict[str, Any]
"""The name of a number that is not finite; or, by their places, those of a list."""


def dumps(data: Any, indent: int | None = None) -> str:
    """Returns the data as JSON text of any parser's. Raises TypeError or ValueError like `json.dumps`."""
    return json.dumps(hide_not_finite(data), indent=indent, allow_nan=False)


def hide_not_finite(data: Any) -> Any:
    """Returns the data with null for numbers that are not finite, and their siblings. An item of a list that is no value of a
    mapping has none."""
    if isinstance(data, Mapping):
        found: dict[Any, Any] = {}
        for name, value in data.items():
            found[name] = hide_not_finite(value)
            if marks := _marks(value):
                found[f"{name}{SUFFIX}"] = marks
        return found
    if isinstance(data, list | tuple):
        return [hide_not_finite(item) for item in data]
    return None if _name(data) else data


def show_not_finite(data: Any) -> Any:
    """Returns what `hidden` was given, with lists for tuples."""
    if isinstance(data, Mapping):
        marks = {name: data[f"{name}{SUFFIX}"] for name, value in data.items() if _is_mark(data.get(f"{name}{SUFFIX}"), value)}
        siblings = {f"{name}{SUFFIX}" for name in marks}
        return {name: _restored(value, marks.get(name)) for name, value in data.items() if name not in siblings}
    return [show_not_finite(item) for item in data] if isinstance(data, list) else data


def _name(value: Any) -> str:
    """Returns the name of a number that is not finite; empty for all else."""
    return "" if not isinstance(value, float) or math.isfinite(value) else str(float(value))


def _marks(value: Any) -> Marks:
    if isinstance(value, list | tuple):
        return {str(place): marks for place, item in enumerate(value) if (marks := _marks(item))}
    return _name(value)


def _is_mark(marks: Any, value: Any) -> bool:
    """Whether `marks` is a sibling of the value: a user's own key may end like one."""
    if isinstance(value, list):
        places = marks if isinstance(marks, Mapping) else {}
        items = {str(place): item for place, item in enumerate(value)}
        return bool(places) and all(place in items and _is_mark(inner, items[place]) for place, inner in places.items())
    return value is None and isinstance(marks, str) and marks in NAMES


def _restored(value: Any, marks: Marks | None) -> Any:
    if marks is None:
        return show_not_finite(value)
    if isinstance(marks, str):
        return float(marks)
    return [_restored(item, marks.get(str(place))) for place, item in enumerate(value)]


def seal(document: dict[str, Any], indent: int | None = 1) -> str:
    """Returns the document as JSON text with its digest; `indent` None: in one line."""
    plain = hide_not_finite(json.loads(json.dumps(document)))  # as it will be read: keys are text, tuples are lists, NaN is null
    return json.dumps({**plain, "digest": digest_of(plain)}, indent=indent, allow_nan=False) + "\n"


def unseal(text: str) -> dict[str, Any]:
    """Returns the document that was sealed. Raises ValueError if anything in it has changed."""
    try:
        document = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    if not is_whole(document):
        raise ValueError("its contents do not have the digest it says")
    del document["digest"]
    return show_not_finite(document)


def is_whole(document: Mapping[str, Any]) -> bool:
    """Whether a sealed document, as it was read, has the digest of its contents."""
    # The digest covers everything but itself.
    contents = {key: value for key, value in document.items() if key != "digest"}
    return document.get("digest") == digest_of(contents)


def digest_of(document: Mapping[str, Any]) -> str:
    # Sorted: the order of the keys does not count.
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
