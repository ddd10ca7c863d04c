"""What is kept on this machine between two processes: the tokens and indices of data. Without it everything only takes longer."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

FOLDER = "~/.cache/gangway"
TOKENS, INDICES, CHECKED = "tokens", "records", "checked"
KEPT_BYTES = 20 << 30
"""How much of each is kept: what was used last."""


def folder(kind: str) -> Path:
    return Path(os.path.expanduser(FOLDER)) / kind


def used(path: Path) -> None:
    """Notes that a file or folder was used just now."""
    with suppress(OSError):  # it was deleted just now, or is not ours
        os.utime(path)


def tidy(place: Path) -> None:
    """Deletes the entries that were used least recently, until the others are no more than `KEPT_BYTES`."""
    entries = sorted(((path.stat().st_mtime, path) for path in place.iterdir()), reverse=True)
    kept = 0
    for _, path in entries:
        kept += _num_bytes(path)
        if kept > KEPT_BYTES:
            delete(path)


def delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):  # it is gone
            path.unlink()


def _num_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
