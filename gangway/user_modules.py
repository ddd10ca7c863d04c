"""Code of the user's: what of it a process may import, and what a module may not do as it is imported. Free of JAX."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import thread as futures
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

from gangway.config.importable import of_a_copy
from gangway.config.section import PATH, did_you_mean, require
from gangway.errors import ModuleError, user_frame
from gangway.storage.row import BEST

TAKEN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OF_JAX = ("JAX_*", "XLA_*", "CUDA_VISIBLE_DEVICES")
"""Variables that JAX reads, and does not set as it is imported."""
OWN = "trainers"
"""The package whose classes and functions the documents of any checkpoint may name."""
_one_at_a_time = threading.RLock()
_refused: dict[str, str] = {}
"""Why each module was refused: what it imports is in this process, and would not be run again."""


class UntrustedCodeError(ValueError):
    """Data names code that nobody has allowed."""


@dataclass(frozen=True)
class _Trust:
    source: Path
    """The folder or file whose documents name the code."""
    allowed: frozenset[str]
    named: list[str] = field(default_factory=list)
    """What the documents name, as far as they were read."""


_trust: ContextVar[_Trust | None] = ContextVar("trust", default=None)


@contextmanager
def named_by_data(source: str, allowed: Collection[str] = ()) -> Iterator[None]:
    """Within this block, the names of code come from the documents at `source`, which may be anybody's: `load_object` lets
    gangway's own pass, and those that are `allowed`, by their exact names. No module is imported from inside `source` itself, nor
    from the run that it is a checkpoint of."""
    is_best = os.path.basename(source) == BEST and not os.path.isdir(source)
    folder = Path(os.path.realpath(os.path.dirname(source) if is_best else source))
    folder = folder.parents[1] if folder.parent.name in ("checkpoints", "models") else folder
    before = list(sys.path)
    # What is imported from here on could have the name of any module.
    sys.path[:] = [entry for entry in sys.path if not _inside(entry or os.getcwd(), folder)]
    token = _trust.set(_Trust(folder, frozenset(allowed)))
    try:
        yield
    finally:
        _trust.reset(token)
        sys.path[:] = before


def note_names(document: Any) -> None:
    """Notes the names of code in a document of data, so that an error has all of them at once."""
    if isinstance(document, Mapping | list):
        for value in document.values() if isinstance(document, Mapping) else document:
            note_names(value)
    elif isinstance(document, str) and PATH.fullmatch(document) and (trust := _trust.get()) is not None:
        trust.named.append(document)


def _places(module: str) -> list[str]:
    """Returns the files and folders that a module is, or would be, imported from. Its parents are imported."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return []  # the import says what is wrong
    if spec is None:
        return []
    return [*([spec.origin] if spec.has_location and spec.origin else []), *(spec.submodule_search_locations or ())]


def _inside(path: str, folder: Path) -> bool:
    found = Path(os.path.realpath(path))
    return found == folder or folder in found.parents


def load_object(path: str) -> Any:
    """Returns the object named `package.module:attribute`. Raises ValueError that says which part was not found, or that data
    names it and nobody has allowed it."""
    module_name, _, attribute = path.partition(":")
    require(PATH.fullmatch(path) is not None, f"{path!r}: expected package.module:Name")
    if (trust := _trust.get()) is not None:
        _check(path, trust)
    if module_name in _refused:
        raise ModuleError(_refused[module_name])
    try:
        module = importlib.import_module(module_name) if module_name in sys.modules else imported(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path!r}: no module named {error.name!r} (searched from the working directory and PYTHONPATH){of_a_copy()}"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"{path!r}: module {module_name} has no {attribute!r}{did_you_mean(attribute, vars(module))}")
    value = getattr(module, attribute)
    # One of gangway's modules may only have imported it.
    if trust is not None and path.startswith(f"{OWN}.") and not str(getattr(value, "__module__", "")).startswith(f"{OWN}."):
        raise UntrustedCodeError(f"{path} is nothing of gangway's: expected a class or a function of {OWN}")
    return value


