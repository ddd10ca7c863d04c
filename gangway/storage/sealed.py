"""JSON documents that contain their own digest, so that a changed byte is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from gangway.storage.not_finite import hidden, shown


def seal(document: dict[str, Any], indent: int | None = 1) -> str:
    """Returns the document as JSON text with its digest; `indent` None: in one line."""
    plain = hidden(json.loads(json.dumps(document)))  # as it will be read: keys are text, tuples are lists, NaN is null
    return json.dumps({**plain, "digest": _digest(plain)}, indent=indent, allow_nan=False) + "\n"


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
    return shown(document)


def is_whole(document: Mapping[str, Any]) -> bool:
    """Whether a sealed document, as it was read, has the digest of its contents."""
    # The digest covers everything but itself.
    contents = {key: value for key, value in document.items() if key != "digest"}
    return document.get("digest") == _digest(contents)


def _digest(document: Mapping[str, Any]) -> str:
    # Sorted: the order of the keys does not count.
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
