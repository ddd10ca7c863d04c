"""The host agent: starts, watches, stops and diagnoses one training process, and keeps a warm standby beside it.

A Ray actor with no JAX inside (`gang.py` makes it one); a plain class otherwise. It knows nothing of training: it passes JSON
lines between the driver and its process, says when the process ends or makes no progress, and goes on without a driver for as
long as its lease lasts. Every public method may be called from any thread. All but `is_led` and `profile` take the
`driver_term` of the driver that calls, renew its lease, and raise StaleDriver if a driver with a newer one has called before.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.agent import machine, preemption, stack_dump
from cluster.agent.child_process import Exit, child_env, import_path
from cluster.agent.driver_lease import Lease
from cluster.agent.event_log import Event, EventLog
from cluster.agent.hang_monitor import Watch
from cluster.agent.logs import CLOSE_TIMEOUT_S, LOG_DIR, Logs
from cluster.agent.machine import place
from cluster.agent.precompile import Precompilation
from cluster.agent.process_record import ProcessRecord, note, post_mortem
from cluster.agent.standby import Standby
from cluster.agent.watchdog import WatchdogConfig
from cluster.hosts.process_env import PRIVATE_UMASK

HALT_ANSWER_S = 1.0
"""A halt answers after at most so long, also of a process that is still dying: no driver must take that for a lost host."""
CLOSE_WAIT_S = 60.0
"""For processes to be gone when the agent ends."""
LEASE_S = 120.0
LOOK_S = 0.25
"""How often a watch is looked at when it names no earlier time: its limits may shrink meanwhile."""
LEASE_LOOK_S = 1.0
STACKS_TIMEOUT_S = 5.0
"""How long a driver that asks for stacks waits for them: to take them is a matter of a tenth of a second, on an idle machine."""
MAX_EVENTS = 10_000

_log = logging.getLogger(__name__)


class HostAgent:
    """One per host. `env` holds the variables of its training processes beside those that the agent has itself.

    What they print goes to a folder in `local_log_dir`, on the machine itself, and is copied to `log_dir`, a folder or a URL of
    this host. `run_name` is that of the run whose machines it gives back when its lease ends; without one it only ends its
    processes.
    """

    def __init__(
        self,
        module: str,
        env: Mapping[str, str],
        log_dir: str,
        *,
        local_log_dir: str = LOG_DIR,
        lease_s: float = LEASE_S,
        notice_file: str | None = None,
        metadata: str | None = None,
        run_name: str | None = None,
        private_files: bool = False,
    ):
        if private_files:
            os.umask(PRIVATE_UMASK)  # of its processes, too
        self._run_name = run_name
        self._changed = threading.Condition()
        self._lease = Lease(lease_s)
        self._events = EventLog(MAX_EVENTS)
        self._orders: dict[str, Any] | None = None
        """Of the newest generation."""
        self._waiting = False
        """Whether a `go` waits for a process to give them to."""
        self._watch: Watch | None = None
        self._current: ProcessRecord | None = None
        self._notice: Event | None = None
        self._closed = False
        own = {name: os.path.expanduser(value) for name, value in env.items()}
        full_env = child_env(os.environ, {**own, "PYTHONPATH": os.pathsep.join(import_path(sys.path))})
        copies, host = log_dir.rstrip("/"), os.path.basename(log_dir.rstrip("/"))
        self._logs = Logs(local_log_dir, run_name or "agents", host, copies, self._take_note)
        self._standby = Standby(module, full_env, self._logs, self._changed, self._on_event, self._on_exit)
        self._precompilation = Precompilation(module, full_env, self._logs)
        threading.Thread(target=self._keep_watch, name="watchdog", daemon=True).start()
        threading.Thread(target=self._keep_lease, name="lease", daemon=True).start()
        if sources := preemption.sources(notice_file, metadata):
            look = (sources, self._take_notice, self._take_note)
            threading.Thread(target=preemption.keep_asking, args=look, name="notices", daemon=True).start()

    def describe(self, *, driver_term: int = 0) -> dict[str, Any]:
        """Where the agent is, and a port on its host for the coordinator of the next generation."""
        self._lease.renew(driver_term)
        return {
            **place(),
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "log_dir": self._logs.folder,
            "log_copies": self._logs.copies,
            "next_port": machine.free_port(),
        }

    def lead(self, driver_term: int) -> dict[str, Any]:
        """Takes the lead from any driver with an older term: `describe`, and what the agent is at.

        `generation` and `orders` are those of the newest `go`, None before the first; `alive`: it has a process, or waits for
        one. The events of the generation are to be had by `poll(first_event)`.
        """
        about = self.describe(driver_term=driver_term)
        with self._changed:
            current = self._current if self._current and not self._waiting else None
            return {
                **about,
                "generation": self._orders["generation"] if self._orders else None,
                "orders": self._orders,
                "alive": self._waiting or (current is not None and current.alive),
                "done": current is not None and current.done,
                "first_event": self._events.first,
                "next_event": self._events.next,
            }

    def keep(self, *, driver_term: int = 0) -> None:
        """Renews the lease, and nothing else."""
        self._lease.renew(driver_term)

    def is_led(self) -> bool:
        """Whether the lease goes on."""
        return self._lease.left_s() > 0

    def profile(self, order: dict[str, Any], hosts: Sequence[int] | None, timeout_s: float) -> dict[str, Any]:
        """Passes the order ({"cmd": "profile", "id", ...}) to the training process if it is one of these hosts (None: any), and
        waits for what comes of it: `host` (None: it is none of them), `path`, `problem` (None: it is written).

        For anybody, whichever driver leads: it changes nothing that a driver goes by.
        """
        with self._changed:
            life, host, cursor = self._current, (self._orders or {}).get("host"), self._events.next
            asked = host is not None and life is not None and life.alive and not self._waiting
            if not asked or (hosts is not None and host not in hosts):
                return {"host": None, "path": None, "problem": None}
        assert life is not None
        life.child.send(order)
        with self._changed:
            self._changed.wait_for(lambda: self._answer(order["id"], cursor) or life.done or not life.alive, timeout_s)
            answer = self._answer(order["id"], cursor)
        if answer is None:
            why = "the training process has ended" if life.done or not life.alive else f"no answer within {timeout_s:g} s"
            phase = f" (it is in the phase {life.phase!r})" if life.phase != "train" else ""
            answer = {"problem": f"{why}{phase}"}
        return {"host": host, "path": answer.get("path"), "problem": answer["problem"]}

    def _answer(self, request: str, cursor: int) -> Event | None:
        told = self._events.since(cursor)
        return next((event for event in told if event.get("ev") == "profile" and event.get("id") == request), None)

    def prepare(self, preparation: dict[str, Any], *, driver_term: int = 0) -> None:
        """Starts the standby with this preparation; one that was started with another is replaced."""
        self._lease.renew(driver_term)
        with self._changed:
            old = self._standby.prepare(preparation)
        if old is not None:
            old.child.kill()

    def go(self, orders: dict[str, Any], *, driver_term: int = 0) -> dict[str, Any]:
        """Makes the standby the current process as soon as it is warm, and gives it its orders.

        `orders["limits"]` are those of the generation's watchdog (`WatchdogConfig` as a dict; default: its defaults). A standby
        whose preparation failed becomes the current process too: its exception and its exit are then the events of this
        generation. Raises RuntimeError while a process runs, if none can be started, or if `halt` comes first; TimeoutError if
        none is warm within `import_s`. But for the halt, all are told as events of the generation too.
        """
        self._lease.renew(driver_term)
        self._precompilation.stop()
        try:
            life = self._take_standby(orders)
        except RuntimeError as error:
            self._tell_failed_go(orders, error)
            raise
        if life.alive:
            life.child.send(orders)  # if it died just now, its exit event says so
        return {"pid": life.child.pid, **self._log_of(life), "next_port": machine.free_port()}

    def precompile(self, orders: dict[str, Any], timeout_s: float, *, driver_term: int = 0) -> str | None:
        """Has a process of its own compile what its place in another gang would run; waits for it. What went wrong, or None.

        `orders` are those of a `go`, as far as they say how to join, with "cmd": "precompile". The next `go`, `halt` or
        `shutdown` ends it.
        """
        self._lease.renew(driver_term)
        with self._changed:
            preparation = self._standby.preparation
        if preparation is None:
            return "no preparation has come"
        try:
            return self._precompilation.run(preparation, orders, timeout_s)
        except OSError as error:
            return f"cannot start a process: {error}"

    def order(self, message: dict[str, Any], *, driver_term: int = 0) -> bool:
        """Passes a line to the current process; False if there is none to take it."""
        self._lease.renew(driver_term)
        with self._changed:
            life = self._current
        return life is not None and life.alive and life.child.send(message)

    def poll(self, cursor: int = 0, wait_s: float = 0.0, *, driver_term: int = 0) -> dict[str, Any]:
        """Events from `cursor` on, each with its number, `n`; waits for one at most `wait_s`. `cursor` in the answer is for the
        next poll. Heartbeats are no events: the last one comes along.
        """
        self._lease.renew(driver_term)
        with self._changed:
            self._changed.wait_for(lambda: self._events.next > cursor, wait_s)
            return {
                **self._told_since(cursor),
                "heartbeat": self._current.heartbeat if self._current else None,
                "host_state": self._host_state(),
            }

    def take_stacks(self, timeout_s: float = STACKS_TIMEOUT_S, *, driver_term: int = 0) -> None:
        """To be called on all hosts before any is halted, when one of them hangs: `halt` then has the stacks of this one too,
        though its own limits may not be near yet. Waits for them, if they take no longer than this.
        """
        self._lease.renew(driver_term)
        with self._changed:
            if self._watch is not None:
                self._watch.want_stacks(self._watched(), timeout_s)

    def halt(self, timeout_s: float = HALT_ANSWER_S, *, cursor: int | None = None, driver_term: int = 0) -> dict[str, Any]:
        """Kills the current process and its group, waits a little until it is gone, and says what is known of it. A `go` that
        still waits for its process gives up.

        A process with very much memory, or one that waits for a disk, takes longer to die than `timeout_s`: then `gone` is False
        in the answer, `dying_s` the seconds since the first halt, `dying_state` what the kernel says of it now, and whoever asks
        asks again. A `go` waits for its end.

        `exit` is None in the answer if the process was alive and died of this; `pid` is None if there was none. `state` is what
        the kernel said of it before; `stacks` were taken when it had been without progress for nearly too long, or by
        `take_stacks`. `clock_s` is the wall clock of this machine when it was asked. With a `cursor`, the answer has the `events`
        from there to the end, and the next `cursor`, as a poll has.
        """
        self._lease.renew(driver_term)
        asked_at_s = time.time()
        self._precompilation.stop()
        with self._changed:
            watch, orders = self._watch, self._orders
            life = self._dying() or self._watched()
            if life is self._standby.life and self._waiting and watch is not None and watch.overdue is None:
                life = None  # a standby that may still become warm: the next generation wants it
            self._waiting = False
            self._changed.notify_all()
        gone = life is None or life.kill(timeout_s)
        with self._changed:
            generation = orders["generation"] if orders else None
            about = {"generation": generation, "notice": self._notice, "gone": gone, "clock_s": asked_at_s}
            if life is not None and not gone:
                about |= {"dying_s": life.dying_s(), "dying_state": stack_dump.process_state(life.child.pid)}
            if cursor is not None:
                about |= self._told_since(cursor)
            return {
                **post_mortem(life),
                **self._log_of(life),
                **about,
                **(watch.findings() if watch else {"stacks": None, "overdue": None}),
            }

    def shutdown(self, *, driver_term: int = 0) -> None:
        """Kills the current process and the standby; nothing is started any more."""
        self._lease.renew(driver_term)
        self._close()

    def _close(self) -> None:
        with self._changed:
            self._closed, self._waiting = True, False
            lives = [life for life in (self._current, self._standby.close()) if life is not None]
            self._changed.notify_all()
        for life in lives:
            life.child.kill()
        self._precompilation.close()
        for life in lives:
            life.child.wait_gone(CLOSE_WAIT_S)
        self._logs.close(CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------------ a generation

    def _take_standby(self, orders: dict[str, Any]) -> ProcessRecord:
        config = WatchdogConfig(**orders.get("limits") or {})
        with self._changed:
            self._check_free(orders)
            self._orders, self._waiting = orders, True
            self._events.clear()
            watch = self._watch = Watch(config, self._changed, self._tell)
            if self._standby.life is None:
                self._standby.want()
            try:
                self._changed.wait_for(lambda: not self._waiting or watch.overdue is not None or self._ready())
                if not self._waiting:
                    raise Halted(f"generation {orders['generation']} was halted before its process was ready")
                if dying := self._dying():  # it holds the devices
                    raise TimeoutError(f"generation {orders['generation']}: {dying.describe_dying()}")
                settled, life = self._standby.settled(), self._standby.take()
            finally:
                self._waiting = False
            if life is not None:
                self._begin(life, orders)
        if life is None or not settled:
            slow = self._standby.describe_slow(life, config.import_s)
            raise TimeoutError(f"generation {orders['generation']}: {slow}")
        return life

    def _check_free(self, orders: dict[str, Any]) -> None:
        what = f"go for generation {orders['generation']}"
        if self._waiting:
            assert self._orders is not None
            raise RuntimeError(f"{what}: generation {self._orders['generation']} waits for its process; call halt first")
        if self._current is not None and self._current.alive and not self._dying():
            running = f"process {self._current.child.pid} of generation {self._current.generation} still runs"
            raise RuntimeError(f"{what}: {running}; call halt first")

    def _ready(self) -> bool:
        """Whether there is something to take, and nothing of an earlier generation that holds the devices."""
        return self._standby.settled() and not self._dying()

    def _dying(self) -> ProcessRecord | None:
        """The process of the newest generation but one, if it was killed and is still there."""
        return self._current if self._current is not None and self._current.dying else None

    def _begin(self, life: ProcessRecord, orders: dict[str, Any]) -> None:
        self._current, life.generation = life, orders["generation"]
        for event in life.early_events:
            self._tell(event)
        if not life.alive and self._watch is not None:
            self._watch.end()
        self._changed.notify_all()

    def _tell_failed_go(self, orders: dict[str, Any], error: RuntimeError) -> None:
        if isinstance(error, Halted):
            return
        event = {"t": time.time(), "ev": "exception", "type": type(error).__name__, "message": str(error), "kind": "crash"}
        with self._changed:
            self._events.append({**event, "traceback": "", "step": None, "generation": orders["generation"]})
            self._changed.notify_all()

    def _tell(self, event: Event) -> None:
        self._events.append({**event, "generation": self._orders["generation"] if self._orders else None})
        self._changed.notify_all()

    def _on_event(self, life: ProcessRecord, event: Event) -> None:
        kind = event.get("ev")
        with self._changed:
            life.note(event)
            if life is self._current and self._waiting:  # it is dying while the next generation waits for its end
                return
            if life is not self._current:
                if kind != "heartbeat":
                    life.early_events.append(event)
                    self._changed.notify_all()
                return
            if self._watch is not None:
                self._watch.note(event)
            if kind == "heartbeat":
                return
            self._tell(event)
            if kind == "first_step" and self._standby.life is None:  # not before: it would slow the recovery down
                self._standby.want()

    def _on_exit(self, life: ProcessRecord, how: Exit) -> None:
        log_tail = life.child.log_tail()  # without the lock: a disk may hang
        self._logs.copy()
        with self._changed:
            life.end(how, log_tail)
            if life is self._current:
                self._on_current_exit(life)
            elif life is self._standby.life:
                self._standby.ended(life)
            self._changed.notify_all()

    def _on_current_exit(self, life: ProcessRecord) -> None:
        if self._watch is not None and not self._waiting:
            self._watch.end()
        if not life.halted and life.exit is not None:
            self._tell(life.exit)
        if not life.done and self._standby.life is None:
            self._standby.want()

    # ------------------------------------------------------------------ what it does by itself

    def _keep_watch(self) -> None:
        with self._changed:
            while not self._closed:
                due_s = self._watch.act(self._watched()) if self._watch is not None else LOOK_S
                self._changed.wait(min(due_s, LOOK_S))

    def _watched(self) -> ProcessRecord | None:
        """The process that is, or is about to be, the one of the newest generation."""
        return self._standby.life if self._waiting else self._current

    def _keep_lease(self) -> None:
        while (left_s := self._lease.left_s()) > 0:
            with self._changed:
                if self._closed:
                    return
                self._changed.wait(min(left_s, LEASE_LOOK_S))
        _log.warning("no driver has called for %g s: ending the processes, giving the machine back", self._lease.lease_s)
        self._close()
        if self._run_name is not None:
            from cluster.placement import cleanup

            cleanup.leave(self._run_name, self._lease.driver_term)

    def _take_notice(self, found: preemption.Notice | None) -> None:
        with self._changed:
            if found is None:
                self._notice = None  # taken back: the next one is news again
            elif self._notice is None:
                self._notice = {"t": time.time(), "ev": "notice", **found, "node": True}
                self._tell(self._notice)

    def _take_note(self, message: str) -> None:
        with self._changed:
            self._tell(note(message))

    # ------------------------------------------------------------------ what it says

    def _log_of(self, life: ProcessRecord | None) -> dict[str, Any]:
        """Where the log of a process is: on this machine, and its copy."""
        path = life.child.log_path if life else None
        return {"log_path": path, "log_copy": self._logs.copy_of(path) if path else None}

    def _told_since(self, cursor: int) -> dict[str, Any]:
        return {"cursor": self._events.next, "events": self._events.since(cursor)}

    def _host_state(self) -> dict[str, Any]:
        current, standby = self._current, self._standby.life
        return {
            "t": time.time(),
            "pid": current.child.pid if current else None,
            "generation": current.generation if current else None,
            "alive": current is not None and current.alive,
            **self._log_of(current),
            "standby": self._standby.state(),
            "standby_pid": standby.child.pid if standby else None,
            "notice": self._notice,
        }


class Halted(RuntimeError):
    """The driver wants no process any more."""
