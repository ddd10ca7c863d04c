"""The names of classes and functions by which another process can import them; and whether what a configuration names can be
found, in a submitted job's copy of the working folder and among the packages. Free of JAX."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAUNCHING = "GANGWAY_LAUNCHING"
"""The variable that is set in the processes that `launch` starts: they import the user's file again, and must not train what it
trains."""
MOVE = "write it at the top level of a file, such as pieces.py, and import it from there"


def why_not_here(what: str, environ: Mapping[str, str]) -> str | None:
    """Returns why a process that only imports the user's file must not do `what`; None if it may."""
    if not environ.get(LAUNCHING):
        return None
    return (
        f"{what}() was called while launch() imported this file in another process: put the calls of fit and launch below "
        'if __name__ == "__main__":'
    )


def path_of(value: Any) -> str:
    """Returns `package.module:Name` of a class or a function. Raises ValueError that says why no other process can import it,
    and what to do."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None or name is None:
        raise ValueError(
            f"{type(value).__name__} is an object in this process's memory: give a class or a function, or the name of one, such "
            f"as 'pieces:Net'; {MOVE}"
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
