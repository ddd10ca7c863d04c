"""JAX's compile cache, with entries that are whole.

JAX writes an entry in place, and never again. What a process that was killed has left of one would be read, refused and compiled
anew at each start, for ever.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gangway.storage import durable, ours
from trainers.jax_internals import LRUCache, compilation_cache

_damaged: set[str] = set()
"""The keys of entries that could not be read: they are written again."""


def keep_whole() -> None:
    """Makes JAX write each entry under another name first, and write one that cannot be read again. Later calls do nothing."""
    if getattr(LRUCache.put, "is_whole", False):
        return
    LRUCache.put = _put(LRUCache.put)  # type: ignore[assignment,method-assign]
    compilation_cache.get_executable_and_time = _get(compilation_cache.get_executable_and_time)


def _put(original: Callable[[Any, str, bytes], None]) -> Callable[[Any, str, bytes], None]:
    @functools.wraps(original)
    def put(cache: Any, key: str, value: bytes) -> None:
        path = os.fspath(cache.path / f"{key}-cache") if key else ""
        # JAX makes room for an entry under a lock; one that is there takes the room that it had.
        if "://" in path or not path or (cache.eviction_enabled and key not in _damaged):
            original(cache, key, value)
        elif key in _damaged or not os.path.exists(path):
            _write(Path(path), value)
            _damaged.discard(key)

    put.is_whole = True  # type: ignore[attr-defined]
    return put


def _get(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get(cache_key: str, *arguments: Any, **named: Any) -> Any:
        try:
            return original(cache_key, *arguments, **named)
        except Exception:  # whatever is wrong with it: JAX compiles, and puts the entry there again
            _damaged.add(cache_key)
            return None, None

    return get


def _write(path: Path, value: bytes) -> None:
    # Not synced: after a power cut the entry cannot be read, and is written again.
    temporary = durable.beside(path)
    try:
        with durable.created(temporary) as file:
            file.write(value)
        os.replace(temporary, path)
    finally:
        ours.delete(temporary, ours.TEMPORARY)
