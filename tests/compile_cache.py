"""JAX's compile cache of the tests in `tests/unit`: one folder for all workers, for later runs, and for other clones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.environment import BUILD, CACHE

MAX_BYTES = 2 * 1024**3


@contextmanager
def compile_cache() -> Iterator[None]:
    """Keeps all of what the tests compile."""
    import jax

    from trainers.runtime.compile_cache import keep_whole

    # `benchmarks.mutants` names a folder of its own.
    folder = Path(os.environ.get("TESTS_COMPILE_CACHE") or kept("compiled"))
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    keep_whole()  # another worker could read half of an entry
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def kept(name: str) -> Path:
    """Returns a folder of this name that later runs have too."""
    return Path(os.environ.get(CACHE) or BUILD) / name


def delete_oldest(folder: Path, max_bytes: int) -> None:
    """Deletes the files that were written first, until the others are no larger than `max_bytes` together."""
    total_bytes = 0
    files = (path for path in folder.rglob("*") if not path.is_dir())
    for path in sorted(files, key=_written_at, reverse=True):
        with suppress(FileNotFoundError):  # another worker was faster
            total_bytes += path.stat().st_size
            if total_bytes > max_bytes:
                path.unlink()


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
