"""The stores that the contract is tested with, by name, each behind a proxy that can fail if it is asked for over a network."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from gangway.storage.local_store import LocalStore
from gangway.storage.object_store import Limits, ObjectStore
from gangway.storage.opening import open_store
from gangway.storage.store import Store
from tests.stores import emulators
from tests.stores.fault_proxy import FaultProxy

QUICK = Limits(request_s=5.0, patience_s=10.0, first_wait_s=0.01, longest_wait_s=0.1)
NETWORKED = {"s3": emulators.moto, "gs": emulators.fake_gcs, "weed": emulators.seaweed}
SCHEMES = {"weed": "s3"}
"""Of those whose name is not their scheme."""


class Bucket(NamedTuple):
    """A bucket that a test may write anything to, below a prefix of its own."""

    scheme: str
    address: str
    """Of the store itself: what is asked there passes no proxy."""
    proxy: FaultProxy
    through: str
    """The address of the proxy."""

    def url(self) -> str:
        return f"{self.scheme}://{emulators.BUCKET}/{uuid.uuid4().hex[:8]}"

    def environment(self, *, direct: bool = False) -> dict[str, str]:
        return emulators.environment(self.scheme, self.address if direct else self.through)

    def set(self, monkeypatch: pytest.MonkeyPatch, *, direct: bool = False) -> None:
        """Gives this process what clients need, and clears the faults and the counts."""
        self.proxy.faults.clear()
        self.proxy.counted()
        for name, value in self.environment(direct=direct).items():
            monkeypatch.setenv(name, value)


@contextmanager
def buckets() -> Iterator[dict[str, Bucket]]:
    """Yields a bucket of each of NETWORKED; each server starts when it is asked for first."""
    with ExitStack() as stack:
        yield _Started(stack)


class _Started(dict[str, Bucket]):
    def __init__(self, stack: ExitStack):
        super().__init__()
        self._stack = stack

    def __missing__(self, kind: str) -> Bucket:
        address = self._stack.enter_context(NETWORKED[kind]())
        proxy = FaultProxy(address)
        self[kind] = Bucket(SCHEMES.get(kind, kind), address, proxy, self._stack.enter_context(proxy.serving()))
        return self[kind]


def memory_store(limits: Limits = QUICK) -> ObjectStore:
    from obstore.store import MemoryStore

    return ObjectStore("memory://tests", MemoryStore(), uuid.uuid4().hex[:8], limits)


def store_of(
    kind: str, found: dict[str, Bucket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: Limits = QUICK
) -> Store:
    """Returns an empty store: `local`, `memory`, or one of NETWORKED."""
    if kind == "local":
        return LocalStore(tmp_path / "store")
    if kind == "memory":
        return memory_store(limits)
    found[kind].set(monkeypatch)
    return open_store(found[kind].url(), limits)
