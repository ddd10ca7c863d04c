"""A child process that cannot outlive its parent, watched until its whole process group is gone.

The child runs in a separate session. Three mechanisms end it with its parent, since none of them covers all cases:

- the kernel (`PR_SET_PDEATHSIG`) kills it at once, but only the child itself, and already when the *thread* that started it ends:
  that thread must live as long as the parent;
- a small guard in its process group kills the whole group, data workers included, when the pipe from the parent breaks;
- the end of its standard input, at which a well-behaved child exits.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, cast

import cluster
from cluster.agent.process_record import ExitStatus
from cluster.agent.snapshot_memory import Slots
from cluster.hosts import compiler_flags, environment
from gangway.foreign_errors import CRASHED
from gangway.storage.durable import no_link
from gangway.wire.events import Event, problem_for_agent
from gangway.wire.orders import SNAPSHOT_SOCKET

_log = logging.getLogger(__name__)

LOG_TAIL_LINES = 30
MAX_STACK_LINES = 150
"""Of a crash. Faulthandler prints 100 frames at most."""
_LOG_TAIL_BYTES = 16 * 1024
_PIPE_GRACE_S = 5.0
"""How long to read on from the pipe of a dead process: a descendant that has left the process group may hold the pipe open."""

RAY_TOKEN = "RAY_AUTH_TOKEN"
"""Ray's variable for the token of a cluster: a process that has it may connect."""

_PF_EXITING = 0x4
"""The kernel's flag of a process that is exiting (include/linux/sched.h)."""

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
"""A small program that forks the guard and then becomes the child. Not done in `preexec_fn`: the parent has threads, and a fork
copies the locks that they hold."""


