"""A process beside the training process that compiles the programs of another gang ahead of need, and ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from cluster.agent.child_process import ExitStatus, spawn
from cluster.agent.logs import Logs
from cluster.agent.process_record import ProcessRecord

NICENESS = 10
"""Training has priority. Even where it uses all cores, a process with this niceness still gets a tenth of a core."""
STOP_TIMEOUT_S = 60.0
"""How long to wait for a killed process to be gone."""


class Precompilation:
    """Runs at most one such process on a host. Thread-safe."""

    def __init__(self, module: str, env: Mapping[str, str], logs: Logs):
        self._module, self._env, self._logs = module, env, logs
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._process: ProcessRecord | None = None
        self._closed = False

    def run(self, preparation: dict[str, Any], orders: dict[str, Any], timeout_s: float) -> str | None:
        """Runs the process and waits for its end. Returns what went wrong; None if all is compiled. Ends an earlier run first."""
        self.stop()
        with self._turn:
            process, ended = self._start(preparation, orders)
            if process is None:
                return "this host does not train"
            in_time = ended.wait(timeout_s)
            self.stop()
            process.child.wait_gone(STOP_TIMEOUT_S)
            with self._lock:
                self._process = None
        return None if process.done else _problem(process, in_time, timeout_s)

    def stop(self) -> None:
        """Kills the running process without waiting: the machine is needed for something else."""
        with self._lock:
            if self._process is not None:
                self._process.child.kill()

    def close(self) -> None:
        """Kills the running process, lets no other begin, and returns when it is gone."""
        with self._lock:
            self._closed = True
        self.stop()
        with self._turn:  # `run` holds it until its process is gone
            pass

    def _start(self, preparation: dict[str, Any], orders: dict[str, Any]) -> tuple[ProcessRecord | None, threading.Event]:
        ended = threading.Event()
        log_path, _ = self._logs.new(f"precompilations-{os.getpid()}.log")
        with self._lock:  # also around the spawn: `stop` must not miss a process that has just been started
            if self._closed:
                return None, ended
            process = self._process = ProcessRecord(spawn(self._module, env=self._env, first_line=preparation, log_path=log_path))
        # At once: on Linux a thread gets its niceness from the thread that starts it, so later is too late for some.
        os.setpriority(os.PRIO_PROCESS, process.child.pid, NICENESS)
        process.child.send(orders)

        def on_exit(how: ExitStatus) -> None:
            process.end(how, process.child.log_tail())
            self._logs.copy()
            ended.set()

        process.child.watch(process.observe, on_exit)
        return process, ended


def _problem(process: ProcessRecord, in_time: bool, timeout_s: float) -> str:
    if not in_time:
        return f"not done within {timeout_s:g} s (phase {process.phase})"
    if process.halted:
        return "it was stopped"
    if process.exception is not None:
        return f"{process.exception['type']}: {process.exception['message']}"
    return f"it ended in the phase {process.phase}; see {process.child.log_path}"
