"""Deletes what Gangway has made, and nothing else. No other file of `trainers` and `orchestrator` deletes anything. Without JAX.

A *mark* distinguishes what Gangway makes from what a user has put beside it: a name that nobody gives to a file of their own
(`12.saving-3_1_0c9e41aa`), or a file inside (the `meta.json` of a checkpoint). Whoever deletes names the mark that must be there.
The settings of a run may name any folder, so its path alone says nothing about whose the things in it are.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class NotOursError(OSError):
    """Something was to be deleted, and lacks the mark."""


@dataclass(frozen=True)
class Mark:
    """How Gangway knows again what it has made."""

    what: str
    """What carries the mark, for messages: "a checkpoint"."""
    is_on: Callable[[Any], bool]
    """Given the path, or the place in a store."""


def named(what: str, pattern: str) -> Mark:
    """Returns the mark of what has a name that matches the whole pattern."""
    expression = re.compile(pattern)
    return Mark(what, lambda path: expression.fullmatch(path.name) is not None)


def with_any_of(what: str, *names: str) -> Mark:
    """Returns the mark of a folder that has a file or folder of one of these names."""
    return Mark(what, lambda path: path.is_dir() and any((path / name).exists() for name in names))


def among(what: str, made: Collection[Any]) -> Mark:
    """Returns the mark of what this process has just made itself, and noted."""
    return Mark(what, lambda path: path in made)


TEMPORARY = named("a temporary file", r".+\.tmp")
ON_THE_WAY = named("a folder on its way", r".+\.(saving|replaced|deleted)-\w[\w-]*")
"""Made beside what will have the name, or renamed because it will be deleted."""
PROBE = named("a probe", r"\.probe-\w+(-from|-to)?")
TEMPORARY_FOLDER = named("a temporary folder", r"(profile|trial|gangway-disk|gw)-[a-z0-9_]{8}(\.image)?")
"""Made by `tempfile.mkdtemp`."""
LOOKED_AT = Mark("what was looked at already", lambda path: True)
"""For a store alone, which deletes what `delete` here has given it."""
MADE_BY = {"made_by": "gangway"}
"""In the head of each file of weights that is written for other programs."""


class _Place(Protocol):
    """A place in a store."""

    @property
    def store(self) -> Any: ...

    @property
    def key(self) -> str: ...


def delete(path: str | os.PathLike[str] | _Place, mark: Mark) -> None:
    """Deletes a file, or a folder with all that is in it; of a store, an object. Does nothing if there is none.

    A link carries no mark, and is never followed. Raises NotOursError if the mark is missing, and OSError; what could be deleted
    of a folder is gone then.
    """
    if not isinstance(path, str | os.PathLike):
        _check_place(path, mark)
        path.store.delete(path.key)
        return
    if "://" in os.fspath(path):
        raise NotOursError(f"{path} stays: it is a URL, and no path of this machine")
    path = Path(path)
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    check(path, mark)
    if not stat.S_ISDIR(mode):
        path.unlink(missing_ok=True)
        return
    problems: list[OSError] = []

    def note(function: object, where: str, error: OSError | tuple[type, OSError, object]) -> None:
        problem = error[1] if isinstance(error, tuple) else error
        if not isinstance(problem, FileNotFoundError):  # another process deletes it too
            problems.append(problem)

    handler: dict[str, Any] = {"onexc" if sys.version_info >= (3, 12) else "onerror": note}
    shutil.rmtree(path, **handler)
    if problems:
        raise problems[0]


def check(path: Path, mark: Mark) -> None:
    """Raises NotOursError if `path`, which exists, is a link or lacks the mark."""
    if path.is_symlink() or not mark.is_on(path):
        raise NotOursError(f"{path} stays: Gangway has not made it (it is not {mark.what}); move it away, or give another name")


def is_empty(path: Path) -> bool:
    """Whether this is a folder without a file, whoever made it: nothing is lost if a folder takes its place."""
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def delete_empty(folder: Path) -> None:
    """Deletes a folder that Gangway has made, if nothing is in it. Raises OSError if something is."""
    folder.rmdir()


def delete_folder(place: _Place, mark: Mark) -> None:
    """Deletes all objects of a store that are below a place. Raises NotOursError if the mark is missing, and OSError."""
    _check_place(place, mark)
    place.store.delete_all(place.key)


def _check_place(place: _Place, mark: Mark) -> None:
    if not mark.is_on(place):
        raise NotOursError(f"{place} stays: Gangway has not made it (it is not {mark.what})")
