"""The names of classes and functions by which another process can import them; and whether what a configuration names can be
found, in a submitted job's copy of the working folder and among the packages. Free of JAX."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAUNCHING = "GANGWAY_LAUNCHING"
"""The variable that is set in the processes that `launch` starts: they import the user's file again, and must not train what it
trains."""
OWN = "trainers"
"""The package whose classes and functions the documents of any checkpoint may name."""
MOVE = "write it at the top level of a file, such as pieces.py, and import it from there"


def why_not_here(what: str, environ: Mapping[str, str]) -> str | None:
    """Returns why a process that only imports the user's file must not do `what`; None if it may."""
    if not environ.get(LAUNCHING):
        return None
    return (
        f"{what}() was called while launch() imported this file in another process: put the calls of fit and launch below "
        'if __name__ == "__main__":'
    )


class UntrustedCodeError(ValueError):
    """Data names code that nobody has allowed."""


@dataclass(frozen=True)
class _Trust:
    source: Path
    """The folder or file whose documents name the code."""
    allowed: frozenset[str]


_trust: ContextVar[_Trust | None] = ContextVar("trust", default=None)


@contextmanager
def named_by_data(source: str, allowed: Collection[str] = ()) -> Iterator[None]:
    """Within this block, the names of code come from the documents at `source`, which may be anybody's: `check` lets gangway's
    own pass, and those that are `allowed`, by their exact names. No module is imported from inside `source` itself, nor from the
    run that it is a checkpoint of."""
    folder = Path(os.path.realpath(source))
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


def check(path: str) -> None:
    """Raises UntrustedCodeError if `package.module:Name` is named by data, and must not be imported."""
    trust, module = _trust.get(), path.partition(":")[0]
    if trust is None or module.partition(".")[0] == OWN:
        return
    if path not in trust.allowed:
        raise UntrustedCodeError(
            f"{trust.source} names code that is not gangway's: {path}. It would run on this machine with your rights. If it is "
            f"yours, or you have read it: --trust-code {path}"
        )
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        for place in _places(".".join(parts[:end])):
            if _inside(place, trust.source):
                raise UntrustedCodeError(
                    f"{path} would be imported from {place}, which is inside of {trust.source}: code is never taken from there; "
                    "copy the file that you have read to another folder, and start there"
                )


def check_own(path: str, value: Any) -> None:
    """Raises UntrustedCodeError if data names something that one of gangway's modules has only imported."""
    is_own = str(getattr(value, "__module__", "")).startswith(f"{OWN}.")
    if _trust.get() is not None and path.startswith(f"{OWN}.") and not is_own:
        raise UntrustedCodeError(f"{path} is nothing of gangway's: expected a class or a function of {OWN}")


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


def path_of(value: Any) -> str:
    """Returns `package.module:Name` of a class or a function. Raises ValueError that says why no other process can import it,
    and what to do."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None:
        raise ValueError(
            f"{_shown(value)} is an object in this process's memory: give a class or a function, or the name of one, such as "
            f"'pieces:Net'; {MOVE}"
        )
    if "<lambda>" in name:
        raise ValueError(f"it is a lambda, which has no name: make it a function, and {MOVE}")
    if "<locals>" in name:
        raise ValueError(f"{name.replace('.<locals>', '')} is defined inside a function: {MOVE}")
    if "." in name:
        raise ValueError(f"{name} is defined inside a class: {MOVE}")
    importable = _main_module(name) if module == "__main__" else module
    if getattr(sys.modules.get(module), name, None) is not value:
        raise ValueError(f"{importable} has another object named {name}: give this one a name of its own there")
    return f"{importable}:{name}"


def _main_module(name: str) -> str:
    """Returns the name by which the program itself can be imported."""
    main = sys.modules["__main__"]
    # Of `python -m package.module`.
    if (spec := getattr(main, "__spec__", None)) is not None:
        return spec.name
    file = getattr(main, "__file__", None)
    if file is None:
        raise ValueError(f"{name} is defined in a notebook or at a prompt: {MOVE}")
    module = Path(file).stem
    if not module.isidentifier():
        raise ValueError(
            f"{name} is defined in {file}, which cannot be imported as {module!r}: rename the file, with letters, digits and '_'"
        )
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None or not Path(found.origin).samefile(file):
        raise ValueError(f"{name} is defined in {file}, which cannot be imported as {module!r}: {MOVE}")
    return module


def _shown(value: Any) -> str:
    return type(value).__name__


COPIED_BY_RAY = "/runtime_resources/working_dir_files/"
"""In the path of the folder that Ray makes of the working folder of a submitted job."""


def is_installed(package: str) -> bool:
    """Whether a package can be imported. A folder of its name alone is none: W&B leaves a folder `wandb`, and Python takes any
    folder for a package without contents."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def is_copy(folder: str) -> bool:
    """Whether a folder is, or lies in, the copy that Ray makes of the working folder of a submitted job, and deletes with it."""
    return COPIED_BY_RAY in f"{folder}/"


def of_a_copy(folder: str | None = None) -> str:
    """Returns what to add to a message that something is not there: in a submitted job the working folder (default: that of this
    process) is a copy, from which Ray has left out what `.gitignore` names. "" elsewhere."""
    try:
        folder = os.getcwd() if folder is None else folder
    except FileNotFoundError:
        return ""
    if not is_copy(folder):
        return ""
    return (
        "; the working folder of this job is a copy, without the files that .gitignore names: set "
        "RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1 where you call `ray job submit`, or give an absolute path that all hosts can read"
    )
