"""The host agent: starts, watches, stops and diagnoses one training process, and keeps a warm standby beside it.

A Ray actor with no JAX inside (`gang.py` makes it one); a plain class otherwise. It knows nothing of training: it passes JSON
lines between the driver and its process, and says when the process ends. Every public method may be called from any thread.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from cluster import diagnosis, ports
from cluster.process import ChildProcess, Exit, child_env, import_path, spawn

GO_TIMEOUT_S = 120.0
HALT_TIMEOUT_S = 60.0
MAX_EVENTS = 10_000
"""More than a generation sends between two polls; the oldest go first."""
MAX_STANDBY_DEATHS = 3
"""Standbys that may be killed from outside, one after the other, before that is a failure like any other."""

Event = dict[str, Any]


class Life:
    """What is known of one training process, from its time as a standby to its end. Guarded by its agent's lock."""

    def __init__(self, child: ChildProcess):
        self.child = child
        self.early_events: list[Event] = []
        """Until it belongs to a generation."""
        self.generation: int | None = None
        self.warm = False
        self.done = False
        self.halted = False
        """Killed by this agent: its end is no failure."""
        self.phase: str | None = None
        self.exception: Event | None = None
        self.heartbeat: Event | None = None
        self.exit: Event | None = None

    def note(self, event: Event) -> None:
        """Takes from an event what the agent itself goes by."""
        kind = event.get("ev")
        self.warm |= kind == "warm"
        self.done |= kind == "done"
        if kind == "phase":
            self.phase = event.get("phase")
        elif kind == "exception":
            self.exception = event

    def excusable(self) -> bool:
        """A standby that was ready, or was killed, died of something that the next one need not die of."""
        assert self.exit is not None
        return self.exception is None and (self.warm or self.exit["signal"] is not None)


