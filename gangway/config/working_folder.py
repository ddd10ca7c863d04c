"""Whether what a configuration names can be found: in a submitted job's copy of the working folder, and among the packages."""

from __future__ import annotations

import importlib.util
import os

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
