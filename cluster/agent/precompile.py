"""A process beside the training process that compiles ahead of need what another gang would run, and ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from cluster.agent.child_process import Exit, spawn
from cluster.agent.logs import Logs
from cluster.agent.process_record import ProcessRecord

NICENESS = 10
"""The training comes first; but where it takes all cores, this still comes to an end (a tenth of a core at least)."""
STOP_TIMEOUT_S = 60.0
"""For a process that was killed to be gone."""


class Precompilation:
    """At most one such process on a host. Any thread may call."""

    def __init__(self, module: str, env: Mapping[str, str], logs: Logs):
        self._module, self._env, self._logs = module, env, logs
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._life: ProcessRecord | None = None
        self._closed = False

    def run(self, preparation: dict[str, Any], orders: dict[str, Any], timeout_s: float) -> str | None:
        """Waits for its end; returns what went wrong, None if all is compiled. One that still runs is ended first."""
        self.stop()
        with self._turn:
            life, ended = self._start(preparation, orders)
            if life is None:
                return "this host does not train"
            in_time = ended.wait(timeout_s)
            self.stop()
            life.child.wait_gone(STOP_TIMEOUT_S)
            with self._lock:
                self._life = None
        return None if life.done else _problem(life, in_time, timeout_s)

    def stop(self) -> None:
        """Ends the one that runs, without waiting for that: its machine is needed for something else."""
        with self._lock:
            if self._life is not None:
                self._life.child.kill()

    def close(self) -> None:
        """The same, and no other begins; returns when it is gone."""
        with self._lock:
            self._closed = True
        self.stop()
        with self._turn:
            pass

    def _start(self, preparation: dict[str, Any], orders: dict[str, Any]) -> tuple[ProcessRecord | None, threading.Event]:
        ended = threading.Event()
        log_path, _ = self._logs.new(f"precompilations-{os.getpid()}.log")
        with self._lock:
            if self._closed:
                return None, ended
            life = self._life = ProcessRecord(spawn(self._module, env=self._env, first_line=preparation, log_path=log_path))
        os.setpriority(os.PRIO_PROCESS, life.child.pid, NICENESS)
        life.child.send(orders)

        def on_exit(how: Exit) -> None:
            life.end(how, life.child.log_tail())
            self._logs.copy()
            ended.set()

        life.child.watch(life.note, on_exit)
        return life, ended


def _problem(life: ProcessRecord, in_time: bool, timeout_s: float) -> str:
    if not in_time:
        return f"not done within {timeout_s:g} s (phase {life.phase})"
    if life.halted:
        return "it was stopped"
    if life.exception is not None:
        return f"{life.exception['type']}: {life.exception['message']}"
    return f"it ended in the phase {life.phase}; see {life.child.log_path}"
