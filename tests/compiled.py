"""Programs that the tests have compiled, kept in `build/` between runs and shared by all that run at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jax._src.lru_cache import LRUCache

from tests.environment import BUILD

MOST_BYTES = 2 << 30
"""A folder that has grown larger is begun anew: each change of the code that is compiled leaves its old programs behind."""


def folder(kind: str) -> Path:
    """Returns the folder of JAX's compile cache for these tests."""
    made = BUILD / "compiled" / kind
    with suppress(FileNotFoundError):  # another run may begin it anew at the same time
        if sum(path.stat().st_size for path in made.rglob("*")) > MOST_BYTES:
            shutil.rmtree(made.rename(made.with_name(f"{kind}-{os.getpid()}-old")), ignore_errors=True)
    made.mkdir(parents=True, exist_ok=True)
    return made


@contextmanager
def written_whole() -> Iterator[None]:
    """Lets JAX write each program whole or not at all: another process may read it meanwhile, or this one be killed."""
    before = LRUCache.put

    def put(self: LRUCache, key: str, value: bytes) -> None:
        path = Path(str(self.path), f"{key}-cache")
        if not path.exists():
            part = path.with_name(f"{key}.{os.getpid()}.part")
            part.write_bytes(value)
            part.replace(path)

    LRUCache.put = put
    try:
        yield
    finally:
        LRUCache.put = before
