"""Compiled programs, kept from one generation of the gang to the next.

A restarted process would spend most of its recovery tracing, lowering and loading a program that it has run before. So each
machine keeps the executables it compiled, serialized, in a folder that the run's owner gives it: by the lowered program, as a
compile cache that outlives launches; and by what the program was made from (configuration, code, shapes), as a way past tracing.
All programs kept here run on the devices of all hosts, so that one host's executable is as good for any other of the same gang.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import platform
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

KEPT_DAYS = 90
"""What nobody has loaded for so long is deleted when something new is kept."""
LOAD_ERRORS = (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError, OSError)


class ProgramStore:
    """Executables in `folder` (None: nothing is kept). `origin` names all that programs are made from but their arguments.

    The folder must be writable by this host's user only: loading an executable runs it.
    """

    def __init__(self, folder: Path | None, origin: Any, note: Callable[[str], None]):
        self.folder, self.note = folder, note
        self._origin = json.dumps(origin, sort_keys=True, default=str)
        self._loader = ThreadPoolExecutor(1, "programs")
        self._loading: dict[Path, Future[jax.stages.Compiled | None]] = {}

    def load_ahead(self, name: str, args: Sequence[Any]) -> None:
        """Begins to load what `get` will be asked for, if it was kept: beside other work, such as the restoring of a state."""
        if self.folder is None:
            return
        path = self._target(self._known(name, args))
        if path is not None and path.exists():
            self._loading[path] = self._loader.submit(self._load, path)

    def get(self, name: str, jitted: Any, args: Sequence[Any]) -> jax.stages.Compiled:
        """The program `jitted` compiled for `args` (arrays, or shapes with shardings)."""
        if self.folder is None:
            return jitted.lower(*args).compile()
        known = self._known(name, args)
        path = self._target(known)
        loading = None if path is None else self._loading.pop(path, None)
        compiled = self._load(path) if loading is None else loading.result()
        return compiled or self._compile(name, known, jitted.lower(*args))

    def _known(self, name: str, args: Sequence[Any]) -> Path:
        """Says which executable it is."""
        assert self.folder is not None
        return self.folder / f"{name}-{_digest(self._origin, _signature(args))}.json"

    def _target(self, known: Path) -> Path | None:
        """The executable that was made from the same before."""
        try:
            return known.parent / json.loads(_read(known))["executable"]
        except FileNotFoundError:
            return None

    def _load(self, path: Path | None) -> jax.stages.Compiled | None:
        if path is None or not path.exists():
            return None
        try:
            return _deserialize(_read(path))
        except LOAD_ERRORS as error:
            self.note(f"{path.name} could not be loaded ({type(error).__name__}: {error}): compiling again")
            return None

    def _compile(self, name: str, known: Path, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        path = known.parent / f"{name}-{_digest(lowered.as_text(), _trees(lowered), _this_machine())}.xla"
        compiled = self._load(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if compiled is None:
                with without_compile_cache():
                    compiled = lowered.compile()
                _write(path, _serialize(compiled))
                _delete_old(path.parent)
            _write(known, json.dumps({"executable": path.name}).encode())
        except (ValueError, NotImplementedError, OSError, jax.errors.JaxRuntimeError) as error:
            if compiled is None:
                raise
            self.note(f"{path.name} is not kept for the next restart: {type(error).__name__}: {error}")
        return compiled


@contextmanager
def without_compile_cache() -> Iterator[None]:
    """An executable that came out of JAX's compile cache serializes without complaint, on a CPU, into one that does not run
    ("Function ... not found"): what we keep must be compiled afresh."""
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def _serialize(compiled: jax.stages.Compiled) -> bytes:
    places = jax.tree.leaves(compiled.output_shardings)
    device_ids = [device.id for device in places[0]._device_assignment]
    return pickle.dumps((device_ids, serialize_executable.serialize(compiled)))


def _deserialize(payload: bytes) -> jax.stages.Compiled:
    device_ids, parts = pickle.loads(payload)
    devices = {device.id: device for device in jax.devices()}
    # Said explicitly: it would take all devices there are, also for a program that runs on some of them.
    executable, in_tree, out_tree = parts
    places = [devices[number] for number in device_ids]
    return serialize_executable.deserialize_and_load(executable, in_tree, out_tree, execution_devices=places)


def _read(path: Path) -> bytes:
    with suppress(OSError):
        os.utime(path)  # it is in use: see KEPT_DAYS
    return path.read_bytes()


def _write(path: Path, payload: bytes) -> None:
    temporary = path.with_suffix(f".{uuid.uuid4().hex}")  # machines may share the folder
    temporary.write_bytes(payload)
    temporary.replace(path)


def _delete_old(folder: Path) -> None:
    limit_s = time.time() - KEPT_DAYS * 24 * 3600
    for path in folder.iterdir():
        with suppress(OSError):  # another host of this machine was faster, or it is somebody else's
            if path.stat().st_mtime < limit_s:
                path.unlink()


def _trees(lowered: jax.stages.Lowered) -> str:
    """An executable takes and returns trees of the shapes that it was compiled with, which its program does not tell."""
    return f"{lowered.in_tree} {lowered.out_tree}"


def _signature(args: Sequence[Any]) -> str:
    return json.dumps(_shapes(tuple(args)))


def _this_machine() -> str:
    """What an executable depends on beside its program: versions, the devices, and the instructions of the CPU."""
    devices = [(d.platform, d.device_kind, d.id, d.process_index) for d in jax.devices()]
    flags = os.environ.get("XLA_FLAGS", "")
    return repr((jax.__version__, jaxlib.__version__, devices, flags, platform.machine(), _cpu_flags()))


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


class Program:
    """A jitted function, compiled once ahead of time. Other shapes compile it again, and that is said, with what changed."""

    def __init__(self, name: str, jitted: Any, store: ProgramStore, note: Callable[[str], None]):
        self.name, self.jitted, self.store, self.note = name, jitted, store, note
        self.compiled: jax.stages.Compiled | None = None
        self.shapes: dict[str, str] = {}

    def load_ahead(self, *args: Any) -> None:
        """Optional, before `prepare`: a kept executable is loaded in the background."""
        self.store.load_ahead(self.name, args)

    def prepare(self, *args: Any) -> None:
        self.compiled = self.store.get(self.name, self.jitted, args)
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
