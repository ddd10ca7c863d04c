"""What a process is doing, seen from outside."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

from cluster.agent.child_process import ChildProcess

STOPPED = ("T", "t")
"""States of a process that a signal, or a debugger, holds."""
_DUMP_TIMEOUT_S = 15.0
_FAULTHANDLER_TIMEOUT_S = 2.0


def process_state(pid: int) -> str:
    """What the kernel says a process is doing: `D (disk sleep)` cannot be killed. `gone` if there is no such process."""
    return _status(pid).get("State", "gone")


def stacks(child: ChildProcess) -> str:
    """Python stacks of all threads: from py-spy, which reads a process that cannot answer; else from the process itself."""
    dump, trouble = _py_spy(child.pid)
    if dump:
        return dump
    state = process_state(child.pid)
    if state.startswith(STOPPED):
        return f"no stacks of process {child.pid}, which is {state} and cannot answer: py-spy: {trouble}"
    own = _faulthandler(child)
    return own or f"no stacks of process {child.pid} ({state}): py-spy: {trouble}; it has no handler for SIGUSR1 that answers"


def _py_spy(pid: int) -> tuple[str, str]:
    """(stacks, what went wrong): one of them is empty."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    program = beside if os.path.exists(beside) else shutil.which("py-spy")
    if program is None:
        return "", "not installed"
    command = [program, "dump", "--full-filenames", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DUMP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {_DUMP_TIMEOUT_S:g} s"
    return (done.stdout, "") if done.returncode == 0 else ("", done.stderr.strip())


def _faulthandler(child: ChildProcess) -> str:
    """What a handler for SIGUSR1 writes to the log. Without a handler the signal would kill the process: it is not sent."""
    caught = int(_status(child.pid).get("SigCgt", "0"), 16)
    if not caught >> (signal.SIGUSR1 - 1) & 1:
        return ""
    start = os.path.getsize(child.log_path)
    child.signal(signal.SIGUSR1)
    deadline, size = time.monotonic() + _FAULTHANDLER_TIMEOUT_S, start
    while time.monotonic() < deadline:
        time.sleep(0.05)
        size, before = os.path.getsize(child.log_path), size
        if size == before > start:
            break
    with open(child.log_path, "rb") as log:
        log.seek(start)
        return log.read().decode(errors="replace")


def _status(pid: int) -> dict[str, str]:
    try:
        with open(f"/proc/{pid}/status") as file:
            return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except (FileNotFoundError, ProcessLookupError):
        return {}
