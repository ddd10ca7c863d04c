"""What the processes of one host print: files on a disk of the machine itself, and copies of them in the run's folder.

The run's folder may be on shared storage, and that may hang. One thread alone touches it, and nobody waits for that thread but
`close`, and that not for long. What could not be copied is copied later, by the next agent of the host on this machine at last.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

LOG_DIR = "~/.cache/gangway/logs"
MAX_FILES, MAX_BYTES = 100, 1 << 28
"""That are kept of one host, on its machine and in the run's folder each: the newest."""
MAX_LOG_BYTES = 1 << 26
"""A process that prints more than this has its log cut: the end of what was there stays beside it, as `NAME.1`."""
COPIED_BYTES = 1 << 22
"""Of the end of each log."""
COPY_EVERY_S = 30.0
"""While a process runs; at its end at once."""
TIDY_EVERY_S = 30.0
CLOSE_TIMEOUT_S = 2.0
"""For the last copies."""
KEPT_RUN_DAYS = 30
"""A machine forgets the logs of a run that nothing was done for so long."""


class Logs:
    """The logs of one host of a run. Any thread may call.

    They are written in `ROOT/RUN/HOST`, a local folder, and copied to `copies`, a folder or a URL. `on_trouble` is told when
    they cannot be copied, once until they can be again.
    """

    def __init__(self, root: str, run_name: str, host: str, copies: str, on_trouble: Callable[[str], None]):
        self._run_folder = os.path.join(os.path.expanduser(root), run_name)
        self.folder, self.copies = os.path.join(self._run_folder, host), copies
        self._on_trouble = on_trouble
        self._sizes: dict[str, int] = {}
        """Of each log when it was last copied: it only grows, so that one of the same size is the same."""
        self._in_trouble = False
        self._wanted, self._closing, self._closed = threading.Event(), threading.Event(), threading.Event()
        threading.Thread(target=self._keep_tidy, name="logs", daemon=True).start()
        threading.Thread(target=self._keep_copying, name="copies of logs", daemon=True).start()

    def new(self, name: str) -> tuple[str, str | None]:
        """A file for what a child prints, and what went wrong: nothing stops for want of a log."""
        path = os.path.join(self.folder, name)
        try:
            os.makedirs(self.folder, exist_ok=True)
            open(path, "ab").close()
        except OSError as error:
            return os.devnull, f"what the training process prints is lost: its log {path} cannot be opened: {error}"
        return path, None

    def copy_of(self, path: str) -> str | None:
        """Where a log is copied to."""
        return None if path == os.devnull else f"{self.copies}/{os.path.basename(path)}"

    def copy(self) -> None:
        """Has all that is new copied soon. Never waits."""
        self._wanted.set()

    def close(self, timeout_s: float) -> bool:
        """The same, for the last time; False if that was not done in time."""
        self._closing.set()
        self._wanted.set()
        return self._closed.wait(timeout_s)

    # ------------------------------------------------------------------ on the machine

    def _keep_tidy(self) -> None:
        _forget_old(os.path.dirname(self._run_folder))
        while not self._closing.wait(TIDY_EVERY_S):
            with suppress(OSError):  # of the local disk: whoever opens the next log says so
                os.utime(self._run_folder)
                for path in _files(self.folder):
                    cut(path)
                keep_newest(self.folder)

    # ------------------------------------------------------------------ in the run's folder

    def _keep_copying(self) -> None:
        while not self._closed.is_set():
            self._wanted.wait(COPY_EVERY_S)
            self._wanted.clear()
            last = self._closing.is_set()
            try:
                self._copy_all()
                self._in_trouble = False
            except Exception as error:
                self._tell(error)
            if last:
                self._closed.set()

    def _copy_all(self) -> None:
        copied = [self._copy(path) for path in _files(self.folder)]
        if any(copied) and not _is_url(self.copies):
            keep_newest(self.copies)

    def _copy(self, path: str) -> bool:
        """Whether there was something new."""
        try:
            size = os.path.getsize(path)
            if size == self._sizes.get(path):
                return False
            payload = _end_of(path, size)
        except FileNotFoundError:  # meanwhile it was one too many
            return False
        copy = f"{self.copies}/{os.path.basename(path)}"
        is_new = path in self._sizes or _size(copy) != len(payload)  # else an agent before this one has copied it
        if is_new:
            _write(copy, payload)
        self._sizes[path] = size
        return is_new

    def _tell(self, error: Exception) -> None:
        if not self._in_trouble:
            self._in_trouble = True
            why, where = f"{type(error).__name__}: {error}", f"{self.folder} on {socket.gethostname()}"
            self._on_trouble(f"what the training process prints cannot be copied to {self.copies} ({why}); it is in {where}")


def cut(path: str, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Empties a log that has grown too large, and keeps its end beside it. Whoever writes goes on at the beginning."""
    size = os.path.getsize(path)
    if size <= max_bytes or path.endswith(".1"):
        return
    with open(path, "rb") as log, open(f"{path}.1", "wb") as kept:
        log.seek(size - min(size, COPIED_BYTES))
        shutil.copyfileobj(log, kept)
    os.truncate(path, 0)


def keep_newest(folder: str, max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES) -> None:
    """Deletes the oldest files of a folder, so that there are at most so many, of so many bytes together."""
    found = []
    for path in _files(folder):
        with suppress(FileNotFoundError):
            about = os.stat(path)
            found.append((about.st_mtime_ns, about.st_size, path))
    total_bytes = 0
    for number, (_, size, path) in enumerate(sorted(found, reverse=True)):
        total_bytes += size
        if number >= max_files or (number > 0 and total_bytes > max_bytes):
            with suppress(FileNotFoundError):
                os.unlink(path)


def _forget_old(root: str) -> None:
    limit_s = time.time() - KEPT_RUN_DAYS * 24 * 3600
    with suppress(OSError), os.scandir(root) as runs:
        for run in runs:
            if run.is_dir() and run.stat().st_mtime < limit_s:
                shutil.rmtree(run.path, ignore_errors=True)


def _files(folder: str) -> Iterator[str]:
    with suppress(FileNotFoundError), os.scandir(folder) as found:
        yield from sorted(entry.path for entry in found if entry.is_file(follow_symlinks=False))


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
    """Replaces the file at once: a reader finds the old one or the new one."""
    if _is_url(path):
        import fsspec

        filesystem, name = fsspec.core.url_to_fs(path)
        filesystem.pipe_file(name, payload)
        return
    folder, name = os.path.split(path)
    part = os.path.join(folder, f".{name}.{os.getpid()}.part")
    os.makedirs(folder, exist_ok=True)
    try:
        with open(part, "wb") as file:
            file.write(payload)
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            os.unlink(part)
        raise
