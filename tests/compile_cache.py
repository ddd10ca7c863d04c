"""JAX's compile cache of the tests in `tests/unit`: one folder in `build/`, for all workers and for later runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from tests.environment import BUILD
from trainers.runtime.compile_cache import keep_whole

MAX_BYTES = 2 * 1024**3


@contextmanager
def compile_cache() -> Iterator[None]:
    """Compiles quickly what the tests run, and keeps all of it."""
    # `benchmarks.mutants` names a folder of its own.
    folder = Path(os.environ.get("TESTS_COMPILE_CACHE") or BUILD / "compiled")
    folder.mkdir(parents=True, exist_ok=True)
    delete_oldest(folder, MAX_BYTES)
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # Most time of a test goes into compiling, and its steps are small.
        "jax_disable_most_optimizations": True,
    }
    before = {name: jax.config.values[name] for name in settings}
    keep_whole()  # another worker could read half of an entry
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def delete_oldest(folder: Path, max_bytes: int) -> None:
    """Deletes the files that were written first, until the others are no larger than `max_bytes` together."""
    total_bytes = 0
    for path in sorted(folder.iterdir(), key=_written_at, reverse=True):
        with suppress(FileNotFoundError):  # another worker was faster
            total_bytes += path.stat().st_size
            if total_bytes > max_bytes:
                path.unlink()


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
