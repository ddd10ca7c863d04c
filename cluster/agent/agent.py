"""The host agent: starts, watches, stops and diagnoses one training process, and keeps a warm standby beside it.

It is a plain class without JAX, and `gang/slots.py` makes it a Ray actor. It knows nothing of training: it passes JSON lines
between the driver and its process, and reports when the process ends or makes no progress. Without a driver it goes on until its
lease ends. All public methods are thread-safe. All but `is_led` and `profile` take the `driver_term` of the calling driver, renew
its lease, and raise StaleDriver if a driver with a newer term has called before.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from cluster.agent import log_growth, machine, preemption, stack_dump
from cluster.agent import orders as orders_of
from cluster.agent.answers import Description, HostState, LogPaths, Polled, Profiled, Started, TakenOver, Told
from cluster.agent.answers import Halted as HaltedAnswer
from cluster.agent.child_process import ExitStatus, child_env, import_path
from cluster.agent.driver_lease import Lease
from cluster.agent.event_log import EventLog
from cluster.agent.events import Event, MachineNotice, MachineTakenAway, ProcessEvent, StartFailed, cut
from cluster.agent.hang_monitor import HangMonitor
from cluster.agent.logs import CLOSE_TIMEOUT_S, LOG_DIR, Logs
from cluster.agent.orders import Command, OrderError, ProfileCommand, StartOrders
from cluster.agent.precompile import Precompilation
from cluster.agent.printed import Printed
from cluster.agent.process_record import ProcessRecord, note, post_mortem
from cluster.agent.standby import Standby
from cluster.hosts.process_env import PRIVATE_UMASK

HALT_ANSWER_S = 1.0
"""A halt answers after at most so long, even if the process is still dying: else the driver would take the host for lost."""
CLOSE_WAIT_S = 60.0
"""How long an agent that ends waits for its processes to be gone."""
LEASE_S = 120.0
LOOK_S = 0.25
"""How often the hang monitor is asked when it names no earlier time: its limits may shrink meanwhile."""
LEASE_LOOK_S = 1.0
STACKS_TIMEOUT_S = 5.0
"""How long `take_stacks` waits. Taking stacks needs a tenth of a second on an idle machine."""
# A bound on memory: events are kept until the next generation, for a driver that adopts the gang.
MAX_EVENTS = 10_000

_log = logging.getLogger(__name__)


class HostAgent:
    """The agent of one host. `env` is added to the agent's own environment for its training processes.

    Their logs are written to a folder in `local_log_dir`, on a local disk, and copied to `log_dir`, a folder or URL for this
    host. When the lease ends, the agent ends its processes; with a `run_name` it gives back the machines of that run as well.
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
            os.umask(PRIVATE_UMASK)  # its processes inherit it
        self._run_name = run_name
        # One lock for all state below: the calls of the driver, the readers of pipes and the watchdog are
        # different threads.
        self._changed = threading.Condition()
        self._lease = Lease(lease_s)
        self._events = EventLog(MAX_EVENTS)
        self._orders: StartOrders | None = None
        """The orders of the newest generation."""
        self._waiting = False
        """Whether a `start` waits for a process that can take the orders."""
        self._hang_monitor: HangMonitor | None = None
        self._current: ProcessRecord | None = None
        self._notice: MachineNotice | None = None
        self._closed = False
        self._ended = threading.Event()
        self._printed = Printed(self._on_printed)
        machine.ensure_home(os.environ)
        variables = {name: os.path.expanduser(value) for name, value in env.items()}  # `~` is the home on this machine
        # Of `hosts.env` too: it is added to the paths that this process has, and does not replace them.
        paths = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
        full_env = child_env(os.environ, {**variables, "PYTHONPATH": os.pathsep.join(import_path(paths))})
        copies, host = log_dir.rstrip("/"), os.path.basename(log_dir.rstrip("/"))
        self._logs = Logs(local_log_dir, run_name or "agents", host, copies, self._on_note)
        self._standby = Standby(module, full_env, self._logs, self._changed, self._on_event, self._on_exit)
        self._precompilation = Precompilation(module, full_env, self._logs)
        threading.Thread(target=self._monitor_loop, name="watchdog", daemon=True).start()
        threading.Thread(target=self._keep_lease, name="lease", daemon=True).start()
        arguments = (self._current_log, self._on_output, self._ended)
        threading.Thread(target=log_growth.follow, args=arguments, name="growth of logs", daemon=True).start()
        if sources := preemption.sources(notice_file, metadata):
            callbacks = (sources, self._on_notice, self._on_note)
            threading.Thread(target=preemption.poll_sources, args=callbacks, name="notices", daemon=True).start()

    def describe(self, *, driver_term: int = 0) -> Description:
        """Returns where the agent runs, and a free port on its host for the coordinator of the next generation."""
        self._lease.renew(driver_term)
        return {
            **machine.ray_node(),
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "log_dir": self._logs.folder,
            "log_copies": self._logs.copies,
            "next_port": machine.free_port(),
        }

    def take_over(self, driver_term: int) -> TakenOver:
        """Makes the driver with this term the agent's driver. Returns `describe` and the state of the agent.

        `generation` and `orders` are those of the newest `start`, None before the first. `alive`: it has a process, or waits for
        one. `poll(first_event)` returns all events of the generation.
        """
        # First: from here on a call of the former driver is refused (StaleDriver).
        about = self.describe(driver_term=driver_term)
        with self._changed:
            # While a `start` waits, the current process is still that of the generation before.
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
        """Renews the lease and does nothing else."""
        self._lease.renew(driver_term)

    def is_led(self) -> bool:
        """Returns whether the agent has a driver: its lease has not ended."""
        return self._lease.left_s() > 0

    def profile(self, order: ProfileCommand, hosts: Sequence[int] | None, timeout_s: float) -> Profiled:
        """Passes the order to the training process if its host is one of `hosts` (None: any), and waits for the result.

        Anybody may call this, not only the driver: it changes nothing that a driver relies on. Raises OrderError.
        """
        order = orders_of.read_profile(order)
        with self._changed:
            # The cursor is read before the order is sent: a quick answer must not be missed.
            process, cursor = self._current, self._events.next
            host = self._orders.get("host") if self._orders is not None else None
            can_profile = host is not None and process is not None and process.alive and not self._waiting
            if not can_profile or (hosts is not None and host not in hosts):
                return {"host": None, "path": None, "problem": None}
        assert process is not None
        # Outside the lock: a write to a process that does not read its input may block.
        process.child.send(cast("dict[str, Any]", order))
        with self._changed:
            self._changed.wait_for(lambda: self._answer(order["id"], cursor) or process.done or not process.alive, timeout_s)
            answer = self._answer(order["id"], cursor)
        if answer is None:
            why = "the training process has ended" if process.done or not process.alive else f"no answer within {timeout_s:g} s"
            phase = f" (it is in the phase {process.phase!r})" if process.phase != "train" else ""
            answer = {"problem": f"{why}{phase}"}
        return {"host": host, "path": answer.get("path"), "problem": answer["problem"]}

    def _answer(self, request: str, cursor: int) -> Event | None:
        """Returns the process's event for the profile request with this id; None if it has not come."""
        events = self._events.since(cursor)
        return next((event for event in events if event.get("ev") == "profile" and event.get("id") == request), None)

    def prepare(self, preparation: dict[str, Any], *, driver_term: int = 0) -> None:
        """Starts the standby with this preparation; one that was started with another is replaced."""
        self._lease.renew(driver_term)
        with self._changed:
            old = self._standby.prepare(preparation)
        if old is not None:
            old.child.kill()  # outside the lock: its exit takes the lock in another thread

    def start(self, orders: StartOrders, *, driver_term: int = 0) -> Started:
        """Makes the standby the current process as soon as it is warm, and gives it its orders.

        A standby whose preparation failed becomes the current process too: its exception and its exit are then events of this
        generation. Raises OrderError for orders that this agent does not understand. Raises RuntimeError if a process still runs,
        if none can be started, or if `halt` comes first. Raises TimeoutError if none is warm within `import_s`. All of these but
        the halt are reported as events of the generation too.
        """
        # First: a driver that has lost the run must not start a second gang here.
        self._lease.renew(driver_term)
        self._precompilation.stop()  # it takes cores, and perhaps device memory, that the start needs
        try:
            process = self._take_standby(orders)
        except (RuntimeError, OrderError) as error:
            self._report_failed_start(orders, error)
            raise
        if process.alive:
            process.child.send(cast("dict[str, Any]", orders))  # if it died just now, its exit event says so
        return {"pid": process.child.pid, **self._log_of(process), "next_port": machine.free_port()}

    def precompile(self, orders: dict[str, Any], timeout_s: float, *, driver_term: int = 0) -> str | None:
        """Compiles, in a separate process, the programs of one rank of another gang. Waits; returns what went wrong, or None.

        `orders` are like those of `start`, as far as they describe how to join, with "cmd": "precompile". The next `start`,
        `halt` or `shutdown` ends the process.
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

    def order(self, message: Command, *, driver_term: int = 0) -> bool:
        """Passes a line to the current process. Returns False if there is no process that can take it. Raises OrderError."""
        self._lease.renew(driver_term)
        message = orders_of.read_command(message)
        with self._changed:
            process = self._current
        return process is not None and process.alive and process.child.send(cast("dict[str, Any]", message))

    def poll(self, cursor: int = 0, wait_s: float = 0.0, *, driver_term: int = 0) -> Polled:
        """Returns the events from `cursor` on, each with its number `n`; waits for one at most `wait_s`. If the log has dropped
        some of them, the answer has the `facts` of the generation, and how many are `missed` (`EventLog.answer`).

        The `cursor` in the answer is for the next poll. Heartbeats are not events: the answer has the newest one separately.
        """
        self._lease.renew(driver_term)
        with self._changed:
            # Heartbeats do not end this wait: with thousands of hosts each long poll would become a short one.
            self._changed.wait_for(lambda: self._events.next > cursor, wait_s)
            return {
                **self._events_since(cursor),
                "heartbeat": self._current.heartbeat if self._current else None,
                "host_state": self._host_state(),
            }

    def take_stacks(self, timeout_s: float = STACKS_TIMEOUT_S, *, driver_term: int = 0) -> None:
        """Takes the stacks of the process. To be called on all hosts when one of them hangs, before any is halted.

        Then `halt` returns the stacks of this host too, even if its own limits are not near yet. Waits at most `timeout_s`.
        """
        self._lease.renew(driver_term)
        with self._changed:
            if self._hang_monitor is not None:
                self._hang_monitor.request_stacks(self._monitored(), timeout_s)

    def halt(self, timeout_s: float = HALT_ANSWER_S, *, cursor: int | None = None, driver_term: int = 0) -> HaltedAnswer:
        """Kills the current process and its group, waits a little until it is gone, and returns its post-mortem. A `start` that
        still waits for its process gives up.

        A process with very much memory, or one that waits for a disk, may take longer to die than `timeout_s`. Then the answer
        has `gone` = False, `dying_s` (seconds since the first halt) and `dying_state` (its state in the kernel now), and the
        caller asks again. A `start` waits for its end.

        `exit` is None if the process was alive until this call; `pid` is None if there was none. `state` is its state in the
        kernel before. The `stacks` were taken when it had been without progress for nearly too long, or by `take_stacks`.
        `clock_s` is this machine's wall clock at the call. With a `cursor`, the answer has the `events` from there on, and the
        next `cursor`, like that of `poll`.
        """
        self._lease.renew(driver_term)
        # Read before the kill, which may take long: the driver converts the times of this host's clock with it.
        asked_at_s = time.time()
        self._precompilation.stop()
        with self._changed:
            hang_monitor, orders = self._hang_monitor, self._orders
            # A process that an earlier halt did not see die comes first: it may still hold the devices.
            process = self._dying() or self._monitored()
            if process is self._standby.process and self._waiting and hang_monitor is not None and hang_monitor.overdue is None:
                process = None  # a standby that may still become warm: the next generation needs it
            # Ends a `start` that still waits: it must not take the standby after this halt.
            self._waiting = False
            self._changed.notify_all()
        # Outside the lock: the exit is recorded under it by another thread, and `kill` waits for that.
        gone = process is None or process.kill(timeout_s)
        with self._changed:
            generation = orders["generation"] if orders else None
            about: dict[str, Any] = {"generation": generation, "notice": self._notice, "gone": gone, "clock_s": asked_at_s}
            if process is not None and not gone:
                about |= {"dying_s": process.dying_s(), "dying_state": stack_dump.process_state(process.child.pid)}
            if cursor is not None:
                about |= self._events_since(cursor)
            findings = hang_monitor.findings() if hang_monitor else {"stacks": None, "overdue": None}
            return cast(HaltedAnswer, {**post_mortem(process), **self._log_of(process), **about, **findings})

    def shutdown(self, *, driver_term: int = 0) -> None:
        """Kills the current process and the standby. Nothing is started any more."""
        self._lease.renew(driver_term)
        self._close()

    def _close(self) -> None:
        with self._changed:
            self._closed, self._waiting = True, False
            self._ended.set()
            processes = [process for process in (self._current, self._standby.close()) if process is not None]
            self._changed.notify_all()
        # All are killed before any is waited for: one that dies slowly must not keep the others alive.
        for process in processes:
            process.child.kill()
        self._precompilation.close()
        for process in processes:
            process.child.wait_gone(CLOSE_WAIT_S)
        # Last: until here the processes may have printed something.
        self._logs.close(CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------------ a generation

    def _take_standby(self, orders: StartOrders) -> ProcessRecord:
        """Waits until the standby is warm and makes it the current process of a new generation."""
        orders, config = orders_of.read_start(orders)
        with self._changed:
            self._check_free(orders)
            self._orders, self._waiting = orders, True
            # The numbers of events go on, so a cursor of the last generation hides no event of this one.
            self._events.clear()
            hang_monitor = self._hang_monitor = HangMonitor(config, self._changed, self._report)
            if self._standby.process is None:
                self._standby.request()
            try:
                # A standby that never gets warm ends this wait too: the monitor reports it as overdue after `import_s`.
                self._changed.wait_for(lambda: not self._waiting or hang_monitor.overdue is not None or self._ready())
                if not self._waiting:
                    raise Halted(f"generation {orders['generation']} was halted before its process was ready")
                if dying := self._dying():  # it still holds the devices: another process could not open them
                    raise TimeoutError(f"generation {orders['generation']}: {dying.describe_dying()}")
                settled, process = self._standby.settled(), self._standby.take()
            finally:
                # After an error too: else every later start would be refused because this one still waits.
                self._waiting = False
            if process is not None:
                self._begin(process, orders)
        if process is None or not settled:
            slow = self._standby.describe_slow(process, config.import_s)
            raise TimeoutError(f"generation {orders['generation']}: {slow}")
        return process

    def _check_free(self, orders: StartOrders) -> None:
        start = f"start of generation {orders['generation']}"
        if self._waiting:
            assert self._orders is not None
            raise RuntimeError(f"{start}: generation {self._orders['generation']} waits for its process; call halt first")
        if self._current is not None and self._current.alive and not self._dying():
            running = f"process {self._current.child.pid} of generation {self._current.generation} still runs"
            raise RuntimeError(f"{start}: {running}; call halt first")

    def _ready(self) -> bool:
        """Returns whether the standby can be taken, and no process of an earlier generation holds the devices."""
        return self._standby.settled() and not self._dying()

    def _dying(self) -> ProcessRecord | None:
        """Returns the process of the previous generation if it was killed and still exists."""
        return self._current if self._current is not None and self._current.dying else None

    def _begin(self, process: ProcessRecord, orders: StartOrders) -> None:
        self._current, process.generation = process, orders["generation"]
        for event in process.early_events:
            self._report(event)
        if not process.alive and self._hang_monitor is not None:
            self._hang_monitor.end()
        self._changed.notify_all()

    def _report_failed_start(self, orders: Any, error: RuntimeError | OrderError) -> None:
        # The driver asked for the halt: this is no failure of the host.
        if isinstance(error, Halted):
            return
        event: StartFailed = {
            "t": time.time(),
            "ev": "exception",
            "type": type(error).__name__,
            "message": cut(str(error)),
            "kind": "crash",
            "traceback": "",
            "step": None,
        }
        generation = orders.get("generation") if isinstance(orders, Mapping) else None
        if type(generation) is int:  # else the driver takes it as one of the generation that it starts
            event["generation"] = generation
        with self._changed:
            # Not by `_report`: a start that was refused has not made its generation the newest one.
            self._events.append(event)
            self._changed.notify_all()

    def _report(self, event: Mapping[str, Any]) -> None:
        self._events.append({**event, "generation": self._orders["generation"] if self._orders else None})
        self._changed.notify_all()

    def _on_event(self, process: ProcessRecord, event: ProcessEvent) -> None:
        kind = event["ev"]
        if kind in ("done", "exception"):
            self._show_printed(process)  # first: after these the driver may ask no more
        with self._changed:
            process.observe(event)
            if process is self._current and self._waiting:  # of the previous generation, whose end `start` waits for
                return
            if process is not self._current:
                if kind != "heartbeat":  # kept for the generation that it will belong to
                    process.early_events.append(event)
                    self._changed.notify_all()
                return
            if self._hang_monitor is not None:
                # Heartbeats too: the step in them is the progress that the watchdog looks at.
                self._hang_monitor.observe(event)
            if kind == "heartbeat":
                return
            self._report(event)
            # Not before the first step: the start of a standby would slow the recovery down.
            if kind == "first_step" and self._standby.process is None:
                self._standby.request()

    def _on_exit(self, process: ProcessRecord, how: ExitStatus) -> None:
        log_tail = process.child.log_tail()  # before the lock is taken: a disk may hang
        self._show_printed(process)
        self._logs.copy()
        with self._changed:
            process.end(how, log_tail)
            if process is self._current:
                self._on_current_exit(process)
            elif process is self._standby.process:
                self._standby.ended(process)
            self._changed.notify_all()

    def _on_current_exit(self, process: ProcessRecord) -> None:
        # While a `start` waits, the monitor is that of the next generation already.
        if self._hang_monitor is not None and not self._waiting:
            self._hang_monitor.end()
        # A process that the agent killed did not fail.
        if not process.halted and process.exit is not None:
            self._report(process.exit)
        # After a failure before the first step there is no standby yet. After `done`, none is needed.
        if not process.done and self._standby.process is None:
            self._standby.request()

    # ------------------------------------------------------------------ background threads

    def _monitor_loop(self) -> None:
        with self._changed:
            while not self._closed:
                due_s = self._hang_monitor.act(self._monitored()) if self._hang_monitor is not None else LOOK_S
                self._changed.wait(min(due_s, LOOK_S))

    def _monitored(self) -> ProcessRecord | None:
        """Returns the process that is, or is about to become, that of the newest generation."""
        return self._standby.process if self._waiting else self._current

    def _keep_lease(self) -> None:
        while (left_s := self._lease.left_s()) > 0:
            with self._changed:
                if self._closed:
                    return
                self._changed.wait(min(left_s, LEASE_LOOK_S))
        _log.warning("no driver has called for %g s: ending the processes, giving the machine back", self._lease.lease_s)
        # First: removing the groups (below) ends this agent, and the last logs would not be copied.
        self._close()
        if self._run_name is not None:
            from cluster.placement import cleanup

            cleanup.exit_agent(self._run_name, self._lease.driver_term)

    def _on_notice(self, notice: MachineTakenAway | None) -> None:
        with self._changed:
            if notice is None:
                self._notice = None  # withdrawn: the next notice is reported again
            elif self._notice is None:
                self._notice = {"t": time.time(), "ev": "notice", **notice, "reason": cut(notice["reason"]), "node": True}
                self._report(self._notice)

    def _current_log(self) -> str | None:
        with self._changed:
            return self._current.child.log_path if self._current else None

    def _on_output(self) -> None:
        with self._changed:
            if self._hang_monitor is not None:
                self._hang_monitor.hear()
            process = self._current
        if process is not None:
            self._show_printed(process)

    def _show_printed(self, process: ProcessRecord) -> None:
        with self._changed:
            shown = process is self._current and not self._waiting
            orders = self._orders
        if shown:
            self._printed.show(process.child.log_path, orders)

    def _on_printed(self, event: Mapping[str, Any]) -> None:
        with self._changed:
            self._report(event)

    def _on_note(self, message: str) -> None:
        with self._changed:
            self._report(note(message))

    # ------------------------------------------------------------------ parts of answers

    def _log_of(self, process: ProcessRecord | None) -> LogPaths:
        """Returns the paths of a process's log: on this machine, and of its copy."""
        path = process.child.log_path if process else None
        return {"log_path": path, "log_copy": self._logs.copy_of(path) if path else None}

    def _events_since(self, cursor: int) -> Told:
        return self._events.answer(cursor)

    def _host_state(self) -> HostState:
        current, standby = self._current, self._standby.process
        return {
            "t": time.time(),
            "pid": current.child.pid if current else None,
            "generation": current.generation if current else None,
            "alive": current is not None and current.alive,
            "silence": self._hang_monitor.silence(current) if self._hang_monitor and current and not self._waiting else None,
            **self._log_of(current),
            "standby": self._standby.state(),
            "standby_pid": standby.child.pid if standby else None,
            "notice": self._notice,
        }


class Halted(RuntimeError):
    """`halt` came while a `start` waited for its process."""
