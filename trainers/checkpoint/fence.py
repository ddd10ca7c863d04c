"""Whether another driver, or a later generation of the gang, has the run: then nothing may be committed from here. Without JAX.

A driver that takes a run creates the document of its term; a generation that restores leaves a *claim* in the folder of the
checkpoints. Both are only ever created, so whoever lists the folders knows. Where nobody can tell, the answer is yes: a
checkpoint that is not committed is made good by the next one, and two writers of one run by nothing.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

RETRIES = 3
RETRY_S = 0.5
_TERM = re.compile(r"(\d+)\.json")
_CLAIM = re.compile(r"claimed-(\d+)-(\d+)")


class WriterTerm(NamedTuple):
    """Which generation of which driver: the later one is the greater one."""

    driver_term: int = 0
    generation: int = 0

    def __str__(self) -> str:
        return f"driver term {self.driver_term}, generation {self.generation}"


NO_DRIVER = WriterTerm()


def fenced(path: str | None, checkpoints: Path, own: WriterTerm) -> str:
    """Why nothing may be committed; empty if it may. `path`: of the document that the next driver creates; None without one."""
    try:
        if path is not None and (found := next_driver(Path(path))):
            return f"another driver has taken over this run ({found} exists): no checkpoint is committed from here"
        later = max(claims(checkpoints), default=NO_DRIVER) if own != NO_DRIVER else NO_DRIVER
    except OSError as error:
        where = error.filename or checkpoints
        return f"whether another driver has this run cannot be told ({where}: {error.strerror or error}): nothing is committed"
    if later > own:
        return f"a later generation has claimed {checkpoints} ({later}; this is {own}): no checkpoint is committed from here"
    return ""


def next_driver(path: Path) -> Path | None:
    """`path`, or the document of a later driver beside it. Raises OSError, also where the folder is gone: so is the storage.

    The folder is listed: clients of a file server remember for longer that a name was absent than what a folder holds."""
    own = _TERM.fullmatch(path.name)
    for name in sorted(os.listdir(path.parent)):
        number = _TERM.fullmatch(name)
        if name == path.name or (own and number and int(number[1]) >= int(own[1])):
            return path.with_name(name)
    return None


def with_patience(look: Callable[[], str], wait: Callable[[float], None] = time.sleep) -> str:
    """What `look` says after a few tries: storage that fails for a moment costs no checkpoint. Not for the thread that trains."""
    for _ in range(RETRIES):
        if not (problem := look()):
            return ""
        wait(RETRY_S)
    return look() and problem


def claim(checkpoints: Path, own: WriterTerm) -> None:
    """Leaves word that this generation works in the folder, which must be there. Raises OSError."""
    if own != NO_DRIVER:
        with open(checkpoints / f"claimed-{own.driver_term:06}-{own.generation:06}", "ab"):
            pass


def drop_older_claims(checkpoints: Path, own: WriterTerm) -> None:
    """Raises OSError."""
    for name in os.listdir(checkpoints):
        if (term := _claimed_by(name)) is not None and term < own:
            (checkpoints / name).unlink(missing_ok=True)


def claims(checkpoints: Path) -> list[WriterTerm]:
    """Of all generations that have left word; none where there is no folder. Raises OSError."""
    try:
        return [term for name in os.listdir(checkpoints) if (term := _claimed_by(name)) is not None]
    except FileNotFoundError:
        return []


def _claimed_by(name: str) -> WriterTerm | None:
    found = _CLAIM.fullmatch(name)
    return WriterTerm(int(found[1]), int(found[2])) if found else None
