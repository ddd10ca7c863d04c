"""The host agent: starts, watches, stops and diagnoses one training process, and keeps a warm standby beside it.

It is a plain class without JAX, and `gang/slots.py` makes it a Ray actor. It knows nothing of training: it passes JSON lines
between the driver and its process, and reports when the process ends or makes no progress. Without a driver it goes on until its
lease ends. What it decides is in `state.py`; here are the threads, processes, files and clocks around that.

All public methods are thread-safe. All but `is_led` and `profile` take the `driver_term` of the calling driver, renew its lease,
and raise StaleDriver if a driver with a newer term has called before.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from cluster.agent import effects, inputs, machine, preemption, printed, stack_dump
from cluster.agent.child_process import ChildProcess, child_env, import_path, log_tail
from cluster.agent.inputs import Input, Now
from cluster.agent.logs import CLOSE_TIMEOUT_S, LOG_DIR, Logs
from cluster.agent.precompile import Precompilation
from cluster.agent.printed import Printed
from cluster.agent.process_record import ExitStatus, ProcessRecord, note
from cluster.agent.snapshot_memory import Kept
from cluster.agent.spawner import Spawner
from cluster.agent.standby import describe_slow
from cluster.agent.state import AgentState
from cluster.hosts.process_env import PRIVATE_UMASK
from gangway.wire import orders as orders_of
from gangway.wire.answers import Description, Halted, Polled, Profiled, Started, TakenOver
from gangway.wire.events import AnyEvent, Event
from gangway.wire.orders import Command, Profile, Start

HALT_ANSWER_S = 1.0
"""A halt answers after at most so long, even if the process is still dying: else the driver would take the host for lost."""
CLOSE_WAIT_S = 60.0
"""How long an agent that ends waits for its processes to be gone."""
LEASE_S = 120.0
LOOK_S = 0.25
"""How often the limits are looked at when no earlier time is known: they may shrink meanwhile."""
LEASE_LOOK_S = 1.0
STACKS_TIMEOUT_S = 5.0
"""How long `take_stacks` waits. Taking stacks needs a tenth of a second on an idle machine."""

_log = logging.getLogger(__name__)


def now() -> Now:
    return Now(time.monotonic(), time.time())


class _Shown:
    """What Ray shows of an agent: its run and its host. Ray asks once, when the actor is made, so nothing that changes
    is here. It is no function, so Ray does not take it for a method of the actor: where the class cannot be imported, a machine
    without the code could then not be named."""

    def __get__(self, agent: HostAgent | None, cls: type) -> Callable[[], str] | _Shown:
        return self if agent is None else lambda: f"{agent._run_name or 'no run'}, {agent._host}"


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
        self._run_name, self._host = run_name, os.path.basename(log_dir.rstrip("/"))
        # One lock for the state: the calls of the driver, the readers of pipes and the watchdog are different threads.
        self._changed = threading.Condition()
        self._state = AgentState(module, lease_s, now().s)
        self._answers: dict[Hashable, effects.Answer | effects.Refuse | effects.RefuseSlow] = {}
        """Answers to calls whose threads have not taken them yet."""
        self._calls = itertools.count()
        self._children: dict[ProcessRecord, ChildProcess] = {}
        """The processes that exist."""
        self._kept = Kept()
        self._ended = threading.Event()
        self._printed = Printed(self._report)
        machine.ensure_home(os.environ)
        variables = {name: os.path.expanduser(value) for name, value in env.items()}  # `~` is the home on this machine
        # Of `hosts.env` too: it is added to the paths that this process has, and does not replace them.
        paths = [*filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
        full_env = child_env(os.environ, {**variables, "PYTHONPATH": os.pathsep.join(import_path(paths))})
        self._logs = Logs(local_log_dir, run_name or "agents", self._host, log_dir.rstrip("/"), self._on_note)

        def watch(process: ProcessRecord, child: ChildProcess) -> None:
            child.watch(partial(self._on_event, process), partial(self._on_exit, process))

        self._spawner = Spawner(module, full_env, self._logs, self._children.__setitem__, self._feed, watch)
        self._precompilation = Precompilation(module, full_env, self._logs)
        _in_background("watchdog", self._keep_looking)
        _in_background("lease", self._keep_lease)
        _in_background("growth of logs", printed.follow, self._current_log, self._on_output, self._ended)
        if sources := preemption.sources(notice_file, metadata):
            on_notice: Callable[..., None] = lambda notice: self._feed(inputs.Notice(notice))  # noqa: E731
            _in_background("notices", preemption.poll_sources, sources, on_notice, self._on_note)

    __repr__ = _Shown()  # type: ignore[assignment]

    # ------------------------------------------------------------------ calls

    def describe(self, *, driver_term: int = 0) -> Description:
        """Returns where the agent runs, and a free port on its host for the coordinator of the next generation."""
        self._call(inputs.Call, driver_term)
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

        `poll(first_event)` returns all events of the generation.
        """
        # First: from here on a call of the former driver is refused (StaleDriver).
        taken_over = self._call(inputs.TakeOver, driver_term)
        return cast(TakenOver, {**self.describe(driver_term=driver_term), **taken_over})

    def keep(self, *, driver_term: int = 0) -> None:
        """Renews the lease and does nothing else."""
        self._call(inputs.Call, driver_term)

    def is_led(self) -> bool:
        """Returns whether the agent has a driver: its lease has not ended."""
        return self._lease_left_s() > 0

    def profile(self, order: Profile, hosts: Sequence[int] | None, timeout_s: float) -> Profiled:
        """Passes the order to the training process if its host is one of `hosts` (None: any), and waits for the result.

        Anybody may call this, not only the driver: it changes nothing that a driver relies on. Raises OrderError.
        """
        order = orders_of.agent_profile(order)
        with self._changed:
            state = self._state
            # The cursor is read before the order is sent: a quick answer must not be missed.
            process, cursor = state.current, state.events.next
            host = state.orders.get("host") if state.orders is not None else None
            can_profile = host is not None and process is not None and process.alive and not state.waiting
            if not can_profile or (hosts is not None and host not in hosts):
                return {"host": None, "path": None, "problem": None}
        assert process is not None
        # Outside the lock: a write to a process that does not read its input may block.
        self._send(process, order)
        with self._changed:
            self._changed.wait_for(lambda: self._profiled(order["id"], cursor) or process.done or not process.alive, timeout_s)
            answer = self._profiled(order["id"], cursor)
        if answer is None:
            why = "the training process has ended" if process.done or not process.alive else f"no answer within {timeout_s:g} s"
            phase = f" (it is in the phase {process.phase!r})" if process.phase != "train" else ""
            answer = {"problem": f"{why}{phase}"}
        return {"host": host, "path": answer.get("path"), "problem": answer["problem"]}

    def _profiled(self, request: str, cursor: int) -> AnyEvent | None:
        """Returns the process's event for the profile request with this id; None if it has not come."""
        events = self._state.events.since(cursor)
        return next((event for event in events if event.get("ev") == "profile" and event.get("id") == request), None)

    def prepare(self, preparation: dict[str, Any], *, driver_term: int = 0) -> None:
        """Starts the standby with this preparation; one that was started with another is replaced."""
        self._call(inputs.Prepare, driver_term, preparation)

    def start(self, orders: Start, *, driver_term: int = 0) -> Started:
        """Makes the standby the current process as soon as it is warm, and gives it its orders.

        A standby whose preparation failed becomes the current process too: its exception and its exit are then events of this
        generation. Raises OrderError for orders that this agent does not understand. Raises RuntimeError if a process still runs,
        if none can be started, or if `halt` comes first. Raises TimeoutError if none is warm within `import_s`. All of these but
        the halt are reported as events of the generation too.
        """
        # First: a driver that has lost the run must not start a second gang here.
        self._call(inputs.Call, driver_term)
        self._precompilation.stop()  # it takes cores, and perhaps device memory, that the start needs
        started = self._call(inputs.Start, driver_term, orders)
        return cast(Started, {**started, "next_port": machine.free_port()})

    def precompile(self, orders: dict[str, Any], timeout_s: float, *, driver_term: int = 0) -> str | None:
        """Compiles, in a separate process, the programs of one rank of another gang. Waits; returns what went wrong, or None.

        `orders` are like those of `start`, as far as they describe how to join, with "cmd": "precompile". The next `start`,
        `halt` or `shutdown` ends the process.
        """
        self._call(inputs.Call, driver_term)
        with self._changed:
            preparation = self._state.standby.preparation
        if preparation is None:
            return "no preparation has come"
        try:
            return self._precompilation.run(preparation, orders, timeout_s)
        except OSError as error:
            return f"cannot start a process: {error}"

    def order(self, message: Command, *, driver_term: int = 0) -> bool:
        """Passes a line to the current process. Returns False if there is no process that can take it. Raises OrderError."""
        return self._call(inputs.Order, driver_term, message)

    def poll(self, cursor: int = 0, wait_s: float = 0.0, *, driver_term: int = 0) -> Polled:
        """Returns the events from `cursor` on, each with its number `n`; waits for one at most `wait_s`. If the log has dropped
        some of them, the answer has the `facts` of the generation, and how many are `missed` (`EventLog.answer`).

        The `cursor` in the answer is for the next poll. Heartbeats are not events: the answer has the newest one separately.
        """
        return self._call(inputs.Poll, driver_term, cursor, wait_s, timeout_s=wait_s)

    def take_stacks(self, timeout_s: float = STACKS_TIMEOUT_S, *, driver_term: int = 0) -> None:
        """Takes the stacks of the process. To be called on all hosts when one of them hangs, before any is halted.

        Then `halt` returns the stacks of this host too, even if its own limits are not near yet. Waits at most `timeout_s`.
        """
        self._call(inputs.TakeStacks, driver_term, timeout_s, timeout_s=timeout_s)

    def halt(self, timeout_s: float = HALT_ANSWER_S, *, cursor: int | None = None, driver_term: int = 0) -> Halted:
        """Kills the current process and its group, waits a little until it is gone, and returns its post-mortem. A `start` that
        still waits for its process gives up.

        A process with very much memory, or one that waits for a disk, may take longer to die than `timeout_s`. Then the answer
        has `gone` = False, and the caller asks again. A `start` waits for its end.

        The `stacks` were taken when it had been without progress for nearly too long, or by `take_stacks`. With a `cursor`, the
        answer has the `events` from there on, and the next `cursor`, like that of `poll`.
        """
        self._call(inputs.Call, driver_term)
        self._precompilation.stop()
        answer: Halted = self._call(inputs.Halt, driver_term, timeout_s, cursor, timeout_s=timeout_s)
        if not answer["gone"] and answer["pid"] is not None:
            answer["dying_state"] = stack_dump.process_state(answer["pid"])
        return answer

    def shutdown(self, *, driver_term: int = 0) -> None:
        """Kills the current process and the standby. Nothing is started any more."""
        self._call(inputs.Shutdown, driver_term)
        self._close()

    def _call(self, kind: type[inputs.Call], driver_term: int, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Passes a call to the state, and waits for its answer. `timeout_s`: when the state answers in any case."""
        call = next(self._calls)
        self._feed(kind(call, driver_term, *arguments))
        # After the state has read its clock: it does not answer later than this.
        due_s = None if timeout_s is None else now().s + timeout_s
        while (answer := self._wait_for_answer(call, due_s)) is None:
            self._feed(inputs.TimePassed())
        match answer:
            case effects.Refuse():
                raise answer.error
            case effects.RefuseSlow():
                raise TimeoutError(f"generation {answer.generation}: {self._why_slow(answer)}")
        if answer.first is not None:
            self._do(answer.first)
        return answer.value

    def _wait_for_answer(self, call: int, due_s: float | None) -> effects.Answer | effects.Refuse | effects.RefuseSlow | None:
        with self._changed:
            self._changed.wait_for(lambda: call in self._answers, None if due_s is None else max(0.0, due_s - now().s))
            return self._answers.pop(call, None)

    def _why_slow(self, slow: effects.RefuseSlow) -> str:
        process = slow.process
        if slow.dying and process is not None:
            name = f"process {process.pid} of generation {process.generation}"
            return f"{name} is still there {slow.waited_s:.0f} s after SIGKILL ({stack_dump.process_state(process.pid)})"
        with self._changed:
            prepared = self._state.standby.preparation is not None
        # Without the lock: a disk may hang.
        return describe_slow(prepared, process, log_tail(process.log_path) if process is not None else (), slow.waited_s)

    # ------------------------------------------------------------------ inputs and effects

    def _feed(self, event: Input) -> None:
        """Passes what has happened to the state, and does what it says. Not to be called with the lock held."""
        with self._changed:
            todo = self._state.handle(event, now())
            if not isinstance(event, inputs.Look | inputs.TimePassed) and not _is_heartbeat(event):
                self._changed.notify_all()
        for effect in todo:
            self._do(effect)

    def _do(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Answer() | effects.Refuse() | effects.RefuseSlow():
                with self._changed:
                    self._answers[effect.call] = effect
                    self._changed.notify_all()
            case effects.Spawn():
                self._spawner.request(effect.preparation)
            case effects.Send():
                sent = self._send(effect.process, effect.message)
                if effect.call is not None:
                    self._do(effects.Answer(effect.call, sent))
            case effects.Kill():
                self._kill(effect.process)
            case effects.ReadStacks():
                _in_background(f"stacks of {effect.process.pid}", self._read_stacks, effect.process)
            case effects.ReadOverdue():
                _in_background("log of what is overdue", self._read_overdue, effect)

    def _send(self, process: ProcessRecord, message: Mapping[str, Any]) -> bool:
        """Writes a line to a process. Returns False if it is gone."""
        child = self._children.get(process)
        if child is not None and child.slots is not None and message.get("cmd") == "start":
            self._kept.give_to(child.slots)  # first: with its orders it looks for them
        return child is not None and child.send(message)  # if it died just now, its exit says so

    def _kill(self, process: ProcessRecord) -> None:
        child = self._children.get(process)
        if child is not None:
            # Before the kill: the state shows what it was doing.
            self._feed(inputs.KernelState(process, stack_dump.process_state(process.pid)))
            child.kill()

    def _read_stacks(self, process: ProcessRecord) -> None:
        # In a thread of its own: reading the stacks may take seconds.
        child = self._children.get(process)
        self._feed(inputs.StacksTaken(process, stack_dump.stacks(child) if child is not None else None))

    def _read_overdue(self, what: effects.ReadOverdue) -> None:
        # In a thread of its own: a disk may hang.
        process = what.process
        tail = log_tail(process.log_path) if process is not None else []
        state = stack_dump.process_state(process.pid) if process is not None else None
        self._feed(inputs.OverdueSeen(what.alarm, state, tail))

    def _on_event(self, process: ProcessRecord, event: Event) -> None:
        if event["ev"] in ("done", "exception"):
            self._show_printed(process)  # first: after these the driver may ask no more
        elif event["ev"] == "snapshots":
            self._kept.only_since(event["since"])
        self._feed(inputs.Said(process, event))

    def _on_exit(self, process: ProcessRecord, how: ExitStatus) -> None:
        tail = log_tail(process.log_path)
        self._show_printed(process)
        self._logs.copy()
        child = self._children.get(process)
        if child is not None and child.slots is not None:
            # Before the state knows: the next process may get its orders then.
            self._kept.add(child.slots, None if process.done else process.generation)
        self._feed(inputs.Exited(process, how, tail))
        self._children.pop(process, None)

    def _close(self) -> None:
        """Waits until all processes are gone, and copies the last logs. The state is closed already."""
        self._ended.set()
        self._precompilation.close()
        for child in list(self._children.values()):
            child.wait_gone(CLOSE_WAIT_S)
        self._spawner.close()
        self._kept.close()
        # Last: until here the processes may have printed something.
        self._logs.close(CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------------ background threads

    def _keep_looking(self) -> None:
        while not self._ended.is_set():
            self._feed(inputs.Look())
            with self._changed:
                self._changed.wait(min(self._state.next_look_s(now().s), LOOK_S))

    def _keep_lease(self) -> None:
        while (left_s := self._lease_left_s()) > 0:
            if self._ended.wait(min(left_s, LEASE_LOOK_S)):
                return
        _log.warning("no driver has called for %g s: ending the processes, giving the machine back", self._state.lease.lease_s)
        # First: removing the groups (below) ends this agent, and the last logs would not be copied.
        self._feed(inputs.LeaseEnded())
        self._close()
        if self._run_name is not None:
            from cluster.placement import cleanup

            cleanup.exit_agent(self._run_name, self._state.lease.driver_term)

    def _lease_left_s(self) -> float:
        with self._changed:
            return self._state.lease.left_s(now().s)

    def _current_log(self) -> str | None:
        with self._changed:
            return self._state.current.log_path if self._state.current else None

    def _on_output(self) -> None:
        self._feed(inputs.Printed())
        with self._changed:
            process = self._state.current
        if process is not None:
            self._show_printed(process)

    def _show_printed(self, process: ProcessRecord) -> None:
        with self._changed:
            shown = process is self._state.current and not self._state.waiting
            orders = self._state.orders
        if shown:
            self._printed.show(process.log_path, orders)

    def _on_note(self, message: str) -> None:
        self._report(note(message, now().wall_s))

    def _report(self, event: Mapping[str, Any]) -> None:
        self._feed(inputs.Reported(event))


def _is_heartbeat(event: Input) -> bool:
    return isinstance(event, inputs.Said) and event.event["ev"] == "heartbeat"


def _in_background(name: str, work: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, name=name, daemon=True).start()
