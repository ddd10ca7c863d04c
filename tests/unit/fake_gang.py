"""A gang without Ray, processes or time: agents that behave as the real ones, in a world whose clock is turned by whoever waits.

The driver sees the methods of `cluster.gang.gang.Gang` and of `HostAgent`. The world keeps what was committed, and writes down
whatever must never happen: a healthy host that is given up, a healthy gang that is halted, a step that two gangs have trained.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from cluster.agent import effects, inputs
from cluster.agent.agent import HALT_ANSWER_S, STACKS_TIMEOUT_S
from cluster.agent.driver_lease import StaleDriver
from cluster.agent.inputs import Now
from cluster.agent.process_record import ExitStatus, ProcessRecord
from cluster.agent.state import AgentState
from cluster.gang.adoption import AdoptError, newest_generation
from cluster.gang.calls import AgentGone, Answer, NoAnswer
from gangway.wire import orders as orders_of
from gangway.wire.answers import Description, TakenOver
from gangway.wire.events import Event
from gangway.wire.orders import MachineOrders
from tests.event_schema import check_event

EPOCH_S = 1_000_000.0
"""The wall clock when a world begins."""
ANSWER_S = 0.001
START_AGENT_S = 1.0
JOIN_S = RESTORE_S = COMPILE_S = 0.05
STEP_S = 0.1
SAVE_S = 0.3
COLLATERAL_S = 0.05
HANG_LIMIT_S = 3.0
UNREACHABLE_LIMIT_S = 2.0
"""An agent that was out of reach for less has not given the driver a reason to give it up."""
SAVE_STEPS = 10


MAX_EFFECTS = 50_000
MAX_EVENTS = 1_000_000
"""More of either is a loop without an end."""


class DriverDied(BaseException):
    """The driver's process was killed here."""


