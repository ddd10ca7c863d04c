"""What a host agent knows and decides, as a pure state: inputs come in, effects go out. No threads, clocks, files or processes.

    effects = state.handle(inputs.Poll("a call", driver_term=3, cursor=0, wait_s=1.0), now)

The agent (`agent.py`) passes on what happens and does what the effects say; the tests of the driver do the same in a world of
their own. Decided here: which driver commands, what the newest generation is, when its process takes its orders, what counts as
its end, what a poll and a halt answer, and when another standby is started.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from cluster.agent import inputs
from cluster.agent.driver_lease import Lease
from cluster.agent.effects import Answer, Effect, Kill, ReadOverdue, ReadStacks, Refuse, RefuseSlow, Send, Spawn
from cluster.agent.event_log import EventLog
from cluster.agent.hang_monitor import HangMonitor
from cluster.agent.inputs import Input, Now
from cluster.agent.process_record import ProcessRecord, post_mortem
from cluster.agent.standby import Standby
from cluster.agent.watchdog import Alarm
from gangway.text import cut
from gangway.wire import orders as orders_of
from gangway.wire.answers import Halted, HostState, LogPaths
from gangway.wire.events import MachineNotice, Overdue, Position, StartFailed
from gangway.wire.limits import FIRST_PHASE
from gangway.wire.orders import OrderError, Start

MAX_EVENTS = 10_000
"""A bound on memory: events are kept until the next generation, for a driver that adopts the gang."""
STACKS_GRACE_S = 0.5
"""How long the `overdue` event waits for stacks that are being taken, and for the end of the log."""


class HaltedError(RuntimeError):
    """`halt` came while a `start` waited for its process."""


@dataclass(frozen=True)
class _Waiting:
    """A call that has no answer yet, and until when it waits."""

    call: Hashable
    due_s: float


@dataclass(frozen=True)
class _WaitingPoll(_Waiting):
    cursor: int


@dataclass(frozen=True)
class _WaitingHalt(_Waiting):
    cursor: int | None
    asked_at_s: float
    """By the wall clock of this machine."""
    process: ProcessRecord | None
    generation: int | None
    monitor: HangMonitor | None


@dataclass(frozen=True)
class _WaitingStart:
    call: Hashable
    orders: Start
    limit_s: float
    """How long its process may take to be warm."""


@dataclass(frozen=True)
class _OverdueAlarm:
    """A limit has passed; the event waits for what can be read of the process."""

    alarm: Alarm
    process: ProcessRecord | None
    due_s: float
    seen: inputs.OverdueSeen | None = None

    def is_due(self, monitor: HangMonitor, now_s: float) -> bool:
        return now_s >= self.due_s or (monitor.taking is None and self.seen is not None)


class AgentState:
    """The state of one agent. Not thread-safe: the owner locks."""

    def __init__(self, module: str, lease_s: float, now_s: float):
        self.lease = Lease(lease_s, now_s)
        self.events = EventLog(MAX_EVENTS)
        self.orders: Start | None = None
        """The orders of the newest generation."""
        self.monitor: HangMonitor | None = None
        self.current: ProcessRecord | None = None
        self.standby = Standby(module)
        self.notice: MachineNotice | None = None
        self.closed = False
        self._start: _WaitingStart | None = None
        self._polls: list[_WaitingPoll] = []
        self._halts: list[_WaitingHalt] = []
        self._stacks: list[_Waiting] = []
        self._overdue: list[_OverdueAlarm] = []
        self._effects: list[Effect] = []

    @property
    def waiting(self) -> bool:
        """Whether a `start` waits for a process that can take the orders."""
        return self._start is not None

    @property
    def monitored(self) -> ProcessRecord | None:
        """The process that is, or is about to become, that of the newest generation."""
        return self.standby.process if self.waiting else self.current

    def handle(self, event: Input, now: Now) -> list[Effect]:
        """Takes one input; returns what has to be done, in this order. Raises nothing: a call that fails gets `Refuse`."""
        if isinstance(event, inputs.Call):
            self._on_call(event, now)
        else:
            self._on_event(event, now)
        self._go_on(now)
        effects, self._effects = self._effects, []
        return effects

    def next_look_s(self, now_s: float) -> float:
        """Returns in how many seconds to send `Look`, if nothing happens before."""
        due_s = self.monitor.next_look_s(now_s) if self.monitor is not None else float("inf")
        return max(0.0, min([due_s, *(pending.due_s - now_s for pending in self._overdue)]))

    # ------------------------------------------------------------------ inputs

    def _on_call(self, event: inputs.Call, now: Now) -> None:
        try:
            # First: a driver that has lost the run must change nothing here.
            self.lease.renew(event.driver_term, now.s)
            self._obey(event, now)
        except Exception as error:  # of whatever kind: it is the caller's
            self._effects.append(Refuse(event.call, error))

    def _obey(self, event: inputs.Call, now: Now) -> None:
        match event:
            case inputs.TakeOver():
                self._answer(event.call, self._taken_over())
            case inputs.Prepare():
                self._prepare(event.preparation)
                self._answer(event.call)
            case inputs.Start():
                self._begin_start(event, now)
            case inputs.Order():
                self._pass_on(event)
            case inputs.Poll():
                self._polls.append(_WaitingPoll(event.call, now.s + event.wait_s, event.cursor))
            case inputs.TakeStacks():
                self._stacks.append(_Waiting(event.call, now.s + event.timeout_s))
                if self.monitor is not None and self.monitor.request_stacks():
                    self._read_stacks(self.monitored)
            case inputs.Halt():
                self._begin_halt(event, now)
            case inputs.Shutdown():
                self._close()
                self._answer(event.call)
            case _:
                self._answer(event.call)

    def _on_event(self, event: Input, now: Now) -> None:
        match event:
            case inputs.Notice():
                self._on_notice(event, now)
            case inputs.Look():
                self._look(now)
            case inputs.LeaseEnded():
                self._close()
            case inputs.Reported():
                self._report(event.event)
            case _:
                self._on_process_event(event, now)

    def _on_process_event(self, event: Input, now: Now) -> None:
        match event:
            case inputs.Spawned():
                if not self.standby.spawned(event.process, event.preparation):
                    self._effects.append(Kill(event.process))
            case inputs.SpawnFailed():
                self.standby.failed(event.error)
            case inputs.Said():
                self._on_said(event.process, event.event, now)
            case inputs.Exited():
                self._on_exit(event)
            case inputs.KernelState():
                event.process.observe_kernel_state(event.state)
            case inputs.StacksTaken():
                # Not those of a process of an earlier generation, which come late.
                if self.monitor is not None and self.monitor.taking is event.process:
                    self.monitor.keep_stacks(event.text, now.s)
            case inputs.OverdueSeen():
                self._overdue = [replace(one, seen=event) if one.alarm is event.alarm else one for one in self._overdue]
            case inputs.Printed():
                if self.monitor is not None:
                    self.monitor.printed(now.s)

    def _go_on(self, now: Now) -> None:
        """Does what may have become possible, or whose time is over."""
        self._report_overdue(now)
        self._try_start(now)
        if (preparation := self.standby.next_preparation()) is not None:
            self._effects.append(Spawn(preparation))
        self._answer_waiting(now)

    def _answer_waiting(self, now: Now) -> None:
        for halt in [halt for halt in self._halts if halt.process is None or not halt.process.alive or now.s >= halt.due_s]:
            self._halts.remove(halt)
            self._answer(halt.call, self._halted(halt, now))
        taking = self.monitor is not None and self.monitor.taking is not None
        for wait in [wait for wait in self._stacks if not taking or now.s >= wait.due_s]:
            self._stacks.remove(wait)
            self._answer(wait.call)
        # Heartbeats do not end this wait: with thousands of hosts each long poll would become a short one.
        for poll in [poll for poll in self._polls if self.events.next > poll.cursor or now.s >= poll.due_s]:
            self._polls.remove(poll)
            heartbeat = self.current.heartbeat if self.current else None
            answer = self.events.answer(poll.cursor)
            self._answer(poll.call, {**answer, "heartbeat": heartbeat, "host_state": self._host_state(now)})

    # ------------------------------------------------------------------ a generation

    def _begin_start(self, event: inputs.Start, now: Now) -> None:
        try:
            orders, limits = orders_of.agent_start(event.orders)
            self._check_free(orders)
        except (RuntimeError, OrderError) as error:
            self._report_failed_start(event.orders, error, now)
            raise
        self.orders, self._start = orders, _WaitingStart(event.call, orders, limits.phases.get(FIRST_PHASE, 0.0))
        # The numbers of events go on, so a cursor of the last generation hides no event of this one.
        self.events.clear()
        self.monitor, self._overdue = HangMonitor(limits, now.s), []
        if self.standby.process is None:
            self.standby.request()

    def _check_free(self, orders: Start) -> None:
        start = f"start of generation {orders['generation']}"
        if self._start is not None:
            waiting = self._start.orders["generation"]
            raise RuntimeError(f"{start}: generation {waiting} waits for its process; call halt first")
        if self.current is not None and self.current.alive and not self.current.dying:
            running = f"process {self.current.pid} of generation {self.current.generation} still runs"
            raise RuntimeError(f"{start}: {running}; call halt first")

    def _try_start(self, now: Now) -> None:
        """Makes the standby the process of the generation that waits for one, if it is ready, or has had its time."""
        start, monitor = self._start, self.monitor
        if start is None or monitor is None:
            return
        dying = self._dying()
        # A standby that never gets warm ends this wait too: the monitor reports it as overdue after `import_s`.
        if monitor.overdue is None and (dying is not None or not self.standby.settled()):
            return
        self._start = None
        generation = start.orders["generation"]
        if dying is not None:  # it still holds the devices: another process could not open them
            self._effects.append(RefuseSlow(start.call, generation, dying, dying.dying_s(now.s), dying=True))
            return
        try:
            settled, process = self.standby.settled(), self.standby.take()
        except RuntimeError as error:
            self._report_failed_start(start.orders, error, now)
            self._effects.append(Refuse(start.call, error))
            return
        if process is not None:
            self._begin(process, start.orders)
        if process is None or not settled:
            self._effects.append(RefuseSlow(start.call, generation, process, start.limit_s))
            return
        first = Send(process, cast("Mapping[str, Any]", start.orders)) if process.alive else None
        self._effects.append(Answer(start.call, {"pid": process.pid, **_log_of(process)}, first))

    def _begin(self, process: ProcessRecord, orders: Start) -> None:
        self.current, process.generation = process, orders["generation"]
        for event in process.early_events:
            self._report(event)
        if not process.alive and self.monitor is not None:
            self.monitor.end()

    def _report_failed_start(self, orders: Any, error: Exception, now: Now) -> None:
        event: StartFailed = {
            "t": now.wall_s,
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
        # Not by `_report`: a start that was refused has not made its generation the newest one.
        self.events.append(event)

    def _begin_halt(self, event: inputs.Halt, now: Now) -> None:
        # A process that an earlier halt did not see die comes first: it may still hold the devices.
        process, monitor = self._dying() or self.monitored, self.monitor
        if process is self.standby.process and self.waiting and monitor is not None and monitor.overdue is None:
            process = None  # a standby that may still become warm: the next generation needs it
        generation = self.orders["generation"] if self.orders is not None else None
        if self._start is not None:  # it must not take the standby after this halt
            why = f"generation {self._start.orders['generation']} was halted before its process was ready"
            self._effects.append(Refuse(self._start.call, HaltedError(why)))
            self._start = None
        if process is not None and process.alive:
            process.kill(now.s)
            self._effects.append(Kill(process))
        due_s = now.s + event.timeout_s
        self._halts.append(_WaitingHalt(event.call, due_s, event.cursor, now.wall_s, process, generation, monitor))

    def _close(self) -> None:
        self.closed = True
        if self._start is not None:
            self._effects.append(Refuse(self._start.call, HaltedError("the agent ends")))
            self._start = None
        processes = [process for process in (self.current, self.standby.close()) if process is not None]
        self._effects += [Kill(process) for process in processes if process.alive]

    # ------------------------------------------------------------------ processes

    def _prepare(self, preparation: Mapping[str, Any]) -> None:
        old = self.standby.prepare(preparation)
        if old is not None and old.alive:
            self._effects.append(Kill(old))

    def _pass_on(self, event: inputs.Order) -> None:
        command = orders_of.agent_command(event.message)
        if self.current is None or not self.current.alive:
            self._answer(event.call, False)
        else:
            self._effects.append(Send(self.current, cast("Mapping[str, Any]", command), event.call))

    def _on_said(self, process: ProcessRecord, event: Any, now: Now) -> None:
        kind = event["ev"]
        process.observe(event)
        if process is self.current and self.waiting:  # of the previous generation, whose end `start` waits for
            return
        if process is not self.current:
            if kind != "heartbeat":  # kept for the generation that it will belong to
                process.early_events.append(event)
            return
        if self.monitor is not None:
            # Heartbeats too: the step in them is the progress that the watchdog looks at.
            self.monitor.observe(event, now.s)
        if kind == "heartbeat":
            return
        self._report(event)
        # Not before the first step: the start of a standby would slow the recovery down.
        if kind == "first_step" and self.standby.process is None:
            self.standby.request()

    def _on_exit(self, event: inputs.Exited) -> None:
        process = event.process
        process.end(event.how, event.log_tail)
        if process is self.current:
            self._on_current_exit(process)
        elif process is self.standby.process:
            self.standby.ended(process)

    def _on_current_exit(self, process: ProcessRecord) -> None:
        # While a `start` waits, the monitor is that of the next generation already.
        if self.monitor is not None and not self.waiting:
            self.monitor.end()
        # A process that the agent killed did not fail.
        if not process.halted and process.exit is not None:
            self._report(process.exit)
        # After a failure before the first step there is no standby yet. After `done`, none is needed.
        if not process.done and self.standby.process is None:
            self.standby.request()

    def _dying(self) -> ProcessRecord | None:
        """Returns the process of the previous generation if it was killed and still exists."""
        return self.current if self.current is not None and self.current.dying else None

    # ------------------------------------------------------------------ limits and notices

    def _look(self, now: Now) -> None:
        for alarm in self.monitor.look(now.s) if self.monitor is not None else ():
            if alarm.overdue:
                self._overdue.append(_OverdueAlarm(alarm, self.monitored, now.s + STACKS_GRACE_S))
                self._effects.append(ReadOverdue(alarm, self.monitored))
            else:
                self._read_stacks(self.monitored)

    def _read_stacks(self, process: ProcessRecord | None) -> None:
        if process is not None and self.monitor is not None and self.monitor.taking is None:
            self.monitor.taking = process
            self._effects.append(ReadStacks(process))

    def _report_overdue(self, now: Now) -> None:
        monitor = self.monitor
        due = [pending for pending in self._overdue if monitor is not None and pending.is_due(monitor, now.s)]
        self._overdue = [pending for pending in self._overdue if pending not in due]
        for pending in due:
            self._report(_overdue_event(pending, monitor.stacks if monitor is not None else None, now))

    def _on_notice(self, event: inputs.Notice, now: Now) -> None:
        notice = event.notice
        if notice is None:
            self.notice = None  # withdrawn: the next notice is reported again
        elif self.notice is None:
            self.notice = {"t": now.wall_s, "ev": "notice", **notice, "reason": cut(notice["reason"]), "node": True}
            self._report(self.notice)

    def _report(self, event: Mapping[str, Any]) -> None:
        if event["ev"] == "overdue" and self.monitor is not None and self.monitor.overdue is None:
            self.monitor.overdue = cast(Overdue, event)
        self.events.append({**event, "generation": self.orders["generation"] if self.orders is not None else None})

    # ------------------------------------------------------------------ answers

    def _answer(self, call: Hashable, value: Any = None) -> None:
        self._effects.append(Answer(call, value))

    def _taken_over(self) -> dict[str, Any]:
        # While a `start` waits, the current process is still that of the generation before.
        current = None if self.waiting else self.current
        return {
            "generation": self.orders["generation"] if self.orders is not None else None,
            "orders": self.orders,
            "alive": self.waiting or (current is not None and current.alive),
            "done": current is not None and current.done,
            "first_event": self.events.first,
            "next_event": self.events.next,
        }

    def _halted(self, halt: _WaitingHalt, now: Now) -> Halted:
        process = halt.process
        gone = process is None or not process.alive
        findings = halt.monitor.findings() if halt.monitor is not None else {"stacks": None, "overdue": None}
        answer = {
            **post_mortem(process),
            **_log_of(process),
            "generation": halt.generation,
            "notice": self.notice,
            "gone": gone,
            "clock_s": halt.asked_at_s,
            **findings,
        }
        if process is not None and not gone:
            answer["dying_s"] = process.dying_s(now.s)
        if halt.cursor is not None:
            answer |= self.events.answer(halt.cursor)
        return cast(Halted, answer)

    def _host_state(self, now: Now) -> HostState:
        current, standby = self.current, self.standby.process
        watched = self.monitor is not None and current is not None and not self.waiting
        return {
            "t": now.wall_s,
            "pid": current.pid if current else None,
            "generation": current.generation if current else None,
            "alive": current is not None and current.alive,
            "silence": self.monitor.silence(current, now) if watched and self.monitor and current else None,
            **_log_of(current),
            "standby": self.standby.state(),
            "standby_pid": standby.pid if standby else None,
            "notice": self.notice,
        }


def _log_of(process: ProcessRecord | None) -> LogPaths:
    """Returns the paths of a process's log: on its machine, and of its copy."""
    return {"log_path": process.log_path if process else None, "log_copy": process.log_copy if process else None}


def _overdue_event(pending: _OverdueAlarm, stacks: str | None, now: Now) -> Overdue:
    alarm, process, seen = pending.alarm, pending.process, pending.seen
    unread = ["(its log could not be read in time)"] if process is not None else []
    position: Position = process.position() if process is not None else {"step": None, "batch_index": None}
    return {
        "t": now.wall_s,
        "ev": "overdue",
        "phase": alarm.phase,
        "limit_s": alarm.limit_s,
        "waited_s": alarm.waited_s,
        "stacks": stacks,
        "state": seen.state if seen is not None else None,
        "log_tail": seen.log_tail if seen is not None else unread,
        **position,
    }
