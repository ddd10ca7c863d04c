"""Compiled programs, kept from one generation of the gang to the next.

A restarted process would spend most of its recovery on tracing, lowering and loading programs that it has run before. So each
machine keeps the executables it compiled, serialized, in a folder. They are found in two ways: by the lowered program, as in a
compile cache that outlives launches; and by what the program was made from (configuration, code, shapes), which avoids tracing.
Users' code may change from launch to launch: only a program that has none of it is found so in another launch.
All programs kept here run on the devices of all hosts, so one host's executable serves every host of the same gang.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.experimental.compilation_cache import compilation_cache

from gangway.errors import UsageError
from trainers import runtime
from trainers.runtime import compile_cache, executable_files
from trainers.runtime.executable_files import UntrustedError
from trainers.runtime.load_attempts import MAX_CRASHES, Attempts

TOUCH_EVERY_S = 3600.0
"""How often a process marks the executables that it uses."""
COMPILER_PACKAGES = re.compile(r"(libtpu|jax_(cuda|rocm)|nvidia_|qwix-)", re.IGNORECASE)
"""Installed packages whose versions affect what is compiled. qwix makes the products of `model.fp8`, and a standby may not have
imported it."""

COMPILER_OPTIONS = (
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_level",
    "jax_memory_fitting_effort",
    "jax_compiler_enable_remat_pass",
    "jax_xla_profile_version",
)
"""JAX's settings that change what is compiled, and cannot be seen in the lowered program."""
COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
AFRESH: dict[str, str | bool] = {"xla_embed_ir_in_executable": False}
"""A compiler option at its default. JAX holds in memory what this process has compiled or read from the compile cache, and
returns that again. A program with an option of its own is another one."""


def lowered(jitted: Any, args: Sequence[Any]) -> Any:
    """Returns the program of `jitted` for `args`, not compiled yet. Raises UsageError if this platform has no product of float16
    that a model asks for."""
    try:
        return jitted.lower(*args)
    except ValueError as error:
        if "F16_F16_F32" not in str(error):
            raise
        raise UsageError(
            f"dtype = 'float16': the model calls jax.nn.dot_product_attention, whose product of float16 this platform lacks "
            f"({error}): expected bfloat16 or float32 here, or trainers.models.attention:dot_product in its place"
        ) from error