class World:
    """The clock, what happens next, and all that outlives a driver."""

    def __init__(self, max_steps: int = 60, lease_s: float = 120.0, *, step_s: float = STEP_S, save_steps: int = SAVE_STEPS):
        self.max_steps, self.lease_s, self.step_s, self.save_steps = max_steps, lease_s, step_s, save_steps
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self.violations: list[str] = []
        self.num_effects = 0
        self.max_effects: float = MAX_EFFECTS
        self.max_events: float = MAX_EVENTS
        self.die_at: set[int] = set()
        """Numbers of effects (counted from 1) at which the driver dies."""
        self.stall_at: dict[int, float] = {}
        """Effects before which the driver sleeps, and for how long."""
        self.agents: list[Agent] = []
        self.jobs: dict[str, Job] = {}
        self.commits: list[tuple[int, int]] = []
        """(generation, step), in order."""
        self.save_orders: list[tuple[int, float]] = []
        """(host, when) of each order to save now."""
        self.trouble_told_s: list[float] = []
        """When an agent told that its process had ended, or was overdue."""
        self.driver_term = 0
        self.files: dict[str, Any] = {}
        self.storage_free_s = 0.0
        """Until then the storage hangs."""
        self.storage_fails = False
        self.num_writes = 0
        self.fail_writes: set[int] = set()
        """Numbers of writes (counted from 1) of which each fails once."""
        self.driver_ahead_s = 0.0
        """How far the wall clock of the driver's machine is ahead."""
        self.dying_s = 0.0
        """How long a killed process takes to be gone."""
        self.can_start_agents = True
        self.deaf = False
        """Whether processes do not do what they are asked."""
        self.snapshot: tuple[int, int] | None = None
        """The generation and the step of the newest snapshot in memory; None: processes know of none."""

    def at(self, delay_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._counter), work))

    def advance(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Lets time pass, at most so much; less if `until` comes true."""
        end_s = self.now_s + seconds
        while not until() and self._queue and self._queue[0][0] <= end_s:
            due_s, number, work = heapq.heappop(self._queue)
            self.now_s = max(self.now_s, due_s)
            assert number < self.max_events, f"the world turns in a circle at {self.now_s:.1f} s"
            work()
        if not until():
            self.now_s = end_s

    def driver_thread(self) -> AbstractContextManager[None]:
        """For what a thread of the driver does beside its main one."""
        return nullcontext()

    def effect(self) -> None:
        """The driver is about to do something that others see."""
        self.num_effects += 1
        if self.num_effects > self.max_effects:
            raise AssertionError(f"after {self.max_effects} effects the driver is still at work: at {self.now_s:.0f} s")
        if stall_s := self.stall_at.pop(self.num_effects, 0.0):
            self.advance(stall_s)
        if self.num_effects in self.die_at:
            raise DriverDied

    def write(self) -> None:
        """A document is about to be written. Raises OSError."""
        self.num_writes += 1
        if self.storage_fails or self.num_writes in self.fail_writes:
            raise OSError(28, "No space left on device")

    def wrong(self, what: str) -> None:
        self.violations.append(f"at {self.now_s:.1f} s: {what}")

    def clock(self) -> float:
        return EPOCH_S + self.now_s

    def sleep(self, seconds: float) -> None:
        self.effect()
        self.advance(max(seconds, 0.001))  # no sleep is so short that no time passes


class Call:
    """What Ray would give a reference to."""

    def __init__(self) -> None:
        self.answer: tuple[Any, Exception | None] | None = None
        self.about: dict[str, Any] = {}
        """The part of the answer that is of the machine."""
        self._heard: list[Callable[[], None]] = []

    def end(self, value: Any = None, error: Exception | None = None) -> None:
        if self.answer is None:
            self.answer = (value, error)
            for callback in self._heard:
                callback()

    def future(self) -> Call:
        return self

    def add_done_callback(self, callback: Callable[[Call], None]) -> None:
        self.when_done(lambda: callback(self))

    def exception(self) -> Exception | None:
        return self.answer[1] if self.answer else None

    def when_done(self, callback: Callable[[], None]) -> None:
        self._heard.append(callback)
        if self.answer is not None:
            callback()


class FakeMailbox:
    def __init__(self, world: World):
        self._world = world
        self._answers: list[Answer] = []

    def expect(self, tag: Any, call: Call) -> None:
        call.when_done(lambda: self._answers.append(Answer(tag, *(call.answer or ()))))

    def collect(self, timeout_s: float) -> list[Answer]:
        self._world.effect()
        if not self._answers:
            self._world.advance(max(timeout_s, 1e-6), until=lambda: bool(self._answers))
        taken, self._answers = self._answers, []
        return taken


@dataclass
class Process:
    agent: Agent
    record: ProcessRecord
    host: int
    generation: int
    driver_term: int
    """The term of the driver whose checkpoints may be committed."""
    orders: orders_of.Start
    alive: bool = True
    frozen: bool = False
    done: bool = False
    step: int = 0
    told_step: int = 0

    def tell(self, event: dict[str, Any]) -> None:
        told = {"t": self.agent.clock(), "generation": self.generation, **event}
        check_event(told, "host")
        self.agent.feed(inputs.Said(self.record, cast(Event, told)))

    def tell_progress(self) -> None:
        """Sends a heartbeat, if there is something new: not at every step, for nobody reads them between two polls."""
        if self.step != self.told_step:
            self.told_step = self.step
            self.tell({"ev": "heartbeat", "step": self.step, "batch_index": self.step, "busy_s": 0.01 * self.step})

    def end(self) -> None:
        """It ends by itself."""
        self.done = True
        self.agent._end(self.record, ExitStatus(0, None, self.agent.clock(), by_parent=False))


CALLS: dict[str, type[inputs.Call]] = {
    "describe": inputs.Call,
    "keep": inputs.Call,
    "take_over": inputs.TakeOver,
    "prepare": inputs.Prepare,
    "start": inputs.Start,
    "order": inputs.Order,
    "poll": inputs.Poll,
    "shutdown": inputs.Shutdown,
}
"""The input of each method of `HostAgent` that has its arguments in the same order."""


class Agent:
    """As `cluster.agent.agent.HostAgent`: the same state, in a world of its own. Its processes only count steps."""

    def __init__(self, world: World, slot: int, number: int):
        self.world, self.slot, self.number = world, slot, number
        self.name, self.node_id = f"agent-{number}", f"node-{number}"
        self.alive = True
        self.ahead_s = 0.0
        """How far its machine's wall clock is ahead."""
        self.lost = False
        """It died, or was given up, before its driver had released the gang."""
        self.out_of_reach_s: tuple[float, float] = (-1.0, -1.0)
        """From when to when no call reaches it."""
        self.unavailable = False
        """What Ray says of it then: that it cannot be reached; else nothing at all."""
        self.state = AgentState("a process of the world", world.lease_s, world.now_s)
        self.process: Process | None = None
        self._calls: set[Call] = set()
        """Those that have no answer yet."""
        self._asked: Call | None = None
        """The call that is being answered."""
        self._num_spawned = 0
        world.at(world.lease_s, self._look_at_lease)

    @property
    def driver_term(self) -> int:
        return self.state.lease.driver_term

    @property
    def orders(self) -> orders_of.Start | None:
        return cast("orders_of.Start | None", self.state.orders)

    def clock(self) -> float:
        return self.world.clock() + self.ahead_s

    # ------------------------------------------------------------------ as it is called

    def reachable(self) -> bool:
        return not self.out_of_reach_s[0] <= self.world.now_s < self.out_of_reach_s[1]

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = Call()
        self.world.effect()
        self.world.at(ANSWER_S, lambda: self._arrive(call, method, args, kwargs))
        return call

    def _arrive(self, call: Call, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.alive:
            call.end(error=AgentGone("the actor died"))
        elif not self.reachable():
            if self.unavailable:
                call.end(error=NoAnswer("the actor is unavailable"))
            else:
                self._when_reachable(lambda: self._arrive(call, method, args, kwargs))
        else:
            self._obey(call, method, args, **kwargs)

    def _when_reachable(self, work: Callable[[], None]) -> None:
        self.world.at(self.out_of_reach_s[1] - self.world.now_s, work)

    def _obey(self, call: Call, method: str, args: tuple[Any, ...], *, driver_term: int, cursor: int | None = None) -> None:
        self._tell_progress()
        self._calls.add(call)
        self._asked = call
        if method == "halt":
            self._check_halt()
            self.feed(inputs.Halt(call, driver_term, HALT_ANSWER_S, cursor))
            if self.world.dying_s:
                self.world.at(HALT_ANSWER_S, self._end_waits)
        elif method == "take_stacks":
            self.feed(inputs.TakeStacks(call, driver_term, STACKS_TIMEOUT_S))
        else:
            if method == "start":
                self._check_start(*args)
            elif method == "poll":
                self.world.at(args[1], self._end_waits)
            elif method in ("describe", "take_over"):
                call.about = self._describe()
            self.feed(CALLS[method](call, driver_term, *args))
        self._asked = None

    def _end_waits(self) -> None:
        self._tell_progress()
        self.feed(inputs.TimePassed())

    def _check_start(self, orders: Any) -> None:
        if self.process is not None and self.process.alive:
            self.world.wrong(f"slot {self.slot} got orders for generation {orders['generation']} while its process runs")

    def _check_halt(self) -> None:
        process, job = self.process, self.world.jobs.get(self.job_key) if self.orders else None
        if job is not None and process is not None and process.alive and job.healthy():
            self.world.wrong(f"a healthy gang (generation {job.generation}) was halted")

    def _describe(self) -> dict[str, Any]:
        return {"host_ip": "10.0.0.1", "next_port": 1000 + next(self.world._counter), "node_id": self.node_id}

    @property
    def job_key(self) -> str:
        assert self.orders is not None
        return f"{self.orders['generation']} at {self.orders['coordinator']}"

    # ------------------------------------------------------------------ what its state says

    def feed(self, event: inputs.Input) -> None:
        """Passes on what has happened, and does what the state says."""
        if not self.alive:
            return
        for effect in self.state.handle(event, Now(self.world.now_s, self.clock())):
            self._do(effect)

    def _do(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Answer():
                if effect.first is not None:
                    self._take_orders(effect.first)
                self._answer(cast(Call, effect.call), effect.value)
            case effects.Refuse():
                self._answer(cast(Call, effect.call), error=effect.error)
            case effects.RefuseSlow():
                self._answer(cast(Call, effect.call), error=TimeoutError("no process was warm in time"))
            case effects.Spawn():
                self._spawn(effect)
            case effects.Send():
                self._answer(cast(Call, effect.call), self._command(orders_of.read_command(effect.message)))
            case effects.Kill():
                how = ExitStatus(None, 9, self.clock(), by_parent=True)
                if self.world.dying_s:
                    self.world.at(self.world.dying_s, partial(self._end, effect.process, how))
                else:
                    self._end(effect.process, how)
            case effects.ReadStacks():
                self.feed(inputs.StacksTaken(effect.process, None))
            case effects.ReadOverdue():
                raise AssertionError("nobody looks at the limits here: the job says when it hangs")

    def _answer(self, call: Call, value: Any = None, error: Exception | None = None) -> None:
        if call.about:
            value = {**call.about, **(value or {})}
        # The answer to a call that waits is on its way for a moment.
        if call is self._asked:
            self._deliver(call, value, error)
        else:
            self.world.at(ANSWER_S, lambda: self._deliver(call, value, error))

    def _deliver(self, call: Call, value: Any, error: Exception | None) -> None:
        if not self.alive:
            return
        if self.reachable():
            self._calls.discard(call)
            call.end(value, error)
        else:
            self._when_reachable(lambda: self._deliver(call, value, error))

    def _spawn(self, effect: effects.Spawn) -> None:
        self._num_spawned += 1
        record = ProcessRecord(1000 * self.number + self._num_spawned, "/logs/process.log")
        self.feed(inputs.Spawned(record, effect.preparation))
        self.feed(inputs.Said(record, {"t": self.clock(), "ev": "warm"}))

    def _take_orders(self, sent: effects.Send) -> None:
        orders = orders_of.read_orders(sent.message)
        assert orders["cmd"] == "start"
        driver_term = orders.get("driver_term", 0)
        self.process = Process(self, sent.process, orders["host"], orders["generation"], driver_term, orders)
        self.process.tell({"ev": "phase", "phase": "join"})
        job = self.world.jobs.setdefault(self.job_key, Job(self.world, orders["generation"], orders["num_hosts"]))
        job.join(self.process)

    def _command(self, command: orders_of.Command) -> bool:
        process = self.process
        if process is None or not process.alive:
            return False
        if command["cmd"] == "taken_over":
            process.driver_term = command["driver_term"]
        elif command["cmd"] == "stop":
            self.world.jobs[self.job_key].stop(command["reason"])
        elif command["cmd"] == "save":
            self.world.save_orders.append((process.host, self.world.now_s))
        return True

    # ------------------------------------------------------------------ what happens to it

    def tell(self, event: dict[str, Any]) -> None:
        """Its process sends an event, or it has something to say itself."""
        if event["ev"] in ("overdue", "printed"):
            told = {"t": self.clock(), **event}
            check_event(told, "host")
            if event["ev"] == "overdue":
                self.world.trouble_told_s.append(self.world.now_s)
            self.feed(inputs.Reported(told))
        elif self.process is not None:
            self.process.tell(event)

    def _tell_progress(self) -> None:
        if self.process is not None:
            self.process.tell_progress()

    def end_process(self, *, told: bool) -> None:
        """Its process is killed by somebody else. Not `told`: and the agent with it."""
        if self.process is not None and self.process.alive:
            if told:
                self._end(self.process.record, ExitStatus(None, 9, self.clock(), by_parent=False))
            else:
                self._lose_process(self.process)

    def _end(self, record: ProcessRecord, how: ExitStatus) -> None:
        process = self.process if self.process is not None and self.process.record is record else None
        if process is not None:
            process.tell_progress()
            process.alive = False
        if not how.by_parent:
            self.world.trouble_told_s.append(self.world.now_s)
        self.feed(inputs.Exited(record, how, []))
        if process is not None and not process.done:
            self._lose_process(process)

    def _lose_process(self, process: Process) -> None:
        process.alive = False
        self.world.jobs[self.job_key].member_died()

    def die(self, *, released: bool = False) -> None:
        """The machine is gone, or (`released`) is given back."""
        if not self.alive:
            return
        self.alive, self.lost = False, not released
        calls, self._calls = self._calls, set()
        for call in calls:
            call.end(error=AgentGone("the actor died"))
        self.end_process(told=False)

    def _look_at_lease(self) -> None:
        left_s = self.state.lease.left_s(self.world.now_s)
        if not self.alive:
            return
        if left_s <= 0:
            self.die()
        else:
            self.world.at(left_s, self._look_at_lease)


class Job:
    """The processes of one generation: they step together or not at all."""

    def __init__(self, world: World, generation: int, num_hosts: int):
        self.world, self.generation, self.num_hosts = world, generation, num_hosts
        self.processes: dict[int, Process] = {}
        self.step = 0
        self.resumed_step: int | None = None
        self.num_dead = 0
        self.stop_reason: str | None = None
        self._lost_told = self._hang_told = False

    def healthy(self) -> bool:
        """Whether all goes on as it should, as far as the hosts themselves can tell."""
        if self.num_dead or len(self.processes) < self.num_hosts:
            return False
        far = any(p.agent.out_of_reach_s[1] - p.agent.out_of_reach_s[0] > UNREACHABLE_LIMIT_S for p in self.processes.values())
        return not far and all(p.alive and not p.frozen and not p.done for p in self.processes.values())

    def join(self, process: Process) -> None:
        self.processes[process.host] = process
        if len(self.processes) == self.num_hosts:
            self._later(JOIN_S, self._restore)

    def stop(self, reason: str) -> None:
        if not self.world.deaf:
            self.stop_reason = self.stop_reason or reason

    def member_died(self) -> None:
        self.num_dead += 1
        if not self._lost_told and any(process.alive for process in self.processes.values()):
            self._lost_told = True
            self.world.at(COLLATERAL_S, self._tell_lost)

    def _tell_lost(self) -> None:
        for process in self.processes.values():
            if process.alive and not process.done:
                exception = {
                    "type": "JaxRuntimeError",
                    "message": "Connection closed by peer",
                    "traceback": "",
                    "user_frame": None,
                    "user_traceback": "",
                }
                kind = {"kind": "collateral", "deterministic": False}
                process.tell({"ev": "exception", **exception, **kind, "step": process.step})

    def _later(self, delay_s: float, work: Callable[[], None]) -> None:
        """If all are still there then."""

        def unless_broken() -> None:
            living = [process for process in self.processes.values() if process.alive]
            if len(living) < self.num_hosts:
                return
            if any(process.frozen for process in living):
                if not self._hang_told:
                    self._hang_told = True
                    self.world.at(HANG_LIMIT_S, self._tell_hang)
                return
            work()

        self.world.at(delay_s, unless_broken)

    def _tell_hang(self) -> None:
        for process in self.processes.values():
            if process.alive:
                limits = {"phase": "train", "limit_s": HANG_LIMIT_S, "waited_s": HANG_LIMIT_S, "stacks": None, "state": "S"}
                position = {"step": process.step, "batch_index": process.step}
                process.agent.tell({"ev": "overdue", **limits, **position, "log_tail": []})

    def _tell(self, event: dict[str, Any]) -> None:
        for process in self.processes.values():
            process.tell(dict(event))

    def _restore(self) -> None:
        self._tell({"ev": "joined"})
        self._tell({"ev": "phase", "phase": "restore"})
        self._later(RESTORE_S, self._compile)

    def _compile(self) -> None:
        self.step = self.world.commits[-1][1] if self.world.commits else 0
        source: dict[str, Any] = {}
        if self.world.snapshot is not None:
            of, step = self.world.snapshot
            fits = of >= self.processes[0].orders["snapshots_since"] and step >= self.step
            source = {"source": "memory" if fits else "storage"}
            self.step = max(self.step, step) if fits else self.step
            self._tell({"ev": "snapshots", "since": of if fits else self.generation})
        self.resumed_step = self.step
        self._tell({"ev": "restored", "step": self.step, "skipped": [], **source})
        self._tell({"ev": "phase", "phase": "compile"})
        self._later(COMPILE_S, self._train)

    def _train(self) -> None:
        self._tell({"ev": "phase", "phase": "train"})
        self._later(self.world.step_s, self._take_step)

    def _take_step(self) -> None:
        jobs = list(self.world.jobs.values())
        newer = [job for job in jobs[jobs.index(self) + 1 :] if job.step]
        if newer:
            self.world.wrong(f"generation {self.generation} trains while generation {newer[0].generation} has begun")
        if self.step < (self.world.commits[-1][1] if self.world.commits else 0):
            self.world.wrong(f"step {self.step} is trained again, though a later one is committed")
        if self.step >= self.world.max_steps:  # the end of the generation before was not heard
            self._end()
            return
        self.step += 1
        first = self.step == (self.resumed_step or 0) + 1
        for process in self.processes.values():
            process.step = self.step
        if first:
            self._tell({"ev": "first_step", "step": self.step, "resumed_step": self.resumed_step})
        if self.step % 5 == 0:
            self.processes[0].tell({"ev": "metrics", "step": self.step, "metrics": {"loss": 1.0}, "seconds": {}})
        ending = self.step >= self.world.max_steps or self.stop_reason is not None
        if ending or self.step % self.world.save_steps == 0:
            self._save(self.step, ending)
        if not ending:
            self._later(self.world.step_s, self._take_step)

    def _save(self, step: int, ending: bool) -> None:
        self._tell({"ev": "saving", "step": step})
        self._later(SAVE_S, lambda: self._commit(step, ending))

    def _commit(self, step: int, ending: bool) -> None:
        fenced = any(process.driver_term != self.world.driver_term for process in self.processes.values())
        if fenced:
            self._tell({"ev": "save_failed", "step": step, "error": "another driver has the run"})
            if ending:
                self._later(1.0, lambda: self._save(step, ending))  # tried again until the new driver is known
            return
        if self.world.commits and self.world.commits[-1][1] > step:
            self.world.wrong(f"step {step} is committed after step {self.world.commits[-1][1]}")
        self.world.commits.append((self.generation, step))
        self._tell({"ev": "saved", "step": step, "path": f"/checkpoints/{step}"})
        if ending:
            self._end()

    def _end(self) -> None:
        reason = "max_steps" if self.step >= self.world.max_steps else str(self.stop_reason)
        result = {"steps": self.step, "samples_digest": f"1..{self.step}"}
        for process in self.processes.values():
            process.tell({"ev": "done", "step": self.step, "stop_reason": reason, "result": result})
            process.end()


@dataclass(eq=False)
class FakeSlot:
    number: int
    agent: Agent
    available: bool = False
    unassigned: bool = False
    lost: bool = False
    avoid_nodes: tuple[str, ...] = ()
    asked: Call | None = None
    description: Description | None = field(default=None)

    @property
    def node_id(self) -> str | None:
        return self.agent.node_id if self.available else None


class FakeGang:
    """As `cluster.gang.gang.Gang`, as far as the driver and its roster go."""

    def __init__(self, world: World, driver_term: int):
        self.world, self.driver_term = world, driver_term
        self.slots: list[FakeSlot] = []
        self.members: list[FakeSlot] = []
        self.leads: list[TakenOver] = []
        self.version = 0
        self._preparation: Any = None

    def add_slot(self, number: int) -> FakeSlot:
        slot = FakeSlot(number, start_agent(self.world, number))
        self.slots.append(slot)
        self._fill(slot)
        return slot

    def _fill(self, slot: FakeSlot) -> None:
        slot.asked = self.ask(slot, "describe")
        if self._preparation is not None:
            self.ask(slot, "prepare", self._preparation)

    def call(self, host: int, method: str, *args: Any, **kwargs: Any) -> Call:
        return self.ask(self.members[host], method, *args, **kwargs)

    def tell(self, host: int, method: str, *args: Any) -> None:
        self.call(host, method, *args)

    def ask(self, slot: FakeSlot, method: str, *args: Any, **kwargs: Any) -> Call:
        return slot.agent.call(method, args, {**kwargs, "driver_term": self.driver_term})

    def mailbox(self) -> FakeMailbox:
        return FakeMailbox(self.world)

    def prepare(self, preparation: Any) -> None:
        self._preparation = preparation
        for slot in self.slots:
            if not slot.unassigned:
                self.ask(slot, "prepare", preparation)

    def orders(self, host: int) -> MachineOrders:
        return {"local_device_ids": None, "slice": 0, "cache_dir": None}

    def cluster_address(self) -> str:
        return "10.0.0.1:6379"

    def draining_nodes(self) -> dict[str, float | None]:
        return {}

    def record(self) -> dict[str, Any]:
        slots = [{"number": slot.number, "name": slot.agent.name} for slot in self.slots]
        return {"slots": slots, "members": [slot.number for slot in self.members]}

    def refresh(self, *, members: bool = False) -> list[FakeSlot]:
        for slot in self.slots:
            self._look(slot, followed=slot in self.members and not members)
        return [slot for slot in self.slots if slot.available]

    def _look(self, slot: FakeSlot, *, followed: bool) -> None:
        if not slot.agent.alive and not slot.unassigned and (slot.lost or not followed):
            self.lose(slot)
        elif slot.asked is not None and slot.asked.answer is not None:
            slot.available, slot.asked = slot.asked.answer[1] is None, None
        elif slot.agent.alive and slot.asked is None:
            self.ask(slot, "keep")  # what the lease keeper does

    def fill_unassigned(self) -> None:
        for slot in self.slots:
            if slot.unassigned and self.world.can_start_agents:
                slot.agent, slot.unassigned = start_agent(self.world, slot.number), False
                self._fill(slot)
                self.version += 1

    def lose(self, *slots: FakeSlot, avoid_nodes: Any = (), fill: bool = True) -> None:
        self.world.effect()
        for slot in slots:
            agent = slot.agent
            away_s = agent.out_of_reach_s[1] - agent.out_of_reach_s[0]
            if agent.alive and away_s <= UNREACHABLE_LIMIT_S and not avoid_nodes:
                self.world.wrong(f"slot {slot.number}, whose agent is well, was given up")
            agent.die()
            slot.available, slot.asked, slot.unassigned, slot.lost = False, None, True, True
        self.version += 1
        if fill:
            self.fill_unassigned()

    def missing(self) -> str:
        return "no machine is free"

    def set_members(self, slots: Any) -> None:
        self.members = list(slots)
        for slot in self.members:
            slot.lost = False
        self.version += 1

    def wait_available(self, count: int, timeout_s: float, check_stop: Callable[[], None] = lambda: None) -> list[FakeSlot]:
        deadline_s = self.world.now_s + timeout_s
        while len(found := self.refresh()) < count and self.world.now_s < deadline_s:
            check_stop()
            self.world.sleep(0.5)
        return found

    def clear_avoided_nodes(self) -> bool:
        return False

    def release(self) -> None:
        self.world.effect()
        for slot in self.slots:
            if slot.agent.driver_term <= self.driver_term:
                slot.agent.die(released=True)
        self.slots, self.members = [], []


def start_agent(world: World, slot: int) -> Agent:
    agent = Agent(world, slot, len(world.agents))
    agent.out_of_reach_s = (world.now_s, world.now_s + START_AGENT_S)
    world.agents.append(agent)
    return agent


class FakeGangs:
    """As the module `cluster.gang.acquire`."""

    def __init__(self, world: World, num_slots: int, num_members: int):
        self.world, self.num_slots, self.num_members = world, num_slots, num_members

    def clear(self, run_name: str, *, check_stop: Callable[[], None] = lambda: None) -> None:
        self.world.effect()
        for job in self.world.jobs.values():
            # Of agents that came while the storage was away, the next driver cannot know.
            known = not self.world.storage_fails and self.world.storage_free_s == 0.0
            if known and job.healthy() and any(process.agent.alive for process in job.processes.values()):
                self.world.wrong(f"a healthy gang (generation {job.generation}) was cleared away")
        for agent in self.world.agents:
            agent.die()

    def reserve(self, hosts: Any, run_name: str, *, check_stop: Callable[[], None], driver_term: int, **about: Any) -> FakeGang:
        gang = FakeGang(self.world, driver_term)
        try:
            for number in range(self.num_slots):
                gang.add_slot(number)
            while len(gang.refresh()) < self.num_members:
                check_stop()
                self.world.sleep(0.2)
        except DriverDied:
            raise
        except BaseException:
            gang.release()
            raise
        gang.set_members([slot for slot in gang.slots if slot.available][: self.num_members])
        return gang

    def adopt(
        self,
        hosts: Any,
        run_name: str,
        record: Mapping[str, Any],
        *,
        check_stop: Callable[[], None],
        driver_term: int,
        **about: Any,
    ) -> FakeGang:
        gang, by_name = FakeGang(self.world, driver_term), {agent.name: agent for agent in self.world.agents}
        for one in record["slots"]:
            agent = by_name[one["name"]]
            gang.slots.append(FakeSlot(one["number"], agent, unassigned=not agent.alive, lost=not agent.alive))
        asked = {slot.number: gang.ask(slot, "take_over") for slot in gang.slots}
        for _ in range(50):
            check_stop()
            if all(call.answer is not None for call in asked.values()):
                break
            self.world.sleep(0.2)
        answers = {number: call.answer for number, call in asked.items() if call.answer is not None}
        if stale := next((error for _, error in answers.values() if isinstance(error, StaleDriver)), None):
            raise stale
        leads = {number: value for number, (value, error) in answers.items() if error is None}
        if not leads:
            raise AdoptError("no agent answers")
        by_number = {slot.number: slot for slot in gang.slots}
        members = newest_generation(leads)
        for number in leads:
            by_number[number].available = True
        gang.set_members([by_number[number] for number in members])
        gang.leads = [leads[number] for number in members]
        return gang