def child_env(inherited: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the parent with the `changes` for the child.

    XLA's flags are joined (`cluster.hosts.compiler_flags`). What is dropped of the parent's, and why, is in
    `cluster.hosts.environment`.
    """
    kept = environment.taken(inherited)
    return {**kept, **compiler_flags.joined(kept, changes)}


def import_path(paths: list[str]) -> list[str]:
    """Returns the entries of the parent's `sys.path` that a new Python would not have: the project's and the user's code."""
    # The project first, whatever `sys.path` says: the child runs a module of it.
    project = os.path.dirname(os.path.dirname(os.path.abspath(cluster.__file__)))
    # An installed project lies among the other packages, which a new Python has. Before the user's code, and before the standard
    # library, they would hide modules of the same names.
    return list(
        dict.fromkeys(os.path.abspath(path) for path in (project, *paths) if os.path.isdir(path) and not _is_builtin(path))
    )


def _is_builtin(path: str) -> bool:
    """Returns whether a folder is among those that every Python of this environment imports from."""
    standard = sysconfig.get_paths()
    builtin = (os.path.realpath(standard[name]) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return (os.path.realpath(path) + os.sep).startswith(tuple(builtin))


def log_tail(path: str, lines: int = LOG_TAIL_LINES) -> list[str]:
    """Returns the last lines of a log file: none if there is no file, an error message if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _LOG_TAIL_BYTES))
            found = file.read().decode(errors="replace").splitlines()
            # Of a crash the whole stack, which begins where it was.
            crash = max((at for at, line in enumerate(found) if line.startswith(CRASHED)), default=len(found))
            return found[-max(lines, min(len(found) - crash, MAX_STACK_LINES)) :]
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"(the log {path} cannot be read: {error})"]


def spawn(
    module: str, *, env: Mapping[str, str], first_line: Mapping[str, Any], log_path: str, num_slots: int = 0
) -> ChildProcess:
    """Starts `python -m module` and sends it its first line. The calling thread must live as long as the child should.
    `num_slots`: for how many snapshots it gets memory."""
    slots = Slots(num_slots) if num_slots else None
    theirs = {} if slots is None else {SNAPSHOT_SOCKET: str(slots.theirs.fileno())}
    # Pipe ends that stay here are not inheritable: if another child held the guard's pipe too, it would never break.
    events, events_child = os.pipe()
    guard_child, guard = os.pipe()
    here = str(os.getpid())
    # Isolated and without `site`: it starts fast, and runs none of the user's code.
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, here, str(guard_child), str(events_child), module]
    try:
        # Appending matters: `logs.cut` empties the file under the writer, which then goes on at its beginning.
        with open(log_path, "ab", opener=no_link) as log:
            popen = subprocess.Popen(
                launcher,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(events_child, guard_child, *map(int, theirs.values())),
                env={**env, "EVENT_FD": str(events_child), **theirs},
                start_new_session=True,  # a group of its own for `killpg`; Ctrl-C in a terminal does not reach it
            )
    except OSError:
        os.close(events)
        os.close(guard)
        if slots is not None:
            slots.close()
        raise
    finally:
        # Also after success: with this copy open, the reader would never see the end of the child's events.
        os.close(events_child)
        os.close(guard_child)
        if slots is not None:
            slots.theirs.close()
    child = ChildProcess(popen, os.fdopen(events, "rb"), guard, log_path, slots)
    child.send(first_line)
    return child


class ChildProcess:
    """A running child. `spawn` makes one; nothing is read from it before `watch`."""

    def __init__(self, popen: subprocess.Popen, events: BinaryIO, guard: int, log_path: str, slots: Slots | None = None):
        self.pid = popen.pid
        self.log_path, self.slots = log_path, slots
        self._popen, self._events, self._guard = popen, events, guard
        self._signals = threading.Lock()
        self._input = threading.Lock()
        self._reaped = False
        self._killed = False
        self._gone = threading.Event()

    def watch(self, on_event: Callable[[Event], None], on_exit: Callable[[ExitStatus], None]) -> None:
        """Calls `on_event` for every event, then `on_exit` once, from background threads; never two calls at a time."""
        reader = threading.Thread(target=self._read, args=(on_event,), name=f"events of {self.pid}", daemon=True)
        reader.start()
        threading.Thread(target=self._wait, args=(reader, on_exit), name=f"end of {self.pid}", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> bool:
        """Writes one line to the child. Returns False if the child is gone."""
        assert self._popen.stdin is not None
        try:
            # Two threads may send at once: their lines must not mix.
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
        """Sends SIGKILL to the child and its whole process group. This ends a stopped or frozen process too."""
        with self._signals:
            if self._reaped:  # the pid may belong to another process by now
                return
            gone = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
            # A process that was dying already was not killed by us: its end is a failure.
            self._killed |= not gone and not _is_dying(self.pid)
            _kill_group(self.pid)

    def wait_gone(self, timeout_s: float) -> bool:
        """Returns True once the child is gone and `on_exit` has returned."""
        return self._gone.wait(timeout_s)

    def log_tail(self) -> list[str]:
        """The last lines that the child printed."""
        return log_tail(self.log_path)

    def _read(self, on_event: Callable[[Event], None]) -> None:
        for line in self._events:
            if line.endswith(b"\n"):  # else it was cut off by the death of the writer
                try:
                    on_event(_parse(line))
                except Exception:  # a thread's boundary: an agent that hears nothing more would take its process for hung
                    _log.exception("an event of process %d was not handled: %r", self.pid, line[:200])

    def _wait(self, reader: threading.Thread, on_exit: Callable[[ExitStatus], None]) -> None:
        # The dead child is reaped only after its group is killed: until then its pid cannot be given to another process.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        at_s = time.time()
        with self._signals:
            _kill_group(self.pid)
            status = self._popen.wait()
            self._reaped = True
        # Before `on_exit`: the last events (an exception, `done`) have to come before the exit.
        reader.join(_PIPE_GRACE_S)
        self._close()
        # If it ended otherwise although it was killed, its own end came first and counts as a failure.
        code, number = (status, None) if status >= 0 else (None, -status)
        on_exit(ExitStatus(code=code, signal=number, at_s=at_s, by_parent=self._killed and number == signal.SIGKILL))
        self._gone.set()

    def _close(self) -> None:
        os.close(self._guard)
        assert self._popen.stdin is not None
        with self._input, suppress(BrokenPipeError):
            self._popen.stdin.close()


def _parse(line: bytes) -> Event:
    now_s = time.time()
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        event = None
    if problem := problem_for_agent(event):
        event = {"ev": "note", "message": f"not an event ({problem}): {line[:200]!r}"}
    at_s = event.get("t")
    # The user's code may have written the line: what the agent and the driver reckon with is a number.
    return cast("Event", {**event, "t": at_s if type(at_s) in (int, float) and math.isfinite(at_s) else now_s})


def _is_dying(pid: int) -> bool:
    """Returns whether the process is exiting already, or has a SIGKILL pending from somebody else.

    A process with much memory needs milliseconds to exit, and is no zombie until then: `waitid` does not show it.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # After the last `)`: the name of a process, in parentheses, may hold spaces and parentheses itself.
            flags = int(file.read().rpartition(b")")[2].split()[6])
        with open(f"/proc/{pid}/status") as file:
            pending = [int(line.split()[1], 16) for line in file if line.startswith(("SigPnd:", "ShdPnd:"))]
    except OSError:
        return True
    return bool(flags & _PF_EXITING) or any(signals >> (signal.SIGKILL - 1) & 1 for signals in pending)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
