"""Finds out whether another driver, or a later generation of the gang, has the run: then this one must not commit. Without JAX.

A driver that takes over a run creates the document of its term. A generation that restores leaves a *claim* in the folder of
the checkpoints. Both are only ever created, so listing the folders is enough. If a folder cannot be listed, the answer is yes:
a checkpoint that was not committed is replaced by the next one, but two writers of one run cannot be repaired.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from gangway.storage import durable, ours
from gangway.storage.row import NO_DRIVER, WriterTerm

__all__ = ["NO_DRIVER", "WriterTerm"]

RETRIES = 3
RETRY_S = 0.5
_TERM = re.compile(r"(\d+)\.json")
_CLAIM = re.compile(r"claimed-(\d+)-(\d+)")


CLAIM = ours.named("a claim of a generation", _CLAIM.pattern)


def fenced(path: str | None, checkpoints: Path, writer: WriterTerm) -> str:
    """Returns why nothing may be committed; empty if it may. `path` is the document that the next driver would create; None
    without a driver."""
    try:
        if path is not None and (document := next_driver(Path(path))):
            return f"another driver has taken over this run ({document} exists): no checkpoint is committed from here"
        # Without a driver there are no generations that could claim the folder.
        later = max(claims(checkpoints), default=NO_DRIVER) if writer != NO_DRIVER else NO_DRIVER
    except OSError as error:
        where = error.filename or checkpoints
        return f"it is not known whether another driver has this run ({where}: {error.strerror or error}): nothing is committed"
    if later > writer:
        return f"a later generation has claimed {checkpoints} ({later}; this is {writer}): no checkpoint is committed from here"
    return ""


def driver_term_of(path: str) -> int | None:
    """Returns the term of the driver that sends this path as its fence: one less than that of the next one."""
    match = _TERM.fullmatch(path.rpartition("/")[2])
    return int(match[1]) - 1 if match else None


def next_driver(path: Path) -> Path | None:
    """Returns `path` if it exists, or the document of a later driver beside it; else None. Raises OSError, also if the folder
    is gone, for then the storage is.

    The folder is listed, because clients of a file server remember for longer that a name was absent than what a folder
    contains.
    """
    term = _TERM.fullmatch(path.name)
    # Sorted, so that every host and every try names the same document.
    for name in sorted(os.listdir(path.parent)):
        other_term = _TERM.fullmatch(name)
        if name == path.name or (term and other_term and int(other_term[1]) >= int(term[1])):
            return path.with_name(name)
    return None


def with_patience(look: Callable[[], str], wait: Callable[[float], None] = time.sleep) -> str:
    """Returns what `look` returns after a few tries: storage that fails for a moment costs no checkpoint. Not for the thread
    that trains."""
    for _ in range(RETRIES):
        if not (problem := look()):
            return ""
        wait(RETRY_S)
    return look() and problem


def claim(checkpoints: Path, writer: WriterTerm) -> None:
    """Records that this generation works in the folder, which must exist. Raises OSError."""
    if writer != NO_DRIVER:
        # Appending creates the file and never changes one: a second claim of the same generation is harmless.
        with open(checkpoints / f"claimed-{writer.driver_term:06}-{writer.generation:06}", "ab", opener=durable.no_link):
            pass


def drop_older_claims(checkpoints: Path, writer: WriterTerm) -> None:
    """Raises OSError."""
    for name in os.listdir(checkpoints):
        if (term := _claimed_by(name)) is not None and term < writer:
            ours.delete(checkpoints / name, CLAIM)


def claims(checkpoints: Path) -> list[WriterTerm]:
    """Returns the terms of all generations that have claimed the folder; none if there is no folder. Raises OSError."""
    try:
        return [term for name in os.listdir(checkpoints) if (term := _claimed_by(name)) is not None]
    except FileNotFoundError:
        return []


def _claimed_by(name: str) -> WriterTerm | None:
    match = _CLAIM.fullmatch(name)
    return WriterTerm(int(match[1]), int(match[2])) if match else None
