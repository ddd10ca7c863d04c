"""What the command of a disturbed run shows itself on: a terminal that can be closed, a reader that can go away."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

READ_BYTES = 1 << 16
LOOK_S = 0.1
"""So often the reader looks whether it is to go away."""
IN_TERMINAL = 'terminal=$1; shift; exec "$@" < "$terminal"'
"""The first terminal that the leader of a session opens becomes the terminal of the session."""


class Screen:
    """All that a command writes comes into the file `output`.

    With `terminal`, the command has a terminal of its own; standard output and standard error are files all the same. With
    `reader`, standard output is a pipe that somebody reads, as in `command | tee output`.
    """

    def __init__(self, output: Path, *, terminal: bool = False, reader: bool = False):
        self.output, self._has_terminal, self._has_reader = output, terminal, reader
        self._terminal: int | None = None
        self._reader: threading.Thread | None = None
        self._reads = threading.Event()

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts the command. A screen may start one after the other."""
        self.close()
        with self.output.open("ab") as log:
            how: dict[str, Any] = {"stdout": subprocess.PIPE if self._has_reader else log, "stderr": log, "env": env}
            with heard(signal.SIGINT, *([signal.SIGHUP] if self._has_terminal else ())):
                process = self._start_in_terminal(command, how) if self._has_terminal else subprocess.Popen(command, **how)
        if self._has_reader:
            self._reads.set()
            self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
            self._reader.start()
        return process

    def close(self) -> None:
        self.close_terminal()
        self.stop_reading()

    def close_terminal(self) -> None:
        """As when a person closes the window: the kernel sends SIGHUP to the command."""
        if self._terminal is not None:
            os.close(self._terminal)
            self._terminal = None

    def stop_reading(self) -> None:
        """As `head` does: the next line that the command writes finds no reader."""
        self._reads.clear()
        if self._reader is not None:
            self._reader.join()
            self._reader = None

    def _start_in_terminal(self, command: Sequence[str], how: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        self._terminal, inside = pty.openpty()
        try:
            in_terminal = ["sh", "-c", IN_TERMINAL, "sh", os.ttyname(inside), *command]
            return subprocess.Popen(in_terminal, **how, start_new_session=True)
        finally:
            os.close(inside)

    def _read(self, pipe: IO[bytes]) -> None:
        with self.output.open("ab", buffering=0) as file, pipe:
            while self._reads.is_set():
                if not select.select([pipe], [], [], LOOK_S)[0]:
                    continue
                if not (data := os.read(pipe.fileno(), READ_BYTES)):
                    return
                file.write(data)


@contextmanager
def heard(*numbers: signal.Signals) -> Iterator[None]:
    """Lets what is started meanwhile have the default for these signals. Under `nohup`, or behind `&` of a script, this process
    ignores some, and so would what it starts. Must be used in the main thread then."""
    ignored = [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
