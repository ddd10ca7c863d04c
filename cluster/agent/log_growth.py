"""Notices that a log has grown: a process that prints is alive, though it may send no event."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

LOOK_EVERY_S = 1.0


def follow(path: Callable[[], str | None], on_growth: Callable[[], None], closed: threading.Event) -> None:
    """Calls `on_growth` whenever the log at `path()` has another size than a second ago, until `closed` is set.

    To be run in a thread of its own, without a lock: a disk may hang. Another path is another process, and no growth.
    """
    seen: tuple[str | None, int | None] = (None, None)
    while not closed.wait(LOOK_EVERY_S):
        present = path()
        size = _size(present)
        if present == seen[0] and size != seen[1]:
            on_growth()
        seen = (present, size)


def _size(path: str | None) -> int | None:
    try:
        return None if path is None else os.path.getsize(path)
    except OSError:
        return None
