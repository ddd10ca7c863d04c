"""Starts the training processes of an agent, one after the other, from a thread that lives as long as the agent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from cluster.agent import inputs
from cluster.agent.child_process import ChildProcess, spawn
from cluster.agent.logs import Logs
from cluster.agent.process_record import ProcessRecord, note


class Spawner:
    """Starts a process for each `request`. `on_start(process, child)` is called for each, then `on_input` with the news, and then
    `watch(process, child)`; all of them without a lock."""

    def __init__(
        self,
        module: str,
        env: Mapping[str, str],
        logs: Logs,
        on_start: Callable[[ProcessRecord, ChildProcess], None],
        on_input: Callable[[inputs.Input], None],
        watch: Callable[[ProcessRecord, ChildProcess], None],
    ):
        self._module, self._env, self._logs = module, env, logs
        self._on_start, self._on_input, self._watch = on_start, on_input, watch
        self._requests: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._num_spawned = 0
        # The kernel kills a child when the thread that started it ends. Ray's threads come and go, this one stays.
        threading.Thread(target=self._run, name="spawner", daemon=True).start()

    def request(self, preparation: Mapping[str, Any]) -> None:
        """Has a process started with this preparation. Never waits: starting a process may take long on a busy machine."""
        self._requests.put(preparation)

    def close(self) -> None:
        """Ends the thread, and with it the processes that it has started."""
        self._requests.put(None)

    def _run(self) -> None:
        while (preparation := self._requests.get()) is not None:
            self._start(preparation)

    def _start(self, preparation: Mapping[str, Any]) -> None:
        self._num_spawned += 1
        log_path, log_problem = self._logs.new(f"process-{os.getpid()}-{self._num_spawned:04d}.log")
        try:
            child = spawn(
                self._module,
                env=self._env,
                first_line=preparation,
                log_path=log_path,
                num_slots=preparation.get("snapshot_slots", 0),
            )
        except Exception as error:  # reported: this thread must not end
            self._on_input(inputs.SpawnFailed(error))
            return
        process = ProcessRecord(child.pid, log_path, self._logs.copy_of(log_path))
        if log_problem:
            process.early_events.append(note(log_problem, time.time()))
        self._on_start(process, child)
        self._on_input(inputs.Spawned(process, preparation))
        # Also if it is of no use any more, and was killed: only the watching thread reaps it.
        self._watch(process, child)
