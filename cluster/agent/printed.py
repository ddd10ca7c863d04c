"""What the process of a host prints, line by line, for a console that asks for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from gangway.wire import events
from gangway.wire.orders import Start

MAX_BYTES = 1 << 18
"""How much of a log is read at once: of more, only its end."""
MAX_LINE = 500
"""Characters of a line; the log has all of it."""


class Printed:
    """Reports what a log has got since the last look. Thread-safe. Never called with a lock held: a disk may hang."""

    def __init__(self, report: Callable[[Mapping[str, Any]], None]):
        self._report = report
        self._lock = threading.Lock()
        self._path: str | None = None
        self._offset = 0

    def show(self, path: str | None, orders: Start | None) -> None:
        """Reports the complete lines that are new, the last ones if there are more than `orders` ask for."""
        asked = orders.get("shown_lines", 0) if orders is not None else 0
        if not asked or path is None:
            return
        with self._lock:  # until they are reported: two threads must not change their order
            lines = self._new_lines(path)
            if lines:
                event: events.Printed = {
                    "t": time.time(),
                    "ev": "printed",
                    "lines": lines[-asked:],
                    "left_out": max(0, len(lines) - asked),
                }
                self._report(event)

    def _new_lines(self, path: str) -> list[str]:
        if path != self._path:
            self._path, self._offset = path, 0
        try:
            with open(path, "rb") as log:
                size = os.fstat(log.fileno()).st_size
                if size < self._offset:
                    self._offset = 0  # it had grown too large, and was emptied
                log.seek(max(self._offset, size - MAX_BYTES))
                new = log.read(MAX_BYTES)
                # A line that is not complete yet is shown when it is.
                complete = new.rfind(b"\n") + 1
                self._offset = log.tell() - len(new) + complete
        except OSError:
            return []  # the log is for people, and training goes on without it
        # Of a progress bar, which writes over its line, the last state.
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in new[:complete].decode(errors="replace").split("\n")]
        return [line[:MAX_LINE] for line in lines if line.strip()]


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