class ProgramStore:
    """Keeps executables in `folder` (None: nothing is kept). `origin` describes everything that programs are made from, except
    their arguments. `max_bytes` limits the size of all files.

    The folder must belong to this user, and be writable by nobody else: loading an executable runs it. Otherwise a note says
    so, and nothing is kept. A program whose file cannot be loaded, for whatever reason, is compiled again.
    """

    def __init__(self, folder: Path | None, origin: Any, note: Callable[[str], None], max_bytes: float | None = None):
        compile_cache.keep_whole()
        self.note, self.max_bytes = note, max_bytes
        self.folder = self._usable(folder)
        self._attempts = Attempts(self.folder, jax.process_index(), note) if self.folder is not None else None
        # `default=str`: the origin may hold types that JSON does not have; it is only hashed.
        self._origin = json.dumps(origin, sort_keys=True, default=str)
        self._loader = ThreadPoolExecutor(1, "programs")
        self._loading: dict[Path, Future[jax.stages.Compiled | None]] = {}
        self._refused: set[Path] = set()
        self._in_use: set[Path] = set()
        self._touched_s = time.monotonic()

    def load_ahead(self, name: str, args: Sequence[Any], code: str | None = None) -> None:
        """Begins to load what `get` will need, if it was kept, while other work continues, such as restoring a state."""
        if self.folder is None:
            return
        executable_files.trust_tree((tuple(args), {}))
        path = self._target(self._pointer_path(name, args, code))
        if path is not None:
            self._loading[path] = self._loader.submit(self._load, path)

    def get(
        self,
        name: str,
        jitted: Any,
        args: Sequence[Any],
        keep: Callable[[jax.stages.Compiled], bool] = lambda compiled: True,
        code: str | None = None,
    ) -> tuple[jax.stages.Compiled, str | None]:
        """Returns (the program `jitted` compiled for `args`, the name of the file that it was loaded from). `args` may be
        shapes with shardings. `keep` says whether one that had to be compiled is kept. `code`: as of `Program`."""
        if self.folder is None:
            return lowered(jitted, args).compile(), None
        executable_files.trust_tree((tuple(args), {}))
        pointer = self._pointer_path(name, args, code)
        path = self._target(pointer)
        # Taken out: a result that stayed here would keep a second reference to the program alive.
        loading = None if path is None else self._loading.pop(path, None)
        compiled = self._load(path) if loading is None else loading.result()
        if compiled is None or path is None:
            return self._compiled(name, pointer, lowered(jitted, args), keep)
        self._in_use |= {pointer, path}
        return compiled, path.name

    def first_use(self, file: str, compiled: jax.stages.Compiled, args: Sequence[Any]) -> Any:
        """Runs for the first time what was loaded from `file`, without waiting for its end. If this process dies meanwhile, the
        next one finds out what it was running."""
        assert self._attempts is not None
        # Before the call: a process that is killed in it leaves a record of what it was running.
        self._attempts.begin(file)
        try:
            outputs = compiled(*args)
        except jax.errors.JaxRuntimeError:
            self._attempts.failed(file)
            raise
        except BaseException:  # an error in the arguments: nothing has run
            self._attempts.end(file)
            raise
        # A thread, because only a wait shows how it ended, and the thread that trains must not wait for the device.
        threading.Thread(target=self._watch_first_use, args=(file, outputs), name=f"first use of {file}", daemon=True).start()
        return outputs

    def still_used(self) -> None:
        """Must be called often: marks the files that this process uses, so that they are not deleted to make room."""
        if self._in_use and time.monotonic() - self._touched_s > TOUCH_EVERY_S:
            self._touched_s = time.monotonic()
            threading.Thread(target=executable_files.touch, args=([*self._in_use],), name="touch programs", daemon=True).start()

    def _watch_first_use(self, file: str, outputs: Any) -> None:
        assert self._attempts is not None
        (self._attempts.worked if all(map(_is_sound, jax.tree.leaves(outputs))) else self._attempts.failed)(file)

    def _usable(self, folder: Path | None) -> Path | None:
        """Returns `folder`, or None if nothing can be kept there."""
        if folder is None:
            return None
        try:
            executable_files.make_folder(folder)
        except (UntrustedError, OSError) as error:
            self.note(f"compiled programs are neither kept nor loaded: {error}")
            return None
        return folder

    def _pointer_path(self, name: str, args: Sequence[Any], code: str | None) -> Path:
        """Returns the path of the pointer: a small file, found without tracing, that names the executable."""
        assert self.folder is not None
        origin = self._origin if code is None else f"{code} {jax.tree.structure(args)} {_devices()}"
        return self.folder / f"{name}-{_digest(origin, json.dumps(_shapes(tuple(args))), _libraries(), _compiled_for())}.json"

    def _target(self, pointer: Path) -> Path | None:
        """Returns the executable that was made from the same before, if it still exists."""
        try:
            path = executable_files.read_pointer(pointer)
        except FileNotFoundError:
            return None
        except Exception as error:
            self._refuse(pointer, f"{type(error).__name__}: {error}")
            return None
        # `delete_old` may have taken the executable and left its pointer.
        return path if path.exists() else None

    def _load(self, path: Path | None) -> jax.stages.Compiled | None:
        """Loads an executable. Returns None if that is not possible, for whatever reason; it is compiled then."""
        assert self._attempts is not None
        if path is None or path in self._refused:
            return None
        if self._attempts.barred(path.name):
            records = f"{self._attempts.records}/{path.name}.*"
            self._refuse(path, f"{MAX_CRASHES} processes crashed while it was tried; to try it again remove {records}")
            return None
        try:
            file = executable_files.read_executable(path)
            # Around the load alone: reading a file cannot crash the process, loading it runs native code.
            with self._attempts.of(path.name):
                return executable_files.load(file)
        except FileNotFoundError:
            pass
        # Whatever it is, compiling again is right: a cache must never end a run.
        except Exception as error:
            self._refuse(path, f"{type(error).__name__}: {error}")
        return None

    def _refuse(self, path: Path, why: str) -> None:
        """Reports, once, that a file is not loaded."""
        if path not in self._refused:
            self._refused.add(path)
            self.note(f"{path.name} could not be loaded ({why}): compiling again")

    def _compiled(
        self, name: str, pointer: Path, lowered: jax.stages.Lowered, keep: Callable[[jax.stages.Compiled], bool]
    ) -> tuple[jax.stages.Compiled, str | None]:
        # The name is a digest of all that the executable depends on: two programs never share a file.
        # The trees that it takes and returns are part of it, and cannot be seen in the lowered program.
        trees = str((lowered.in_tree, lowered.out_tree))
        path = pointer.with_name(f"{name}-{_digest(lowered.as_text(), trees, _libraries(), _compiled_for(), _devices())}.xla")
        loaded = self._load(path)
        compiled = loaded or compile_afresh(lowered)
        if not keep(compiled):
            return compiled, path.name if loaded else None
        try:
            self._keep(pointer, path, None if loaded else compiled)
        except Exception as error:  # the program runs all the same
            self.note(f"{path.name} is not kept for the next restart: {type(error).__name__}: {error}")
        return compiled, path.name if loaded else None

    def _keep(self, pointer: Path, path: Path, compiled: jax.stages.Compiled | None) -> None:
        """Writes both files; only the pointer if the executable exists already (`compiled` is None)."""
        assert self._attempts is not None
        # It would only be compiled, kept and refused again at every start.
        if self._attempts.barred(path.name):
            return
        executable_files.make_folder(path.parent)  # somebody may have emptied the cache
        if compiled is not None:
            executable_files.write_executable(path, compiled)
            # After the new one: its time is the clock by which the others are old.
            executable_files.delete_old(path.parent, path, self.max_bytes)
        # Last: a pointer never names an executable that is not there yet.
        executable_files.write_pointer(pointer, path)
        self._in_use |= {pointer, path}


