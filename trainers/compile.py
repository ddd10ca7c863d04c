"""Compiled programs, and keeping them from one generation of the gang to the next.

A restarted process would spend most of its recovery tracing, lowering and loading a program it has run before. So each host
keeps the executables it compiled, serialized, in a folder that the run's owner gives it, under a key of everything they depend
on.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable


class ProgramStore:
    """Executables in `folder` (None: nothing is kept). `key` names what they were compiled for: configuration, code, host,
    topology.

    The folder must be writable by this host's user only: loading an executable runs it.
    """

    def __init__(self, folder: Path | None, key: Any, note: Callable[[str], None]):
        self.folder, self.note = folder, note
        self._key = json.dumps(key, sort_keys=True, default=str)

    def get(self, name: str, jitted: Any, args: Sequence[Any]) -> jax.stages.Compiled:
        """The program `jitted` compiled for `args` (arrays, or shapes with shardings)."""
        if self.folder is None:
            return jitted.lower(*args).compile()
        path = self.folder / f"{name}-{self._digest(args)}.xla"
        return self._load(path) or self._compile(path, jitted, args)

    def _load(self, path: Path) -> jax.stages.Compiled | None:
        if not path.exists():
            return None
        try:
            return serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()))
        except (jax.errors.JaxRuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
            self.note(f"{path.name} could not be loaded ({type(error).__name__}: {error}): compiling again")
            return None

    def _compile(self, path: Path, jitted: Any, args: Sequence[Any]) -> jax.stages.Compiled:
        compiled = jitted.lower(*args).compile()
        try:
            payload = pickle.dumps(serialize_executable.serialize(compiled))
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(payload)
            temporary.replace(path)
        except (ValueError, NotImplementedError, OSError, jax.errors.JaxRuntimeError) as error:
            self.note(f"{path.name} is not kept for the next restart: {type(error).__name__}: {error}")
        return compiled

    def _digest(self, args: Sequence[Any]) -> str:
        leaves = [
            (jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype), str(getattr(leaf, "sharding", None)))
            for path, leaf in jax.tree_util.tree_leaves_with_path(tuple(args))
        ]
        return hashlib.sha256(repr((self._key, leaves)).encode()).hexdigest()[:24]


class Program:
    """A jitted function, compiled once ahead of time. Other shapes compile it again, and that is said, with what changed."""

    def __init__(self, name: str, jitted: Any, store: ProgramStore, note: Callable[[str], None]):
        self.name, self.jitted, self.store, self.note = name, jitted, store, note
        self.compiled: jax.stages.Compiled | None = None
        self.shapes: dict[str, str] = {}
        self.compile_s = 0.0

    def prepare(self, *args: Any) -> None:
        start = time.perf_counter()
        self.compiled = self.store.get(self.name, self.jitted, args)
        self.compile_s = time.perf_counter() - start
        self.shapes = _shapes(args)

    def __call__(self, *args: Any) -> Any:
        if self.compiled is None:
            self.prepare(*args)
        try:
            return self.compiled(*args)  # type: ignore[misc]
        except (TypeError, ValueError):
            # Raised before anything runs when arguments are not those compiled for; anything else is a real error.
            changed = [f"{k}: {self.shapes.get(k)} -> {v}" for k, v in _shapes(args).items() if self.shapes.get(k) != v]
            if not changed:
                raise
            self.note(f"{self.name} compiles again, because its arguments changed: {'; '.join(changed[:5])}")
            self.prepare(*args)
            return self.compiled(*args)  # type: ignore[misc]


def _shapes(args: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)} {getattr(leaf, 'sharding', '')}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(args)
    }
