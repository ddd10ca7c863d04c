"""The file `console.log` of a run in one process: what its console has shown, of all launches."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from gangway.storage import durable
from trainers.console.screens import Console, PlainConsole
from trainers.console.view import Event


class LoggedConsole:
    """A console whose lines are written to a file, too. What is wrong with the file stops nothing."""

    def __init__(self, console: Console, path: Path, began_s: float):
        """Times count from `began_s`, by the monotonic clock. Raises OSError if the file cannot be opened."""
        self._console = console
        self._file = open(path, "a", 1, "utf-8", "replace", opener=durable.no_link)  # noqa: SIM115 - until `close`
        self._log = PlainConsole(self._file, time.monotonic, began_s)
        began_at = datetime.fromtimestamp(time.time() - (time.monotonic() - began_s), UTC)
        with suppress(OSError):
            self._file.write(f"{began_at.isoformat(timespec='seconds')}  a launch begins\n")

    def show(self, event: Event) -> None:
        self._console.show(event)
        with suppress(Exception):  # a full disk, or an event that cannot be shown: no line is worth the run
            self._log.show(event)

    def close(self) -> None:
        self._console.close()
        with suppress(OSError):
            self._file.close()
