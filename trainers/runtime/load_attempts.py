"""What a kept executable did to the processes that loaded it: one that ended them is not loaded again.

A process keeps a journal of the executables that it is loading or runs for the first time, and deletes it when that went well.
So the journal of a dead process tells what it was doing, and how it died. If it crashed, the executable is deleted at once, and
compiled again; after a second crash it is neither loaded nor kept any more. If there is no word of a crash, most likely the
process was killed with its gang, or it aborted because the gang's coordinator was gone. That is no fault of the executable: it is
deleted only when this has happened several times in succession.

Each host keeps its own journals, because all hosts of a gang are killed together. A file lock tells whether the writer is alive.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import socket
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = "attempts"
MAX_CRASHES = 2
MAX_ENDS = 3
"""In succession, without a first use that went well between them."""
CRASH = re.compile(r"Fatal Python error: (Segmentation fault|Bus error|Illegal instruction|Floating[ -]point exception)")
"""As faulthandler words it. An abort is no proof: a process whose coordinator is gone aborts, whatever it was doing."""


class Attempts:
    """Those of one host with the executables in `folder`. Any thread may call."""

    def __init__(self, folder: Path, host: int, note: Callable[[str], None]):
        self.folder, self.note = folder, note
        self.records = folder / FOLDER / f"{socket.gethostname()}-{host}"
        self._lock = threading.Lock()
        self._told = False
        self._journal: int | None = None
        self._journal_path: Path | None = None
        self._reports_crashes = False
        self._under_way: Counter[str] = Counter()
        self._judge_the_dead()

    def barred(self, name: str) -> bool:
        """Whether this executable has crashed too often to be loaded or kept."""
        return self._count(name, "crashed") >= MAX_CRASHES

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """While it is loaded."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def begin(self, name: str) -> None:
        """From here on the end of this process counts against the executable."""
        with self._lock:
            try:
                if self._journal is None:
                    self._open()
                self._under_way[name] += 1
                self._write(f"+{name}\n")
            except OSError as error:
                if not self._told:
                    self._told = True
                    self.note(f"a crash of a kept executable would not be remembered: {error}")

    def end(self, name: str) -> None:
        """It did not end the process."""
        with self._lock, suppress(OSError):  # the disk is full: at worst it counts as one more end
            self._under_way -= Counter([name])
            self._write(f"-{name}\n")
            if not self._under_way:
                self._close()

    def worked(self, name: str) -> None:
        """Its first use went well: ends before that were not its doing."""
        self.end(name)
        for path in self._strikes(name, "ended"):
            path.unlink(missing_ok=True)

    def failed(self, name: str) -> None:
        """Its first use raised an error, which may be its fault, or that of a host that is gone: as if the process was killed."""
        with suppress(OSError):
            self._strike(name, "ended", uuid.uuid4().hex)
        self.end(name)

    # ------------------------------------------------------------------ the journal of this process

    def _open(self) -> None:
        self.records.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.records / f"{uuid.uuid4().hex}.trying"
        self._journal = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._journal_path = path
        with suppress(OSError):  # no locks here: then nobody can tell that this process is dead, and nobody judges it
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not faulthandler.is_enabled():  # else somebody wants the text elsewhere: a crash counts as an end
            faulthandler.enable(self._journal)
            self._reports_crashes = True

    def _write(self, line: str) -> None:
        if self._journal is not None:
            os.write(self._journal, line.encode())

    def _close(self) -> None:
        journal, self._journal = self._journal, None
        if self._reports_crashes:
            faulthandler.disable()
            self._reports_crashes = False
        if self._journal_path is not None:
            self._journal_path.unlink(missing_ok=True)
        if journal is not None:
            os.close(journal)

    # ------------------------------------------------------------------ the journals of the dead

    def _judge_the_dead(self) -> None:
        try:
            journals = [path for path in self.records.iterdir() if path.suffix == ".trying"]
        except OSError:
            return  # none, most likely
        for path in journals:
            with suppress(OSError), open(path, "rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
                self._judge(path.stem, file.read().decode(errors="replace"))
                path.unlink(missing_ok=True)

    def _judge(self, who: str, journal: str) -> None:
        crash = CRASH.search(journal)
        open_ones: Counter[str] = Counter()
        for line in journal.splitlines():
            if line.startswith(("+", "-")):
                open_ones[line[1:]] += 1 if line[0] == "+" else -1
        for name in +open_ones:
            if crash:
                self._strike(name, "crashed", who, journal)
                (self.folder / name).unlink(missing_ok=True)
                self.note(f"{name} is not loaded but compiled again: a process crashed while it was tried ({crash[1]})")
                continue
            self._strike(name, "ended", who)
            if self._count(name, "ended") >= MAX_ENDS:
                (self.folder / name).unlink(missing_ok=True)
                for strike in self._strikes(name, "ended"):
                    strike.unlink(missing_ok=True)
                self.note(f"{name} is not loaded but compiled again: {MAX_ENDS} processes running ended while it was tried")

    def _strike(self, name: str, how: str, who: str, text: str = "") -> None:
        self.records.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.records / f"{name}.{how}-{who}").write_text(text)

    def _strikes(self, name: str, how: str) -> list[Path]:
        try:
            return [path for path in self.records.iterdir() if path.name.startswith(f"{name}.{how}-")]
        except OSError:
            return []

    def _count(self, name: str, how: str) -> int:
        return len(self._strikes(name, how))