def _check(path: str, trust: _Trust) -> None:
    """Raises UntrustedCodeError if `package.module:Name` is named by data, and must not be imported."""
    module = path.partition(":")[0]
    if module.partition(".")[0] == OWN:
        return
    if path not in trust.allowed:
        others = [name for name in trust.named if name.partition(".")[0] != OWN and name not in trust.allowed]
        names = list(dict.fromkeys([path, *others]))
        raise UntrustedCodeError(
            f"{trust.source} names code that is not gangway's: {', '.join(names)}. It would run on this machine with your "
            f"rights. If it is yours, or you have read it: {' '.join(f'--trust-code {name}' for name in names)}"
        )
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        for place in _places(".".join(parts[:end])):
            if _inside(place, trust.source):
                raise UntrustedCodeError(
                    f"{path} would be imported from {place}, which is inside of {trust.source}: code is never taken from there; "
                    "copy the file that you have read to another folder, and start there"
                )


def imported(name: str) -> ModuleType:
    """Imports a module of the user's, as many commands and each host do: without the words of the command, and with standard
    error for what it prints, since standard output may be read by a program.

    Raises ModuleError if it ends the process, or leaves it changed: see `_done_to_process`."""
    with _one_at_a_time:
        changes, words, ended = _done_to_process(), sys.argv[1:], ""
        try:
            with redirect_stdout(sys.stderr):
                del sys.argv[1:]
                module = importlib.import_module(name)
        except SystemExit as error:
            ended = f"ends the process, with the exit status {error.code} ({user_frame(error)})"
        finally:
            sys.argv[1:] = words
            done = [change for look in changes if (change := look())]
        if ended or done:
            file = getattr(sys.modules.get(name), "__file__", None)
            what = ended or ", ".join(done)
            _refused[name] = (
                f"as it is imported, {file or name} {what}: a module must only define things; put the rest into a "
                'function, or below if __name__ == "__main__":'
            )
            raise ModuleError(_refused[name])
        return module


def _done_to_process() -> list[Callable[[], str]]:
    """Returns functions that look at what has been done to this process since: each undoes it, and says what; empty: nothing."""

    def variables_of_jax() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if any(fnmatchcase(name, each) for each in OF_JAX)}

    here, filters, variables = os.getcwd(), [*warnings.filters], variables_of_jax()
    in_main = threading.current_thread() is threading.main_thread()  # no other thread can take signals
    handlers = {number: signal.getsignal(number) for number in TAKEN_SIGNALS if in_main}
    start, started = threading.Thread.start, []

    def start_as_daemon(thread: threading.Thread) -> None:
        # Those of pools end with the process.
        if not thread.daemon and thread._target is not futures._worker:  # type: ignore[attr-defined]
            thread.daemon = True
            started.append(thread)
        start(thread)

    threading.Thread.start = start_as_daemon  # type: ignore[assignment, method-assign]

    def threads() -> str:
        threading.Thread.start = start  # type: ignore[method-assign]
        alive = [thread.name for thread in started if thread.is_alive()]
        return f"starts a thread for which the process would not end ({', '.join(alive)})" if alive else ""

    def folder() -> str:
        if (now := os.getcwd()) == here:
            return ""
        os.chdir(here)
        return f"changes the working folder to {now}"

    def signals() -> str:
        taken = [number for number, handler in handlers.items() if signal.getsignal(number) is not handler]
        for number in taken:
            signal.signal(number, handlers[number] or signal.SIG_DFL)
        return f"takes {', '.join(number.name for number in taken)}, with which a run is stopped" if taken else ""

    def errors() -> str:
        of_all = [each for each in warnings.filters if (each[0], each[1], each[3]) == ("error", None, None)]
        new = [each for each in of_all if each not in filters]
        for each in new:
            warnings.filters.remove(each)  # type: ignore[attr-defined]
        return "makes errors of the warnings of all modules" if new else ""

    def of_jax() -> str:
        now = variables_of_jax()
        changed = sorted(name for name in {*now, *variables} if now.get(name) != variables.get(name))
        for name in changed:
            os.environ.pop(name, None)
            os.environ.update({name: variables[name]} if name in variables else {})
        return f"sets {', '.join(changed)} (the shell, or hosts.env, is the place)" if changed else ""

    return [threads, folder, signals, errors, of_jax]