class HostAgent:
    """One per host. `env` holds the variables of its training processes beside those that the agent has itself."""

    def __init__(self, module: str, env: Mapping[str, str], log_dir: str):
        self._module = module
        self._log_dir = log_dir
        own = {name: os.path.expanduser(value) for name, value in env.items()}
        self._env = child_env(os.environ, {**own, "PYTHONPATH": os.pathsep.join(import_path(sys.path))})
        self._changed = threading.Condition()
        self._preparation: dict[str, Any] | None = None
        self._standby_wanted = False
        self._standby: Life | None = None
        self._standby_deaths = 0
        self._spawn_error: OSError | None = None
        self._num_spawned = 0
        self._current: Life | None = None
        self._events: list[Event] = []
        self._first_event = 0
        self._closed = False
        os.makedirs(log_dir, exist_ok=True)
        # The children die with the thread that starts them, and Ray's threads come and go: this one stays.
        threading.Thread(target=self._keep_standby, name="spawner", daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """Where the agent is, and a port on its host for the coordinator of the next generation."""
        return {
            **_place(),
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "log_dir": self._log_dir,
            "next_port": ports.free_port(),
        }

    def prepare(self, preparation: dict[str, Any]) -> None:
        """Starts the standby with this preparation; one that was started with another is replaced."""
        with self._changed:
            if self._standby is not None and preparation == self._preparation and self._standby.exit is None:
                return
            old, self._standby = self._standby, None
            self._preparation = preparation
            self._want_standby()
        if old is not None:
            old.child.kill()

    def go(self, orders: dict[str, Any], timeout_s: float = GO_TIMEOUT_S) -> dict[str, Any]:
        """Makes the standby the current process as soon as it is warm, and gives it its orders.

        A standby whose preparation failed becomes the current process too: its exception and its exit are then the events of
        this generation. Raises RuntimeError while a process runs, or if none can be started; TimeoutError if the standby is not
        warm in time, or no preparation has come (Ray may deliver it after this). Either is an event of the generation too.
        """
        try:
            life = self._take_standby(orders["generation"], timeout_s)
        except (RuntimeError, TimeoutError) as error:
            self._tell_failed_go(orders["generation"], error)
            raise
        if life.exit is None:
            life.child.send(orders)  # if it died just now, its exit event says so
        return {"pid": life.child.pid, "log_path": life.child.log_path, "next_port": ports.free_port()}

    def relaunch(self, orders: dict[str, Any], timeout_s: float = GO_TIMEOUT_S) -> dict[str, Any]:
        """`halt` and `go` in one call: go's answer, with halt's under `post_mortem`."""
        post_mortem = self.halt()
        return {**self.go(orders, timeout_s), "post_mortem": post_mortem}

    def order(self, message: dict[str, Any]) -> bool:
        """Passes a line to the current process; False if there is none to take it."""
        with self._changed:
            life = self._current
        return life is not None and life.exit is None and life.child.send(message)

    def poll(self, cursor: int = 0, wait_s: float = 0.0) -> dict[str, Any]:
        """Events from `cursor` on; waits for one at most `wait_s`. Heartbeats are no events: the last one comes along."""
        with self._changed:
            self._changed.wait_for(lambda: self._next_event() > cursor, wait_s)
            return {
                "cursor": self._next_event(),
                "events": self._events[max(0, cursor - self._first_event) :],
                "heartbeat": self._current.heartbeat if self._current else None,
                "host_state": self._host_state(),
            }

    def halt(self, timeout_s: float = HALT_TIMEOUT_S) -> dict[str, Any]:
        """Kills the current process and its group, waits until it is gone, and says what is known of it.

        `exit` is None in the answer if the process was alive and died of this. Raises TimeoutError if it cannot be killed.
        """
        with self._changed:
            life = self._current
        if life is None:
            return {"pid": None, "generation": None, "exit": None, "exception": None, "last_heartbeat": None, "done": False}
        life.child.kill()
        if not life.child.wait_gone(timeout_s):
            state = diagnosis.process_state(life.child.pid)
            raise TimeoutError(f"process {life.child.pid} is still there {timeout_s:g} s after SIGKILL (state: {state})")
        return _post_mortem(life)

    def stacks(self) -> str:
        """The Python stacks of the current process, which need not be able to answer."""
        with self._changed:
            life = self._current
        if life is None or life.exit is not None:
            return "no process is running"
        return diagnosis.stacks(life.child)

    def shutdown(self) -> None:
        """Kills the current process and the standby; nothing is started any more."""
        with self._changed:
            self._closed = True
            lives = [life for life in (self._current, self._standby) if life is not None]
            self._standby = None
            self._changed.notify_all()
        for life in lives:
            life.child.kill()
        for life in lives:
            life.child.wait_gone(HALT_TIMEOUT_S)

    def _want_standby(self) -> None:
        self._standby_wanted, self._standby_deaths, self._spawn_error = True, 0, None
        self._changed.notify_all()

    def _standby_due(self) -> bool:
        return self._standby_wanted and self._standby is None and self._preparation is not None

    def _keep_standby(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._standby_due())
                if self._closed:
                    return
                self._standby_wanted = False
                preparation = self._preparation
                self._num_spawned += 1
            assert preparation is not None
            self._start_standby(preparation, os.path.join(self._log_dir, f"process-{os.getpid()}-{self._num_spawned:04d}.log"))

    def _start_standby(self, preparation: dict[str, Any], log_path: str) -> None:
        try:
            child = spawn(self._module, env=self._env, first_line=preparation, log_path=log_path)
        except OSError as error:  # this thread must live on: `go` raises it
            with self._changed:
                self._spawn_error = error
                self._changed.notify_all()
            return
        life = Life(child)
        with self._changed:
            stale = self._closed or preparation is not self._preparation
            if not stale:
                self._standby = life
                self._changed.notify_all()
        child.watch(lambda event: self._on_event(life, event), lambda how: self._on_exit(life, how))
        if stale:
            child.kill()

    def _take_standby(self, generation: int, timeout_s: float) -> Life:
        with self._changed:
            self._check_none_runs(generation)
            if self._standby is None:
                self._want_standby()
            if not self._changed.wait_for(self._standby_settled, timeout_s):
                raise TimeoutError(f"generation {generation}: {self._describe_slow_standby(timeout_s)}")
            if self._spawn_error is not None:
                raise RuntimeError(f"cannot start `{self._module}`: {self._spawn_error}") from self._spawn_error
            life, self._standby = self._standby, None
            assert life is not None
            self._current, life.generation, self._standby_deaths = life, generation, 0
            self._first_event, self._events = self._next_event(), []
            for event in life.early_events:
                self._append(event, generation)
            return life

    def _check_none_runs(self, generation: int) -> None:
        if self._current is not None and self._current.exit is None:
            running = f"process {self._current.child.pid} of generation {self._current.generation} still runs"
            raise RuntimeError(f"go for generation {generation}: {running}; call halt first, or relaunch")

    def _tell_failed_go(self, generation: int, error: Exception) -> None:
        event = {"t": time.time(), "ev": "exception", "type": type(error).__name__, "message": str(error), "kind": "crash"}
        with self._changed:
            self._append({**event, "traceback": "", "step": None}, generation)
            self._changed.notify_all()

    def _standby_settled(self) -> bool:
        standby = self._standby
        return self._spawn_error is not None or (standby is not None and (standby.warm or standby.exit is not None))

    def _describe_slow_standby(self, timeout_s: float) -> str:
        if self._preparation is None:
            return f"no preparation has come within {timeout_s:g} s; call prepare"
        if self._standby is None:
            return f"no standby could be started within {timeout_s:g} s"
        tail = "\n".join(self._standby.child.log_tail()) or "(nothing)"
        phase = f" (phase {self._standby.phase})" if self._standby.phase else ""
        return f"the standby, process {self._standby.child.pid}{phase}, is not ready after {timeout_s:g} s; it printed:\n{tail}"

    def _on_event(self, life: Life, event: Event) -> None:
        with self._changed:
            life.note(event)
            if event.get("ev") == "heartbeat":
                life.heartbeat = {**event, "generation": life.generation}
                return
            if life is not self._current:
                life.early_events.append(event)
            else:
                self._append(event, life.generation)
                if event.get("ev") == "first_step" and self._standby is None:  # not before: it would slow the recovery down
                    self._want_standby()
            self._changed.notify_all()

    def _on_exit(self, life: Life, how: Exit) -> None:
        with self._changed:
            pid, tail = life.child.pid, life.child.log_tail()
            life.halted = how.by_parent
            life.exit = {"t": how.at_s, "ev": "exit", "code": how.code, "signal": how.signal, "log_tail": tail, "pid": pid}
            if life is self._current:
                self._on_current_exit(life)
            elif life is self._standby:
                self._on_standby_exit(life)
            self._changed.notify_all()

    def _on_current_exit(self, life: Life) -> None:
        assert life.exit is not None
        if not life.halted:
            self._append(life.exit, life.generation)
        if not life.done and self._standby is None:
            self._want_standby()

    def _on_standby_exit(self, life: Life) -> None:
        assert life.exit is not None
        if life.excusable() and self._standby_deaths < MAX_STANDBY_DEATHS:
            self._standby = None
            self._standby_deaths += 1
            self._standby_wanted = True
        else:
            life.early_events.append(life.exit)

    def _append(self, event: Event, generation: int | None) -> None:
        self._events.append({**event, "generation": generation})
        if len(self._events) > MAX_EVENTS:
            dropped = MAX_EVENTS // 4
            del self._events[:dropped]
            self._first_event += dropped

    def _next_event(self) -> int:
        return self._first_event + len(self._events)

    def _host_state(self) -> dict[str, Any]:
        current, standby = self._current, self._standby
        return {
            "t": time.time(),
            "pid": current.child.pid if current else None,
            "generation": current.generation if current else None,
            "alive": current is not None and current.exit is None,
            "log_path": current.child.log_path if current else None,
            "standby": _standby_state(standby),
            "standby_pid": standby.child.pid if standby else None,
        }


def _place() -> dict[str, Any]:
    """Where Ray has put this process; a process without Ray is on the machine's own."""
    import ray  # in an actor it is loaded already

    if not ray.is_initialized():
        return {"host_ip": "127.0.0.1", "node_id": None, "labels": {}}
    context = ray.get_runtime_context()
    return {"host_ip": ray.util.get_node_ip_address(), "node_id": context.get_node_id(), "labels": context.get_node_labels()}


def _standby_state(standby: Life | None) -> str:
    if standby is None:
        return "none"
    if standby.exit is not None:
        return "failed"
    return "warm" if standby.warm else "starting"


def _post_mortem(life: Life) -> dict[str, Any]:
    return {
        "pid": life.child.pid,
        "generation": life.generation,
        "exit": None if life.halted else life.exit,
        "exception": life.exception,
        "last_heartbeat": life.heartbeat,
        "phase": life.phase,
        "done": life.done,
        "log_path": life.child.log_path,
    }