def _is_sound(output: jax.Array) -> bool:
    """Waits until it is computed; returns False if that failed. An output that was donated to the next step counts as sound."""
    try:
        output.block_until_ready()
    except Exception:
        # Donated to the next step: its error, if there was one, is in the output of that step.
        return output.is_deleted()
    return True


def compile_afresh(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Returns an executable that can be kept. On a CPU, one that came out of JAX's compile cache serializes without an error into
    one that does not run ("Function ... not found")."""
    with _afresh:
        return _compiled_afresh(lowered)


_afresh = threading.Lock()
"""JAX's setting is that of the whole process, and snapshots compile beside the training."""


def _compiled_afresh(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    # JAX decides once whether it uses its cache: without a reset the setting would have no effect.
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        return lowered.compile(compiler_options=AFRESH if jax.default_backend() == "cpu" else None)
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


@functools.cache
def _libraries() -> str:
    """Returns the versions of everything that makes programs, or that is in the trees they take."""
    # Only what is imported: importing more would cost time, and cannot be in the trees.
    modules = {name: getattr(sys.modules.get(name), "__version__", "") for name in ("jax", "jaxlib", "numpy", "flax", "optax")}
    packages = {entry for folder in sys.path for entry in _listed(folder) if COMPILER_PACKAGES.match(entry)}
    return repr((sys.version, modules, sorted(packages), jax.devices()[0].client.platform_version))


def _listed(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.endswith(".dist-info")]
    except OSError:  # an archive, or nothing
        return []


def _compiled_for() -> str:
    """Returns the kind of this machine, and the compiler's settings: another machine that reads the same folder may be of
    another kind."""
    kinds = sorted({(d.platform, d.device_kind) for d in jax.local_devices()})
    settings = [jax.config.values[name] for name in COMPILER_OPTIONS], [os.environ.get(name, "") for name in COMPILER_VARIABLES]
    return repr((kinds, settings, platform.machine(), _cpu_flags()))


def _devices() -> str:
    # With ids and processes: an executable names its devices by their ids (`executable_files.load`).
    return repr([(d.platform, d.device_kind, d.id, d.process_index) for d in jax.devices()])


@functools.cache
def _cpu_flags() -> str:
    """Returns the instruction sets of the CPU."""
    try:
        with open("/proc/cpuinfo") as lines:  # the first line that matches will do: there is one for each core
            return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""


def _digest(*parts: str) -> str:
    # A zero byte between the parts: "ab" + "c" and "a" + "bc" must differ.
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


class Bound(Protocol):
    """Arguments that every call of a program has after its own, such as frozen weights."""

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Their shapes, with shardings; there before the arrays are."""

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All hosts must ask alike: they may have to be read first."""


class Program:
    """A jitted function, compiled once ahead of time. If it is called with other shapes it is compiled again, and a note says
    what changed. `bound` are arguments that it adds to those of each call. `code` is the text of all our code that the function
    runs, if it depends on nothing else but its arguments."""

    def __init__(
        self,
        name: str,
        jitted: Any,
        store: ProgramStore,
        note: Callable[[str], None],
        bound: Bound | None = None,
        code: str | None = None,
    ):
        self.name, self.jitted, self.store, self.note, self.bound, self.code = name, jitted, store, note, bound, code
        self.compiled: jax.stages.Compiled | None = None
        self._untried_file: str | None = None
        """The file that `compiled` was loaded from, until its first use."""
        self.shapes: dict[str, str] = {}

    def load_ahead(self, *args: Any) -> None:
        """Optional, before `prepare`: loads a kept executable in the background."""
        self.store.load_ahead(self.name, (*args, *(self.bound.shapes if self.bound else ())), self.code)

    def prepare(self, *args: Any) -> None:
        self.compile(args)

    def compile(self, args: tuple[Any, ...], keep: Callable[[jax.stages.Compiled], bool] = lambda compiled: True) -> None:
        """Does what `prepare` does. `keep`: as of `ProgramStore.get`."""
        shapes = (*args, *(self.bound.shapes if self.bound else ()))
        self.compiled, self._untried_file = self.store.get(self.name, self.jitted, shapes, keep, self.code)
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
            with runtime.current().within("compile"):  # otherwise the watchdog would take it for a step that hangs
                self.prepare(*args)
            return self._run(args)

    def _run(self, args: tuple[Any, ...]) -> Any:
        assert self.compiled is not None
        if self.bound is not None:
            args = (*args, *self.bound.arrays)
        if self._untried_file is None:
            self.store.still_used()
            return self.compiled(*args)
        # Cleared before the call: if it raises, a retry must not count as a first use again.
        file, self._untried_file = self._untried_file, None
        return self.store.first_use(file, self.compiled, args)


def _shapes(args: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)} {getattr(leaf, 'sharding', '')}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(args)
    }
