"""Masks secrets in text that is shown or stored: the user information and the keys in URLs. Free of JAX."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"
_USER = re.compile(r"(?<=://)[^\s:/?#@'\"]*(?::[^\s@'\"]*)?@(?:[^\s/?#@'\"]*@)*")
"""Matches up to the host. A password may contain a slash, and even an `@`."""
_QUERY = re.compile(r"(?i)([?&][\w.-]*(?:password|passwd|pwd|secret|token|signature|credential|key)[\w.-]*=)[^&#\s'\"]+")


def masked(data: Any) -> Any:
    """Returns plain data, or a text, with the secrets in its URLs masked."""
    if isinstance(data, str):
        return _QUERY.sub(rf"\1{MASK}", _USER.sub(f"{MASK}@", data)) if "://" in data else data
    if isinstance(data, Mapping):
        return {key: masked(value) for key, value in data.items()}
    # Exactly lists and tuples: a named tuple cannot be built from an iterable.
    return type(data)(masked(item) for item in data) if type(data) in (list, tuple) else data


def masked_keys(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yields the paths of the URLs in plain data, such as `("data", "paths", 0)`, from which `masked` has taken something."""
    if isinstance(data, Mapping | list | tuple):
        for name, value in data.items() if isinstance(data, Mapping) else enumerate(data):
            yield from masked_keys(value, (*path, name))
    elif isinstance(data, str) and "://" in data and any(part in data for part in (f"://{MASK}@", f"={MASK}", f"/{MASK}")):
        yield path
