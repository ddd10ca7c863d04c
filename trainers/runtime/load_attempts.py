"""Records what kept executables did to the processes that loaded them: one that crashed them is not loaded again.

A process keeps a journal of the executables that it is loading or running for the first time, and deletes it when that went
well. The journal of a dead process therefore says what it was doing, and how it died. If it crashed, the executable is deleted
at once, and compiled again; after a second crash it is neither loaded nor kept any more. If the journal has no sign of a crash,
the process was most likely killed with its gang, or it aborted because the gang's coordinator was gone. That is no fault of the
executable: it is deleted only after several such ends in succession.

Each host keeps its own journals, because all hosts of a gang are killed together. A file lock shows whether the writer is
alive.
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

from gangway.storage import durable, ours

FOLDER = "attempts"
MAX_CRASHES = 2
MAX_ENDS = 3
"""The limit for ends in succession, without a successful first use between them."""
CRASH = re.compile(r"Fatal Python error: (Segmentation fault|Bus error|Illegal instruction|Floating[ -]point exception)")
"""The texts of faulthandler. An abort proves nothing: a process whose coordinator is gone aborts, whatever it was doing."""
PROGRAM = ours.named("a kept executable", r".+-[0-9a-f]+\.(json|xla)")
"""An executable, or the small file that names it."""
RECORD = ours.named("a record of a kept executable", r"[0-9a-f]{32}\.trying|.+\.(crashed|ended)-.+")


_in_log = False
"""Whether crashes of this process are reported in its log, while no executable is tried."""


def report_crashes() -> None:
    """Has the stack of the thread that crashes this process printed to standard error, as it dies."""
    global _in_log  # noqa: PLW0603
    faulthandler.enable(all_threads=False)
    _in_log = True


class Attempts:
    """The attempts of one host to use the executables in `folder`. Any thread may call its methods."""

    def __init__(self, folder: Path, host: int, note: Callable[[str], None]):
        self.folder, self.note = folder, note
        # The host's index too: several processes of one machine may share the folder.
        self.records = folder / FOLDER / f"{socket.gethostname()}-{host}"
        self._lock = threading.Lock()
        self._warned = False
        self._journal: int | None = None
        self._journal_path: Path | None = None
        self._reports_crashes = False
        self._under_way: Counter[str] = Counter()
        # Before anything is loaded: what is found here keeps this process from loading the same file.
        self._judge_journals()

    def barred(self, name: str) -> bool:
        """Whether this executable has crashed too often to be loaded or kept."""
        return self._count(name, "crashed") >= MAX_CRASHES

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Use this around the loading of an executable."""
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def begin(self, name: str) -> None:
        """From here on, the end of this process counts against the executable."""
        with self._lock:
            try:
                # Opened late: most processes load nothing that is on trial, and need no file.
                if self._journal is None:
                    self._open()
                self._under_way[name] += 1
                self._write(f"+{name}\n")
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    self.note(f"a crash of a kept executable would not be remembered: {error}")

    def end(self, name: str) -> None:
        """The executable did not end the process."""
        with self._lock, suppress(OSError):  # the disk is full: at worst it counts as one more end
            self._under_way -= Counter([name])
            self._write(f"-{name}\n")
            if not self._under_way:
                # The journal goes as soon as nothing is on trial: what kills this process later is no fault of
                # an executable.
                self._close()

    def worked(self, name: str) -> None:
        """The first use succeeded: earlier ends were not the executable's fault."""
        self.end(name)
        # "ended" only: a real crash stays on record, however often the program works afterwards.
        for path in self._strikes(name, "ended"):
            ours.delete(path, RECORD)

    def failed(self, name: str) -> None:
        """The first use raised an error. That may be the executable's fault, or that of a host that is gone; it counts like an
        end."""
        with suppress(OSError):
            self._strike(name, "ended", uuid.uuid4().hex)
        self.end(name)

    # ------------------------------------------------------------------ the journal of this process

    def _open(self) -> None:
        self.records.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.records / f"{uuid.uuid4().hex}.trying"
        # O_EXCL: a new file, never a journal of a dead process that is still to be judged. O_APPEND: one write,
        # one whole line.
        self._journal = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._journal_path = path
        with suppress(OSError):  # a file system without locks: this journal is never taken for that of a dead process
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not faulthandler.is_enabled() or _in_log:  # otherwise its text goes elsewhere, and a crash counts as an end
            # Its handlers write into the journal as the process dies, when Python can do nothing any more.
            faulthandler.enable(self._journal)
            self._reports_crashes = True

    def _write(self, line: str) -> None:
        if self._journal is not None:
            # Unbuffered, by the system call: what is in a Python buffer is lost when the process is killed.
            os.write(self._journal, line.encode())

    def _close(self) -> None:
        journal, self._journal = self._journal, None
        if self._reports_crashes:
            # Before the file is closed: the handler would write to whatever gets this file descriptor next.
            faulthandler.disable()
            self._reports_crashes = False
            if _in_log:
                report_crashes()
        if self._journal_path is not None:
            ours.delete(self._journal_path, RECORD)
        if journal is not None:
            os.close(journal)

    # ------------------------------------------------------------------ the journals of the dead

    def _judge_journals(self) -> None:
        try:
            journals = [path for path in self.records.iterdir() if path.suffix == ".trying"]
        except OSError:
            return  # none, most likely
        for path in journals:
            with suppress(OSError), open(path, "rb+") as file:
                # Locks end with their process, so there is no stale lock to clear, and no process id that could be reused.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
                self._judge(path.stem, file.read().decode(errors="replace"))
                # Only when judged. If this process dies in between, the next one writes the same strikes under
                # the same names.
                ours.delete(path, RECORD)

    def _judge(self, who: str, journal: str) -> None:
        crash = CRASH.search(journal)
        pending: Counter[str] = Counter()
        for line in journal.splitlines():
            if line.startswith(("+", "-")):
                pending[line[1:]] += 1 if line[0] == "+" else -1
        # The unary plus of a Counter keeps positive counts: what was begun and never ended.
        for name in +pending:
            if crash:
                self._strike(name, "crashed", who, journal)
                self._forget(name)
                self.note(f"{name} is not loaded but compiled again: a process crashed while it was tried ({crash[1]})")
                continue
            self._strike(name, "ended", who)
            if self._count(name, "ended") >= MAX_ENDS:
                self._forget(name)
                # A new file of the same name begins without a record.
                for strike in self._strikes(name, "ended"):
                    ours.delete(strike, RECORD)
                self.note(f"{name} is not loaded but compiled again: {MAX_ENDS} processes running ended while it was tried")

    def _forget(self, name: str) -> None:
        # From a file, which may be damaged: a name of another folder is none of ours.
        if Path(name).name == name:
            ours.delete(self.folder / name, PROGRAM)

    def _strike(self, name: str, how: str, who: str, text: str = "") -> None:
        self.records.mkdir(mode=0o700, parents=True, exist_ok=True)
        # One file for each strike, with a name of its own: two processes never overwrite each other's count.
        with open(self.records / f"{name}.{how}-{who}", "w", opener=durable.no_link) as file:
            file.write(text)

    def _strikes(self, name: str, how: str) -> list[Path]:
        try:
            return [path for path in self.records.iterdir() if path.name.startswith(f"{name}.{how}-")]
        except OSError:
            return []

    def _count(self, name: str, how: str) -> int:
        return len(self._strikes(name, how))
