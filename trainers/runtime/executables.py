"""Compiled programs, kept from one generation of the gang to the next.

A restarted process would spend most of its recovery tracing, lowering and loading a program that it has run before. So each
machine keeps the executables it compiled, serialized, in a folder that the run's owner gives it: by the lowered program, as a
compile cache that outlives launches; and by what the program was made from (configuration, code, shapes), as a way past tracing.
All programs kept here run on the devices of all hosts, so that one host's executable is as good for any other of the same gang.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from trainers import runtime
from trainers.runtime import executable_files
from trainers.runtime.executable_files import UntrustedError
from trainers.runtime.load_attempts import MAX_CRASHES, Attempts

TOUCH_EVERY_S = 3600.0
"""A process says so often which executables it uses."""
COMPILER_PACKAGES = re.compile(r"(libtpu|jax_(cuda|rocm)|nvidia_)", re.IGNORECASE)
"""Installed packages whose versions are in what they compile."""

COMPILER_OPTIONS = (
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_level",
    "jax_memory_fitting_effort",
    "jax_compiler_enable_remat_pass",
    "jax_xla_profile_version",
)
"""JAX's settings that change what is compiled, and are not to be seen in the lowered program."""
COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


class ProgramStore:
    """Executables in `folder` (None: nothing is kept). `origin` names all that programs are made from but their arguments.

    The folder must be this user's, and writable by nobody else: loading an executable runs it. If it is not, that is noted, and
    nothing is kept. A program whose file cannot be loaded, whatever the reason, is compiled again. `max_bytes`: room for all.
    """

    def __init__(self, folder: Path | None, origin: Any, note: Callable[[str], None], max_bytes: float | None = None):
        self.note, self.max_bytes = note, max_bytes
        self.folder = self._usable(folder)
        self._attempts = Attempts(self.folder, jax.process_index(), note) if self.folder is not None else None
        self._origin = json.dumps(origin, sort_keys=True, default=str)
        self._loader = ThreadPoolExecutor(1, "programs")
        self._loading: dict[Path, Future[jax.stages.Compiled | None]] = {}
        self._refused: set[Path] = set()
        self._in_use: set[Path] = set()
        self._touched_s = time.monotonic()

    def load_ahead(self, name: str, args: Sequence[Any]) -> None:
        """Begins to load what `get` will be asked for, if it was kept: beside other work, such as the restoring of a state."""
        if self.folder is None:
            return
        path = self._target(self._known(name, args))
        if path is not None:
            self._loading[path] = self._loader.submit(self._load, path)

    def get(self, name: str, jitted: Any, args: Sequence[Any]) -> tuple[jax.stages.Compiled, str | None]:
        """(the program `jitted` compiled for `args`, the file that it was loaded from). `args` may be shapes with shardings."""
        if self.folder is None:
            return jitted.lower(*args).compile(), None
        known = self._known(name, args)
        path = self._target(known)
        loading = None if path is None else self._loading.pop(path, None)
        compiled = self._load(path) if loading is None else loading.result()
        if compiled is None or path is None:
            return self._compiled(name, known, jitted.lower(*args))
        self._in_use |= {known, path}
        return compiled, path.name

    def first_use(self, file: str, compiled: jax.stages.Compiled, args: Sequence[Any]) -> Any:
        """Runs for the first time what was loaded from `file`, without waiting for its end. If this process dies meanwhile, the
        next one knows what it was doing."""
        assert self._attempts is not None
        self._attempts.begin(file)
        try:
            outputs = compiled(*args)
        except jax.errors.JaxRuntimeError:
            self._attempts.failed(file)
            raise
        except BaseException:  # of the arguments: nothing has run
            self._attempts.end(file)
            raise
        threading.Thread(target=self._see_through, args=(file, outputs), name=f"first use of {file}", daemon=True).start()
        return outputs

    def still_used(self) -> None:
        """Called often: what this process uses is not deleted to make room for others."""
        if self._in_use and time.monotonic() - self._touched_s > TOUCH_EVERY_S:
            self._touched_s = time.monotonic()
            threading.Thread(target=executable_files.touch, args=([*self._in_use],), name="touch programs", daemon=True).start()

    def _see_through(self, file: str, outputs: Any) -> None:
        assert self._attempts is not None
        ended = self._attempts.worked if all(_is_sound(leaf) for leaf in jax.tree.leaves(outputs)) else self._attempts.failed
        ended(file)

    def _usable(self, folder: Path | None) -> Path | None:
        """None if nothing can be kept there."""
        if folder is None:
            return None
        try:
            executable_files.make_folder(folder)
        except (UntrustedError, OSError) as error:
            self.note(f"compiled programs are neither kept nor loaded: {error}")
            return None
        return folder

    def _known(self, name: str, args: Sequence[Any]) -> Path:
        """Says which executable it is."""
        assert self.folder is not None
        return self.folder / f"{name}-{_digest(self._origin, _signature(args), _libraries(), _compiled_for())}.json"

    def _target(self, known: Path) -> Path | None:
        """The executable that was made from the same before, if it is still there."""
        try:
            path = executable_files.read_pointer(known)
        except FileNotFoundError:
            return None
        except Exception as error:
            self._refuse(known, f"{type(error).__name__}: {error}")
            return None
        return path if path.exists() else None

    def _load(self, path: Path | None) -> jax.stages.Compiled | None:
        """None if it cannot be, for whatever reason: it is compiled then."""
        assert self._attempts is not None
        if path is None or path in self._refused:
            return None
        if self._attempts.barred(path.name):
            records = f"{self._attempts.records}/{path.name}.*"
            self._refuse(path, f"{MAX_CRASHES} processes crashed while it was tried; to try it again remove {records}")
            return None
        try:
            file = executable_files.read_executable(path)
            with self._attempts.of(path.name):
                return executable_files.load(file)
        except FileNotFoundError:
            pass
        except Exception as error:
            self._refuse(path, f"{type(error).__name__}: {error}")
        return None

    def _refuse(self, path: Path, why: str) -> None:
        """Notes it, once."""
        if path not in self._refused:
            self._refused.add(path)
            self.note(f"{path.name} could not be loaded ({why}): compiling again")

    def _compiled(self, name: str, known: Path, lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str | None]:
        path = known.with_name(
            f"{name}-{_digest(lowered.as_text(), _trees(lowered), _libraries(), _compiled_for(), _devices())}.xla"
        )
        loaded = self._load(path)
        compiled = loaded or self._compile(lowered)
        try:
            self._keep(known, path, None if loaded else compiled)
        except Exception as error:  # it runs all the same
            self.note(f"{path.name} is not kept for the next restart: {type(error).__name__}: {error}")
        return compiled, path.name if loaded else None

    def _compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        with without_compile_cache():
            return lowered.compile()

    def _keep(self, known: Path, path: Path, compiled: jax.stages.Compiled | None) -> None:
        """Writes both files; the pointer alone if the executable is there already (`compiled` is None)."""
        assert self._attempts is not None
        if self._attempts.barred(path.name):
            return
        executable_files.make_folder(path.parent)  # somebody may have emptied the cache
        if compiled is not None:
            executable_files.write_executable(path, compiled)
            executable_files.delete_old(path.parent, path, self.max_bytes)
        executable_files.write_pointer(known, path)
        self._in_use |= {known, path}


