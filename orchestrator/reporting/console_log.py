"""The file `console.log` of a run: what its console has shown, of all launches, wherever the command ran."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from gangway.wire.console import ConsoleEvent
from orchestrator.reporting.board import BoardLike
from orchestrator.reporting.console import job_lines_of
from orchestrator.reporting.text import summary_page
from trainers.console.screens import PlainConsole


class LoggedBoard:
    """The board of a driver. The lines of what is posted are written to a file, too. Thread-safe."""

    def __init__(
        self,
        board: BoardLike,
        began_at_s: float,
        append: Callable[[str], None],
        later: Callable[[Callable[[], None]], None],
        see: Callable[[ConsoleEvent], None] = lambda event: None,
    ):
        """`began_at_s`: the wall clock at the beginning of the launch, from which the times of lines count. `append(text)` writes
        to the file; `later(work)` has it done in the background. `see(event)` is called with what is posted."""
        self._board, self._append, self._later, self._see = board, append, later, see
        self._text, self._lock = io.StringIO(), threading.Lock()
        began_s = time.monotonic() - (time.time() - began_at_s)
        self._console = PlainConsole(self._text, time.monotonic, began_s, job_lines_of, summary_page)
        self._text.write(f"{datetime.fromtimestamp(began_at_s, UTC).isoformat(timespec='seconds')}  a launch begins\n")

    def post(self, event: ConsoleEvent) -> None:
        self._board.post(event)
        self.show(event)
        self._see(event)

    def show(self, event: ConsoleEvent) -> None:
        """Writes the lines of an event that is on the board already."""
        # Whatever is wrong with the log or with an event: the run goes on.
        with self._lock, suppress(Exception):
            self._console.show(event)
            if self._text.tell():
                self._later(self.write)

    def write(self) -> None:
        """Writes what is waiting. What the storage refuses is lost: the console has shown it."""
        with self._lock:
            text = self._text.getvalue()
            self._text.seek(0)
            self._text.truncate()
        if text:
            with suppress(OSError):
                self._append(text)

    def read(self, cursor: int, timeout_s: float) -> tuple[int, list[ConsoleEvent]]:
        return self._board.read(cursor, timeout_s)

    def request_stop(self, reason: str, *, wait: bool = True) -> None:
        self._board.request_stop(reason, wait=wait)

    def stop_requested(self) -> str | None:
        return self._board.stop_requested()

    def conclude(self, outcome: dict[str, Any]) -> None:
        self._board.conclude(outcome)

    def outcome(self) -> dict[str, Any] | None:
        return self._board.outcome()
