"""Several requests to a storage at once: each takes a while in a bucket, and does not wait for the others. Without JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gangway.storage.store import Place

AT_ONCE = 16
S = TypeVar("S")
T = TypeVar("T")


def each(work: Callable[[S], T], items: Sequence[S], at_once: int = AT_ONCE) -> list[T]:
    """Returns what `work` returns for each item, in their order. Raises what one of them has raised."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(at_once, len(items)), "storage") as threads:
        return list(threads.map(work, items))


def contents(folder: Place, names: Sequence[str], some: int = 4 * AT_ONCE) -> Iterator[bytes]:
    """Yields the objects of these names in a folder, in their order; an object that was deleted meanwhile is empty. Only `some`
    are in memory. Raises OSError."""
    for begin in range(0, len(names), some):
        yield from each(lambda name: (folder / name).get() or b"", names[begin : begin + some])
