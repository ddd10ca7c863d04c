"""A process beside the training process that compiles the programs of another gang ahead of need, and ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from cluster.agent.child_process import ChildProcess, spawn
from cluster.agent.logs import Logs
from cluster.agent.process_record import ExitStatus, ProcessRecord

NICENESS = 10
"""Training has priority. Even where it uses all cores, a process with this niceness still gets a tenth of a core."""
STOP_TIMEOUT_S = 60.0
"""How long to wait for a killed process to be gone."""


class Precompilation:
    """Runs at most one such process on a host. Thread-safe."""

    def __init__(self, module: str, env: Mapping[str, str], logs: Logs):
        self._module, self._env, self._logs = module, env, logs
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._child: ChildProcess | None = None
        self._closed = False

    def run(self, preparation: Mapping[str, Any], orders: Mapping[str, Any], timeout_s: float) -> str | None:
        """Runs the process and waits for its end. Returns what went wrong; None if all is compiled. Ends an earlier run first."""
        self.stop()
        with self._turn:
            child, process, ended = self._start(preparation, orders)
            if child is None:
                return "this host does not train"
            in_time = ended.wait(timeout_s)
            self.stop()
            child.wait_gone(STOP_TIMEOUT_S)
            with self._lock:
                self._child = None
        return None if process.done else _problem(process, in_time, timeout_s)

    def stop(self) -> None:
        """Kills the running process without waiting: the machine is needed for something else."""
        with self._lock:
            if self._child is not None:
                self._child.kill()

    def close(self) -> None:
        """Kills the running process, lets no other begin, and returns when it is gone."""
        with self._lock:
            self._closed = True
        self.stop()
        with self._turn:  # `run` holds it until its process is gone
            pass

    def _start(
        self, preparation: Mapping[str, Any], orders: Mapping[str, Any]
    ) -> tuple[ChildProcess | None, ProcessRecord, threading.Event]:
        ended = threading.Event()
        log_path, _ = self._logs.new(f"precompilations-{os.getpid()}.log")
        with self._lock:  # also around the spawn: `stop` must not miss a process that has just been started
            if self._closed:
                return None, ProcessRecord(0, log_path), ended
            child = self._child = spawn(self._module, env=self._env, first_line=preparation, log_path=log_path)
        process = ProcessRecord(child.pid, log_path)
        # At once: on Linux a thread gets its niceness from the thread that starts it, so later is too late for some.
        os.setpriority(os.PRIO_PROCESS, child.pid, NICENESS)
        child.send(orders)

        def on_exit(how: ExitStatus) -> None:
            process.end(how, child.log_tail())
            self._logs.copy()
            ended.set()

        child.watch(process.observe, on_exit)
        return child, process, ended


def _problem(process: ProcessRecord, in_time: bool, timeout_s: float) -> str:
    if not in_time:
        return f"not done within {timeout_s:g} s (phase {process.phase})"
    if process.halted:
        return "it was stopped"
    if process.exception is not None:
        return f"{process.exception['type']}: {process.exception['message']}"
    return f"it ended in the phase {process.phase}; see {process.log_path}"