def _is_sound(output: jax.Array) -> bool:
    """Waits until it is computed. One that was given to the next step is another's."""
    try:
        output.block_until_ready()
    except Exception:
        return output.is_deleted()
    return True


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


def _trees(lowered: jax.stages.Lowered) -> str:
    """An executable takes and returns trees of the shapes that it was compiled with, which its program does not tell."""
    return f"{lowered.in_tree} {lowered.out_tree}"


def _signature(args: Sequence[Any]) -> str:
    return json.dumps(_shapes(tuple(args)))


@functools.cache
def _libraries() -> str:
    """Versions of all that makes programs, or that is in the trees they take."""
    modules = {name: getattr(sys.modules.get(name), "__version__", "") for name in ("jax", "jaxlib", "numpy", "flax", "optax")}
    packages = {entry for folder in sys.path for entry in _listed(folder) if COMPILER_PACKAGES.match(entry)}
    return repr((sys.version, modules, sorted(packages), jax.devices()[0].client.platform_version))


def _listed(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith(".dist-info")]
    except OSError:  # an archive, or nothing
        return []


def _compiled_for() -> str:
    """This kind of machine, and the compiler's settings: another machine that reads the same folder may be another kind."""
    kinds = sorted({(d.platform, d.device_kind) for d in jax.local_devices()})
    settings = [jax.config.values[name] for name in COMPILER_OPTIONS], [os.environ.get(name, "") for name in COMPILER_VARIABLES]
    return repr((kinds, settings, platform.machine(), _cpu_flags()))


def _devices() -> str:
    return repr([(d.platform, d.device_kind, d.id, d.process_index) for d in jax.devices()])


@functools.cache
def _cpu_flags() -> str:
    """The instructions that its CPU has."""
    try:
        with open("/proc/cpuinfo") as lines:  # no further than need be: there is a part for each core
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


class Program:
    """A jitted function, compiled once ahead of time. Other shapes compile it again, and that is said, with what changed."""

    def __init__(self, name: str, jitted: Any, store: ProgramStore, note: Callable[[str], None]):
        self.name, self.jitted, self.store, self.note = name, jitted, store, note
        self.compiled: jax.stages.Compiled | None = None
        self._untried_file: str | None = None
        """The file that `compiled` was loaded from, until it is used."""
        self.shapes: dict[str, str] = {}

    def load_ahead(self, *args: Any) -> None:
        """Optional, before `prepare`: a kept executable is loaded in the background."""
        self.store.load_ahead(self.name, args)

    def prepare(self, *args: Any) -> None:
        self.compiled, self._untried_file = self.store.get(self.name, self.jitted, args)
        self.shapes = _shapes(args)

    def __call__(self, *args: Any) -> Any:
        if self.compiled is None:
            self.prepare(*args)
        try:
            return self._run(args)
        except (TypeError, ValueError):
            # Raised before anything runs when arguments are not those compiled for; anything else is a real error.
            changed = [f"{k}: {self.shapes.get(k)} -> {v}" for k, v in _shapes(args).items() if self.shapes.get(k) != v]
            if not changed:
                raise
            self.note(f"{self.name} compiles again, because its arguments changed: {'; '.join(changed[:5])}")
            with runtime.current().within("compile"):  # else the watchdog would take it for a step
                self.prepare(*args)
            return self._run(args)

    def _run(self, args: Sequence[Any]) -> Any:
        assert self.compiled is not None
        if self._untried_file is None:
            self.store.still_used()
            return self.compiled(*args)
        file, self._untried_file = self._untried_file, None
        return self.store.first_use(file, self.compiled, args)


def _shapes(args: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)} {getattr(leaf, 'sharding', '')}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(args)
    }
