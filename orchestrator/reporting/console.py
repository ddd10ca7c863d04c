"""The console of a job: that of `trainers/console/`, with the lines of a driver (gangs, incidents) and a page at the end."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TextIO

from gangway.wire.console import ConsoleEvent, Printed
from orchestrator.reporting.board import BoardLike
from orchestrator.reporting.text import action_of, price, recovery, summary_page
from trainers.console import screens
from trainers.console.screens import Console, PlainConsole
from trainers.console.text import printable, sentence
from trainers.console.view import PLANNED, Event, Line, View, line, lines_of, plural

READ_TIMEOUT_S = 0.2


def make_console(
    stream: TextIO | None = sys.stdout,
    began_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    log: str | None = None,
    *,
    logged: bool = False,
) -> Console:
    """Makes the console of a job for `stream`. Its times count from `began_s` (default: now). `log` and `logged`: see
    `screens.make_console`."""
    return screens.make_console(stream, began_s, clock, job_lines_of, summary_page, log, logged=logged)


def watch(board: BoardLike, console: Console, finished: Callable[[], bool]) -> None:
    """Shows what is posted until `finished`, and then what is left."""
    cursor = 0
    try:
        while True:
            over = finished()  # Before the read: events that were posted before the end are still shown.
            cursor, events = board.read(cursor, 0.0 if over else READ_TIMEOUT_S)
            for event in events:
                console.show(event)
            if over and not events:
                return
    finally:
        console.close()


def job_lines_of(event: Event, view: View) -> list[Line]:
    """Returns the lines that this event adds to the log of a job; `view` is the state after it."""
    match event["ev"]:
        case "generation" if event["generation"] == 0:
            return [line((f"gang of {plural(event['hosts'], 'host')} is ready", "dim"))]
        case "incident":
            return [_incident(event["incident"])]
        case "recovered":
            return [_recovered(event["incident"])]
        case "printed":
            return _printed(event)  # type: ignore[arg-type]  # an event is any mapping here
    return lines_of(event, view)


def _incident(incident: Mapping[str, Any]) -> Line:
    what = incident["evidence"].get("summary", incident["kind"])
    planned = incident["kind"] in PLANNED
    mark, style = ("↻ ", "bold cyan") if planned else ("✗ ", "bold red")
    return line((mark, style), f"{sentence(what)} ", (f"→ {action_of(incident)}", "yellow"))


def _recovered(incident: Mapping[str, Any]) -> Line:
    resumed = incident.get("resumed_step")
    where = f" at step {resumed}" if resumed is not None else ""
    phases = (f"  {recovery(incident['recovery_s'])}", "dim")
    return line(("✓ ", "bold green"), f"training again{where} after {price(incident)}", phases)


def _printed(event: Printed) -> list[Line]:
    host = f"host {event['host']}  "
    left_out = [f"({plural(event['left_out'], 'line')} left out; logs/ has all)"] if event["left_out"] else []
    return [line((host, "cyan"), printable(text)) for text in (*left_out, *event["lines"])]


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
