"""The warm standby: a process that has done all that needs no device, and waits for its orders."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from cluster.agent.child_process import Exit, spawn
from cluster.agent.event_log import Event
from cluster.agent.logs import Logs
from cluster.agent.process_record import ProcessRecord, note

MAX_DEATHS = 3
"""Standbys that may be killed from outside, one after the other, before that is a failure like any other."""


class Standby:
    """Keeps at most one standby; a new one is started when `want` asks. Whoever calls holds `changed`, its owner's lock, which is
    notified of every change. `on_event` and `on_exit` are called, without the lock, for all processes ever started."""

    def __init__(
        self,
        module: str,
        env: Mapping[str, str],
        logs: Logs,
        changed: threading.Condition,
        on_event: Callable[[ProcessRecord, Event], None],
        on_exit: Callable[[ProcessRecord, Exit], None],
    ):
        self.module = module
        self.life: ProcessRecord | None = None
        self.preparation: dict[str, Any] | None = None
        self.spawn_error: OSError | None = None
        self._env, self._logs, self._changed = env, logs, changed
        self._on_event, self._on_exit = on_event, on_exit
        self._wanted = self._closed = False
        self._deaths = self._num_spawned = 0
        # The children die with the thread that starts them, and Ray's threads come and go: this one stays.
        threading.Thread(target=self._run, name="spawner", daemon=True).start()

    def prepare(self, preparation: dict[str, Any]) -> ProcessRecord | None:
        """Starts a standby with this preparation. Returns one that had another, or is dead: its end is the caller's to see to."""
        if self.life is not None and preparation == self.preparation and self.life.alive:
            return None
        old, self.life = self.life, None
        self.preparation = preparation
        self.want()
        return old

    def want(self) -> None:
        """Starts one, as soon as there is a preparation, unless there is one."""
        self._wanted, self._deaths, self.spawn_error = True, 0, None
        self._changed.notify_all()

    def settled(self) -> bool:
        """Whether there is something to take: a warm process, a dead one, or the reason why there is none."""
        return self.spawn_error is not None or (self.life is not None and (self.life.warm or not self.life.alive))

    def take(self) -> ProcessRecord | None:
        """Hands the standby over as it is. Raises RuntimeError if none can be started."""
        if self.spawn_error is not None:
            raise RuntimeError(f"cannot start `{self.module}`: {self.spawn_error}") from self.spawn_error
        life, self.life, self._deaths = self.life, None, 0
        return life

    def ended(self, life: ProcessRecord) -> None:
        """The standby has ended: another one follows, unless it would end in the same way."""
        assert life.exit is not None
        if life.excusable() and self._deaths < MAX_DEATHS:
            self.life, self._wanted = None, True
            self._deaths += 1
        else:
            life.early_events.append(life.exit)

    def close(self) -> ProcessRecord | None:
        """No more are started. Returns the last one."""
        self._closed = True
        self._changed.notify_all()
        life, self.life = self.life, None
        return life

    def state(self) -> str:
        if self.life is None:
            return "none"
        if not self.life.alive:
            return "failed"
        return "warm" if self.life.warm else "starting"

    def describe_slow(self, life: ProcessRecord | None, waited_s: float) -> str:
        """Why nothing was ready to be taken after this time; `life` was taken. It reads a log: not under the lock."""
        if self.preparation is None:
            return f"no preparation has come within {waited_s:g} s; call prepare"
        if life is None:
            return f"no standby could be started within {waited_s:g} s"
        tail = "\n".join(life.child.log_tail()) or "(nothing)"
        phase = f" (phase {life.phase})" if life.phase else ""
        return f"the standby, process {life.child.pid}{phase}, is not ready after {waited_s:g} s; it printed:\n{tail}"

    def _due(self) -> bool:
        return self._wanted and self.life is None and self.preparation is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._due())
                if self._closed:
                    return
                self._wanted = False
                preparation = self.preparation
                self._num_spawned += 1
            assert preparation is not None
            self._start(preparation)

    def _start(self, preparation: dict[str, Any]) -> None:
        log_path, trouble = self._logs.new(f"process-{os.getpid()}-{self._num_spawned:04d}.log")
        try:
            child = spawn(self.module, env=self._env, first_line=preparation, log_path=log_path)
        except OSError as error:  # this thread must live on: `take` raises it
            with self._changed:
                self.spawn_error = error
                self._changed.notify_all()
            return
        life = ProcessRecord(child)
        if trouble:
            life.early_events.append(note(trouble))
        with self._changed:
            stale = self._closed or preparation is not self.preparation
            if not stale:
                self.life = life
                self._changed.notify_all()
        child.watch(lambda event: self._on_event(life, event), lambda how: self._on_exit(life, how))
        if stale:
            child.kill()
