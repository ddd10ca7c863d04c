"""The logs of one host's processes: files on a local disk of the machine, and copies of them in the run's folder.

The run's folder may be on shared storage that hangs. Only one thread touches it. Only `close` waits for that thread, and not for
long. What could not be copied is copied later, at the latest by the next agent of the host on this machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from cluster.agent import log_mark
from gangway.storage.durable import no_link

LOG_DIR = "~/.cache/gangway/logs"
MAX_FILES, MAX_BYTES = 100, 1 << 28
"""How much is kept per host, on its machine and in the run's folder each: the newest files."""
MAX_LOG_BYTES = 1 << 26
"""A larger log is emptied, and its end is kept as `NAME.1`."""
COPIED_BYTES = 1 << 22
"""How many bytes are copied: the end of each log."""
COPY_EVERY_S = 30.0
"""How often logs are copied while a process runs; at its end they are copied at once."""
TIDY_EVERY_S = 30.0
CLOSE_TIMEOUT_S = 2.0
"""How long `close` waits for the last copies."""
KEPT_RUN_DAYS = 30
"""Logs of a run that was not active on a machine for so long are deleted there."""


class Logs:
    """The logs of one host of a run. Thread-safe.

    They are written to `ROOT/RUN/HOST`, a local folder, and copied to `copies`, a folder or a URL. `on_trouble` is called when
    they cannot be copied: once, until copying works again.
    """

    def __init__(self, root: str, run_name: str, host: str, copies: str, on_trouble: Callable[[str], None]):
        self._run_folder = os.path.join(os.path.expanduser(root), run_name)
        self.folder, self.copies = os.path.join(self._run_folder, host), copies
        self._on_trouble = on_trouble
        self._sizes: dict[str, int] = {}
        """The size of each log at its last copy. A log only grows: the same size means that nothing is new."""
        self._in_trouble = False
        self._copy_requested, self._closing, self._closed = threading.Event(), threading.Event(), threading.Event()
        threading.Thread(target=self._keep_tidy, name="logs", daemon=True).start()
        threading.Thread(target=self._keep_copying, name="copies of logs", daemon=True).start()

    def new(self, name: str) -> tuple[str, str | None]:
        """Creates the log of a child. Returns its path, and a problem or None. Without a log the child still runs: its output is
        dropped."""
        path = os.path.join(self.folder, name)
        try:
            # The run's folder first: with a folder of a host in it that has a mark, it looks like a user's own.
            log_mark.claim(self._run_folder)
            log_mark.claim(self.folder)
            open(path, "ab", opener=no_link).close()
        except OSError as error:
            return os.devnull, f"what the training process prints is lost: its log {path} cannot be opened: {error}"
        return path, None

    def copy_of(self, path: str) -> str | None:
        """Returns the path or URL to which a log is copied."""
        return None if path == os.devnull else f"{self.copies}/{os.path.basename(path)}"

    def copy(self) -> None:
        """Asks the thread to copy what is new. Never waits."""
        self._copy_requested.set()

    def close(self, timeout_s: float) -> bool:
        """Copies what is new for the last time. Returns False if that was not done in time."""
        self._closing.set()
        self._copy_requested.set()
        return self._closed.wait(timeout_s)

    # ------------------------------------------------------------------ on the machine

    def _keep_tidy(self) -> None:
        _forget_old(os.path.dirname(self._run_folder))
        while not self._closing.wait(TIDY_EVERY_S):
            with suppress(OSError):  # a broken local disk is reported when the next log is opened
                if log_mark.is_marked(self._run_folder):
                    os.utime(self._run_folder)  # the age of the folder decides when `_forget_old` deletes it
                for path in log_mark.logs_in(self.folder):
                    cut(path)
                keep_newest(self.folder)

    # ------------------------------------------------------------------ in the run's folder

    def _keep_copying(self) -> None:
        while not self._closed.is_set():
            self._copy_requested.wait(COPY_EVERY_S)
            self._copy_requested.clear()  # before the copying: a request that comes meanwhile must not be lost
            # Read before the copying: what is printed until `close` is called is copied in the last round.
            last = self._closing.is_set()
            try:
                self._copy_all()
                self._in_trouble = False
            except Exception as error:  # fsspec raises many kinds; the thread must go on
                self._warn(error)
            if last:
                self._closed.set()

    def _copy_all(self) -> None:
        if not _is_url(self.copies):
            log_mark.claim(self.copies)
        copied = [self._copy(path) for path in log_mark.logs_in(self.folder)]
        if any(copied) and not _is_url(self.copies):
            keep_newest(self.copies)

    def _copy(self, path: str) -> bool:
        """Copies one log. Returns whether there was something new."""
        try:
            size = os.path.getsize(path)
            if size == self._sizes.get(path):
                return False
            payload = _end_of(path, size)
        except FileNotFoundError:  # `keep_newest` has just deleted it
            return False
        copy = f"{self.copies}/{os.path.basename(path)}"
        is_new = path in self._sizes or _size(copy) != len(payload)  # an earlier agent may have copied it
        if is_new:
            _write(copy, payload)
        self._sizes[path] = size
        return is_new

    def _warn(self, error: Exception) -> None:
        if not self._in_trouble:
            self._in_trouble = True
            why, where = f"{type(error).__name__}: {error}", f"{self.folder} on {socket.gethostname()}"
            self._on_trouble(f"what the training process prints cannot be copied to {self.copies} ({why}); it is in {where}")


