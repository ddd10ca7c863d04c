"""The state and the Python stacks of a process, read from outside."""

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
    """Returns the state of a process in the kernel; `gone` if there is no such process. `D (disk sleep)` cannot be killed."""
    return _status(pid).get("State", "gone")


def stacks(child: ChildProcess) -> str:
    """Returns the Python stacks of all threads: from py-spy, which can read a frozen process, else from the process itself."""
    dump, problem = _py_spy(child.pid)
    if dump:
        return dump
    state = process_state(child.pid)
    if state.startswith(STOPPED):
        return f"no stacks of process {child.pid}, which is {state} and cannot answer: py-spy: {problem}"
    dump = _faulthandler(child)
    return dump or f"no stacks of process {child.pid} ({state}): py-spy: {problem}; it has no handler for SIGUSR1 that answers"


def _py_spy(pid: int) -> tuple[str, str]:
    """Returns (stacks, what went wrong): one of them is empty."""
    in_venv = os.path.join(os.path.dirname(sys.executable), "py-spy")  # a virtual environment need not be in PATH
    program = in_venv if os.path.exists(in_venv) else shutil.which("py-spy")
    if program is None:
        return "", "not installed"
    # Nonblocking: otherwise py-spy would pause the process while it reads.
    command = [program, "dump", "--full-filenames", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DUMP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {_DUMP_TIMEOUT_S:g} s"
    return (done.stdout, "") if done.returncode == 0 else ("", done.stderr.strip())


def _faulthandler(child: ChildProcess) -> str:
    """Returns what faulthandler writes to the log on SIGUSR1. Without a handler the signal would kill the process: it is not
    sent."""
    caught = int(_status(child.pid).get("SigCgt", "0"), 16)
    if not caught >> (signal.SIGUSR1 - 1) & 1:
        return ""
    start = os.path.getsize(child.log_path)
    child.signal(signal.SIGUSR1)
    deadline, size = time.monotonic() + _FAULTHANDLER_TIMEOUT_S, start
    while time.monotonic() < deadline:
        time.sleep(0.05)
        size, before = os.path.getsize(child.log_path), size
        if size == before > start:  # it has grown, and grows no more
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
