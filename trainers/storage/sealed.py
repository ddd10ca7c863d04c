"""JSON documents that contain their own digest, so that a changed byte is noticed."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def seal(document: dict[str, Any]) -> str:
    """Returns the document as JSON text with its digest."""
    plain = json.loads(json.dumps(document))  # as it will be read: keys are text, tuples are lists
    return json.dumps({**plain, "digest": _digest(plain)}, indent=1) + "\n"


def unseal(text: str) -> dict[str, Any]:
    """Returns the document that was sealed. Raises ValueError if anything in it has changed."""
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    # Taken out first: the digest covers everything but itself.
    if document.pop("digest", None) != _digest(document):
        raise ValueError("its contents do not have the digest it says")
    return document


def _digest(document: dict[str, Any]) -> str:
    # Sorted: the order of the keys does not count.
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