def cut(path: str, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Empties a log that has grown too large, and keeps its end as `PATH.1`. The writer appends, so it goes on at the
    beginning."""
    size = os.path.getsize(path)
    if size <= max_bytes or path.endswith(".1"):
        return
    with open(path, "rb") as log, open(f"{path}.1", "wb", opener=no_link) as kept:
        log.seek(size - min(size, COPIED_BYTES))
        shutil.copyfileobj(log, kept)
    # What is printed between the copy above and this line is lost: the writer cannot be stopped for it.
    os.truncate(path, 0)


def keep_newest(folder: str, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES) -> None:
    """Deletes the oldest logs of a folder, until at most `max_files` of at most `max_bytes` together are left. Files that are no
    logs of ours stay, and do not count."""
    files = []
    for path in log_mark.logs_in(folder):
        with suppress(FileNotFoundError):
            status = os.stat(path)
            files.append((status.st_mtime_ns, status.st_size, path))
    total_bytes = 0
    # The newest file stays, however large: it is probably the log of the running process.
    for number, (_, size, path) in enumerate(sorted(files, reverse=True)):
        total_bytes += size
        if number >= max_files or (number > 0 and total_bytes > max_bytes):
            log_mark.delete(path)


def _forget_old(root: str) -> None:
    limit_s = time.time() - KEPT_RUN_DAYS * 24 * 3600
    with suppress(OSError), os.scandir(root) as runs:
        for run in runs:
            if run.is_dir() and run.stat().st_mtime < limit_s:
                with suppress(OSError):  # it has no mark of ours, or is another user's
                    log_mark.delete(run.path)


def _end_of(path: str, size: int) -> bytes:
    with open(path, "rb") as log:
        if size <= COPIED_BYTES:
            return log.read(size)
        left_out = size - COPIED_BYTES
        log.seek(left_out)
        return f"[{left_out} bytes before this are in {path} on {socket.gethostname()}]\n".encode() + log.read(COPIED_BYTES)


def _is_url(path: str) -> bool:
    return "://" in path


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path) if not _is_url(path) else None
    except FileNotFoundError:
        return None


def _write(path: str, payload: bytes) -> None:
    """Replaces the file atomically: a reader sees the old content or the new one."""
    if _is_url(path):
        import fsspec

        filesystem, name = fsspec.core.url_to_fs(path)
        filesystem.pipe_file(name, payload)
        return
    folder, name = os.path.split(path)
    part = os.path.join(folder, f".{name}.{uuid.uuid4().int}.part")  # nobody can plant a link of that name
    os.makedirs(folder, exist_ok=True)
    try:
        with open(part, "xb") as file:
            file.write(payload)
        # Renamed at the end: a copy that was cut off by a crash never has the final name.
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            log_mark.delete(part)
        raise
