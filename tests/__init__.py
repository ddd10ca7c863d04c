"""Tests: unit (one process), multihost (real `jax.distributed`), ray (real Ray), faults (whole jobs that are broken)."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
"""The folder of the project."""
PACKAGES = ("gangway", "trainers", "cluster", "orchestrator")
"""Those of the product."""


def in_folder(folder: Path, instead: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of `os` that is another one for the files below a folder: those of a test, and not of a thread that
    an earlier test has left running. Its first argument is a path or a descriptor."""

    def call(place: Any, *more: Any) -> Any:
        path = f"/proc/self/fd/{place}" if isinstance(place, int) else os.path.dirname(place)
        return (instead if Path(os.path.realpath(path)).is_relative_to(folder) else real)(place, *more)

    return call
