"""The warm standby: a process that has done everything that needs no device, and waits for its orders."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from cluster.agent.child_process import ExitStatus, spawn
from cluster.agent.events import ProcessEvent
from cluster.agent.logs import Logs
from cluster.agent.process_record import ProcessRecord, note

MAX_DEATHS = 3
"""How many standbys in a row may be killed from outside and replaced. The next such death is a failure of the generation."""


class Standby:
    """Keeps at most one standby; `request` starts a new one. Callers hold `changed`, the lock of the owner, which is notified of
    every change. `on_event` and `on_exit` are called without the lock, for all processes that were ever started."""

    def __init__(
        self,
        module: str,
        env: Mapping[str, str],
        logs: Logs,
        changed: threading.Condition,
        on_event: Callable[[ProcessRecord, ProcessEvent], None],
        on_exit: Callable[[ProcessRecord, ExitStatus], None],
    ):
        self.module = module
        self.process: ProcessRecord | None = None
        self.preparation: dict[str, Any] | None = None
        self.spawn_error: OSError | None = None
        self._env, self._logs, self._changed = env, logs, changed
        self._on_event, self._on_exit = on_event, on_exit
        self._requested = self._closed = False
        self._deaths = self._num_spawned = 0
        # The kernel kills a child when the thread that started it ends. Ray's threads come and go, this one stays.
        threading.Thread(target=self._run, name="spawner", daemon=True).start()

    def prepare(self, preparation: dict[str, Any]) -> ProcessRecord | None:
        """Starts a standby with this preparation. Returns the old one if it had another preparation or is dead: the caller has to
        kill it."""
        if self.process is not None and preparation == self.preparation and self.process.alive:
            return None
        old, self.process = self.process, None
        self.preparation = preparation
        self.request()
        return old

    def request(self) -> None:
        """Has a standby started as soon as there is a preparation, unless there is one."""
        # A request comes for a new reason: earlier deaths do not count against it.
        self._requested, self._deaths, self.spawn_error = True, 0, None
        self._changed.notify_all()

    def settled(self) -> bool:
        """Returns whether `take` can be called: the standby is warm or dead, or none could be started."""
        return self.spawn_error is not None or (self.process is not None and (self.process.warm or not self.process.alive))

    def take(self) -> ProcessRecord | None:
        """Hands the standby over as it is, warm or not. Raises RuntimeError if none can be started."""
        if self.spawn_error is not None:
            raise RuntimeError(f"cannot start `{self.module}`: {self.spawn_error}") from self.spawn_error
        process, self.process, self._deaths = self.process, None, 0
        return process

    def ended(self, process: ProcessRecord) -> None:
        """Handles the end of the standby: another one is started, unless it would end in the same way."""
        assert process.exit is not None
        if process.excusable() and self._deaths < MAX_DEATHS:
            self.process, self._requested = None, True
            self._deaths += 1
        else:
            # Kept for the generation that takes this process: the next standby would end in the same way.
            process.early_events.append(process.exit)

    def close(self) -> ProcessRecord | None:
        """Stops starting standbys. Returns the last one."""
        self._closed = True
        self._changed.notify_all()
        process, self.process = self.process, None
        return process

    def state(self) -> str:
        if self.process is None:
            return "none"
        if not self.process.alive:
            return "failed"
        return "warm" if self.process.warm else "starting"

    def describe_slow(self, process: ProcessRecord | None, waited_s: float) -> str:
        """Explains why no standby was warm after this time. `process` is the one that was taken. It reads a log: do not hold the
        lock."""
        if self.preparation is None:
            return f"no preparation has come within {waited_s:g} s; call prepare"
        if process is None:
            return f"no standby could be started within {waited_s:g} s"
        tail = "\n".join(process.child.log_tail()) or "(nothing)"
        phase = f" (phase {process.phase})" if process.phase else ""
        return f"the standby, process {process.child.pid}{phase}, is not ready after {waited_s:g} s; it printed:\n{tail}"

    def _due(self) -> bool:
        return self._requested and self.process is None and self.preparation is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._due())
                if self._closed:
                    return
                self._requested = False
                preparation = self.preparation
                self._num_spawned += 1
            assert preparation is not None
            # Outside the lock: starting a process may take long on a busy machine, and every call of the
            # driver would wait.
            self._start(preparation)

    def _start(self, preparation: dict[str, Any]) -> None:
        log_path, log_problem = self._logs.new(f"process-{os.getpid()}-{self._num_spawned:04d}.log")
        try:
            child = spawn(self.module, env=self._env, first_line=preparation, log_path=log_path)
        except OSError as error:  # kept for `take` to raise: this thread must not end
            with self._changed:
                self.spawn_error = error
                self._changed.notify_all()
            return
        process = ProcessRecord(child)
        if log_problem:
            process.early_events.append(note(log_problem))
        with self._changed:
            # Meanwhile another preparation may have come: the process was made for the wrong one.
            stale = self._closed or preparation is not self.preparation
            if not stale:
                self.process = process
                self._changed.notify_all()
        # Watched even if it is stale: only the watching thread reaps it after the kill.
        child.watch(lambda event: self._on_event(process, event), lambda how: self._on_exit(process, how))
        if stale:
            child.kill()
