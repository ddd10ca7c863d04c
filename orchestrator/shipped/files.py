"""Finds the files that come with the packages.

In the repository they are the folders `configs/` and `examples/`. `setup.py` puts them beside this file in a wheel.
"""

from __future__ import annotations

from pathlib import Path

CONFIGS, EXAMPLES = "configs", "examples"
PROJECT = "project"
"""The folder in `examples/` with the files of a new project."""


def folder_of(name: str) -> Path:
    """Returns where the folder `configs` or `examples` is. Raises FileNotFoundError if the installation lacks it."""
    here = Path(__file__).resolve().parent
    for parent in (here, here.parents[1]):
        if (parent / name).is_dir():
            return parent / name
    raise FileNotFoundError(
        f"this installation of gangway has no folder {name}: expected {here / name}, or {here.parents[1] / name} in the "
        "repository; install it again with `pip install .`"
    )


def configuration_named(name: str) -> Path | None:
    """Returns the configuration that comes under this file name, such as `tiny.yaml`; None if there is none."""
    found = folder_of(CONFIGS) / name
    return found if name == found.name and found.is_file() else None
