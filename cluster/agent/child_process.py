"""One child process: started so that nothing of it survives its parent, watched until nothing of it is left.

The child runs in a session of its own. Three things end it with its parent, each where the others do not reach:
the kernel (`PR_SET_PDEATHSIG`), at once, but the child alone, and when the *thread* that started it ends, so that thread must
live as long as the parent; a small guard in its process group, which kills the whole group, data workers included, when its
pipe from the parent breaks; and the end of its standard input, which a well-behaved child takes as an order to leave.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import cluster

LOG_TAIL_LINES = 30
_LOG_TAIL_BYTES = 16 * 1024
_PIPE_GRACE_S = 5.0
"""How long to wait for the rest of the pipe from a dead process: something that left its group may hold it open."""

RAY_TOKEN = "RAY_AUTH_TOKEN"
"""The variable with which any process may enter a Ray cluster that asks for a token."""

_PF_EXITING = 0x4
"""The kernel's flag of a process on its way out (include/linux/sched.h)."""

_LAUNCHER = """
import ctypes, os, signal, sys
parent, guard, events, module = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if os.fork() == 0:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for fd in (0, 1, 2, events):
        os.close(fd)
    os.read(guard, 1)
    os.killpg(0, signal.SIGKILL)
os.close(guard)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != parent:
    os.killpg(0, signal.SIGKILL)
os.execv(sys.executable, [sys.executable, "-u", "-m", module])
"""
"""Becomes the child. Done here, not between fork and exec: the parent has threads, whose locks a fork copies locked."""


@dataclass(frozen=True)
class Exit:
    """How a process ended."""

    code: int | None
    """None if a signal ended it."""
    signal: int | None
    at_s: float
    by_parent: bool
    """It lived until `kill` was called: its end is no failure of its own."""


def child_env(inherited: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The parent's environment with the child's own variables.

    XLA's flags are joined (a later one wins). What the parent says of TPU slices is dropped: it may be of slices long gone,
    and a process that believes it hangs. So is the token of the Ray cluster: a child that needs it must be given it.
    """
    kept = {name: value for name, value in inherited.items() if not name.startswith("MEGASCALE_") and name != RAY_TOKEN}
    flags = " ".join(part for part in (kept.get("XLA_FLAGS"), own.get("XLA_FLAGS")) if part)
    return {**kept, **own, **({"XLA_FLAGS": flags} if flags else {})}


def import_path(paths: list[str]) -> list[str]:
    """Those of the parent's `sys.path` that a fresh Python does not have by itself: where the project and the user's code are."""
    known = sysconfig.get_paths()
    builtin = {os.path.realpath(known[name]) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    wanted = [os.path.dirname(os.path.dirname(os.path.abspath(cluster.__file__)))]
    for path in paths:
        if os.path.isdir(path) and not any((os.path.realpath(path) + os.sep).startswith(prefix) for prefix in builtin):
            wanted.append(os.path.abspath(path))
    return list(dict.fromkeys(wanted))


def log_tail(path: str, lines: int = LOG_TAIL_LINES) -> list[str]:
    """The last lines of a log file; none if there is no such file; why not, if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"(the log {path} cannot be read: {error})"]


def spawn(module: str, *, env: Mapping[str, str], first_line: dict[str, Any], log_path: str) -> ChildProcess:
    """Starts `python -m module` and sends it its first line. The calling thread must live as long as the child should."""
    events, events_child = os.pipe()
    guard_child, guard = os.pipe()
    here = str(os.getpid())
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, here, str(guard_child), str(events_child), module]
    try:
        with open(log_path, "ab") as log:
            popen = subprocess.Popen(
                launcher,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(events_child, guard_child),
                env={**env, "EVENT_FD": str(events_child)},
                start_new_session=True,
            )
    except OSError:
        os.close(events)
        os.close(guard)
        raise
    finally:
        os.close(events_child)
        os.close(guard_child)
    child = ChildProcess(popen, os.fdopen(events, "rb"), guard, log_path)
    child.send(first_line)
    return child


class ChildProcess:
    """A child between its start and its end. `spawn` makes one; nothing is read from it before `watch`."""

    def __init__(self, popen: subprocess.Popen, events: BinaryIO, guard: int, log_path: str):
        self.pid = popen.pid
        self.log_path = log_path
        self._popen, self._events, self._guard = popen, events, guard
        self._signals = threading.Lock()
        self._input = threading.Lock()
        self._reaped = False
        self._killed = False
        self._gone = threading.Event()

    def watch(self, on_event: Callable[[dict[str, Any]], None], on_exit: Callable[[Exit], None]) -> None:
        """Calls back for every event, then once for the exit, from threads of its own; never two at a time."""
        reader = threading.Thread(target=self._read, args=(on_event,), name=f"events of {self.pid}", daemon=True)
        reader.start()
        threading.Thread(target=self._wait, args=(reader, on_exit), name=f"end of {self.pid}", daemon=True).start()

    def send(self, message: dict[str, Any]) -> bool:
        """Writes one line to the child; False if it is gone."""
        assert self._popen.stdin is not None
        try:
            with self._input:
                self._popen.stdin.write(json.dumps(message).encode() + b"\n")
                self._popen.stdin.flush()
        except (BrokenPipeError, ValueError):  # ValueError: closed after the exit
            return False
        return True

    def signal(self, number: int) -> None:
        """Sends a signal to the child alone."""
        with self._signals:
            if not self._reaped:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL for the child and everything in its group; a stopped or frozen one ends too."""
        with self._signals:
            if self._reaped:  # the id may be another process's by now
                return
            gone = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
            self._killed |= not gone and not _is_dying(self.pid)
            _kill_group(self.pid)

    def wait_gone(self, timeout_s: float) -> bool:
        """True once the child is gone and `on_exit` has returned."""
        return self._gone.wait(timeout_s)

    def log_tail(self) -> list[str]:
        """The last lines that the child printed."""
        return log_tail(self.log_path)

    def _read(self, on_event: Callable[[dict[str, Any]], None]) -> None:
        for line in self._events:
            if line.endswith(b"\n"):  # else it was cut off by the death of the writer
                on_event(_parse(line))

    def _wait(self, reader: threading.Thread, on_exit: Callable[[Exit], None]) -> None:
        # The dead child is left unreaped until its group is gone too: its id cannot be given to another process meanwhile.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        at_s = time.time()
        with self._signals:
            _kill_group(self.pid)
            status = self._popen.wait()
            self._reaped = True
        reader.join(_PIPE_GRACE_S)
        self._close()
        code, number = (status, None) if status >= 0 else (None, -status)
        on_exit(Exit(code=code, signal=number, at_s=at_s, by_parent=self._killed and number == signal.SIGKILL))
        self._gone.set()

    def _close(self) -> None:
        os.close(self._guard)
        assert self._popen.stdin is not None
        with self._input, suppress(BrokenPipeError):
            self._popen.stdin.close()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        return {"t": time.time(), "ev": "note", "message": f"not an event: {line[:200]!r}"}
    return event


def _is_dying(pid: int) -> bool:
    """Whether somebody else has killed it: a process with much memory takes milliseconds to go, and is no zombie until then."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            flags = int(file.read().rpartition(b")")[2].split()[6])
        with open(f"/proc/{pid}/status") as file:
            pending = [int(line.split()[1], 16) for line in file if line.startswith(("SigPnd:", "ShdPnd:"))]
    except OSError:
        return True
    return bool(flags & _PF_EXITING) or any(signals >> (signal.SIGKILL - 1) & 1 for signals in pending)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
