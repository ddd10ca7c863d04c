"""JSON documents that carry their own digest, so that none is believed when a byte of it has changed."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def seal(document: dict[str, Any]) -> str:
    """JSON text that says its own digest."""
    plain = json.loads(json.dumps(document))  # as it will be read: keys are text, tuples are lists
    return json.dumps({**plain, "digest": _digest(plain)}, indent=1) + "\n"


def unseal(text: str) -> dict[str, Any]:
    """What was sealed. Raises ValueError if anything in it has changed."""
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    if document.pop("digest", None) != _digest(document):
        raise ValueError("its contents do not have the digest it says")
    return document


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
