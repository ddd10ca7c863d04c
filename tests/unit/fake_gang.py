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
from typing import Any

from cluster.agent import orders as agent_orders
from cluster.agent.answers import Description, TakenOver
from cluster.agent.driver_lease import StaleDriver
from cluster.agent.event_log import EventLog
from cluster.agent.orders import MachineOrders
from cluster.gang.adoption import AdoptError, newest_generation
from cluster.gang.calls import AgentGone, Answer, NoAnswer
from tests.event_schema import check_event
from trainers.runtime import orders as orders_of

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
        self.can_start_agents = True
        self.deaf = False
        """Whether processes do not do what they are asked."""

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
        self._heard: list[Callable[[], None]] = []

    def end(self, value: Any = None, error: Exception | None = None) -> None:
        if self.answer is None:
            self.answer = (value, error)
            for hear in self._heard:
                hear()

    def when_done(self, hear: Callable[[], None]) -> None:
        self._heard.append(hear)
        if self.answer is not None:
            hear()


class FakeMailbox:
    def __init__(self, world: World):
        self._world = world
        self._answers: list[Answer] = []

    def expect(self, tag: Any, call: Call) -> None:
        call.when_done(lambda: self._answers.append(Answer(tag, *call.answer)))  # type: ignore[misc]

    def collect(self, timeout_s: float) -> list[Answer]:
        self._world.effect()
        if not self._answers:
            self._world.advance(max(timeout_s, 1e-6), until=lambda: bool(self._answers))
        taken, self._answers = self._answers, []
        return taken


@dataclass
class Process:
    agent: Agent
    host: int
    generation: int
    fence: int
    """The term of the driver whose checkpoints may be committed."""
    alive: bool = True
    frozen: bool = False
    done: bool = False
    step: int = 0
    orders: dict[str, Any] = field(default_factory=dict)


class Agent:
    """As `cluster.agent.agent.HostAgent`, with a process that only counts steps."""

    def __init__(self, world: World, slot: int, number: int):
        self.world, self.slot, self.number = world, slot, number
        self.name, self.node_id = f"agent-{number}", f"node-{number}"
        self.alive = True
        self.ahead_s = 0.0
        """How far its machine's wall clock is ahead."""
        self.lost = False
        """It died, or was given up, before its driver had released the gang."""
        self.driver_term = 0
        self.heard_at_s = world.now_s
        self.out_of_reach_s: tuple[float, float] = (-1.0, -1.0)
        """From when to when no call reaches it."""
        self.unavailable = False
        """What Ray says of it then: that it cannot be reached; else nothing at all."""
        self.log = EventLog(10_000)
        self.orders: dict[str, Any] | None = None
        self.process: Process | None = None
        self._waiting: list[tuple[int, Call]] = []
        world.at(world.lease_s, self._look_at_lease)

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
                self.world.at(self.out_of_reach_s[1] - self.world.now_s, lambda: self._arrive(call, method, args, kwargs))
        else:
            self._do(call, method, args, kwargs)

    def _do(self, call: Call, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        driver_term = kwargs.pop("driver_term")
        if driver_term < self.driver_term:
            call.end(error=StaleDriver(f"{driver_term} < {self.driver_term}"))
            return
        self.driver_term, self.heard_at_s = driver_term, self.world.now_s
        if method == "poll":
            self._poll(call, *args)
        else:
            call.end(getattr(self, f"_{method}")(*args, **kwargs))

    def _describe(self) -> dict[str, Any]:
        return {"host_ip": "10.0.0.1", "next_port": 1000 + next(self.world._counter), "node_id": self.node_id}

    def _keep(self) -> None: ...

    def _take_over(self) -> dict[str, Any]:
        generation = self.orders["generation"] if self.orders else None
        return {**self._describe(), "generation": generation, "orders": self.orders}

    def _prepare(self, preparation: dict[str, Any]) -> None: ...

    def _order(self, message: dict[str, Any]) -> bool:
        process = self.process
        if process is None or not process.alive:
            return False
        command = orders_of.read_command(message)
        if command["cmd"] == "fence":
            process.fence = int(command["path"] or 0)
        elif command["cmd"] == "stop":
            self.world.jobs[self.job_key].stop(command["reason"])
        elif command["cmd"] == "save":
            self.world.save_orders.append((process.host, self.world.now_s))
        return True

    @property
    def job_key(self) -> str:
        assert self.orders is not None
        return f"{self.orders['generation']} at {self.orders['coordinator']}"

    def _start(self, orders: dict[str, Any]) -> dict[str, Any]:
        if self.process is not None and self.process.alive:
            self.world.wrong(f"slot {self.slot} got orders for generation {orders['generation']} while its process runs")
        agent_orders.read_start(orders_of.read_orders(orders))
        self.orders = orders
        self.log.clear()
        self.process = Process(self, orders["host"], orders["generation"], int(orders["fence"]), orders=orders)
        self.tell({"ev": "phase", "phase": "join"})
        job = self.world.jobs.setdefault(self.job_key, Job(self.world, orders["generation"], orders["num_hosts"]))
        job.join(self.process)
        return {"pid": 1}

    def _poll(self, call: Call, cursor: int, wait_s: float) -> None:
        if self.log.next > cursor or wait_s <= 0:
            call.end(self._told(cursor))
            return
        self._waiting.append((cursor, call))
        self.world.at(wait_s, lambda: self._end_poll(cursor, call))

    def _end_poll(self, cursor: int, call: Call) -> None:
        if not self.alive:
            return
        if self.reachable():
            call.end(self._told(cursor))
        else:
            self.world.at(self.out_of_reach_s[1] - self.world.now_s, lambda: self._end_poll(cursor, call))

    def _told(self, cursor: int) -> dict[str, Any]:
        process = self.process
        return {
            **self.log.answer(cursor),
            "heartbeat": self._heartbeat(),
            "host_state": {"alive": process is not None and process.alive},
        }

    def _heartbeat(self) -> dict[str, Any] | None:
        process = self.process
        if process is None or not process.step:
            return None
        about = {"step": process.step, "batch_index": process.step, "busy_s": 0.01 * process.step}
        heartbeat = {"t": self.clock(), "ev": "heartbeat", "generation": process.generation, **about}
        check_event(heartbeat, "host")
        return heartbeat

    def _take_stacks(self) -> None: ...

    def _halt(self, cursor: int | None = None) -> dict[str, Any]:
        process, job = self.process, self.world.jobs.get(self.job_key) if self.orders else None
        if job is not None and process is not None and process.alive and job.healthy():
            self.world.wrong(f"a healthy gang (generation {job.generation}) was halted")
        exited = next((event for event in self.log.since(0) if event["ev"] == "exit"), None)
        exception = next((event for event in self.log.since(0) if event["ev"] == "exception"), None)
        overdue = next((event for event in self.log.since(0) if event["ev"] == "overdue"), None)
        self.end_process(told=False)
        return {
            "gone": True,
            "clock_s": self.clock(),
            "exit": exited,
            "exception": exception,
            "overdue": overdue,
            "last_heartbeat": self._heartbeat(),
            "notice": None,
            **self.log.answer(cursor or 0),
        }

    def _shutdown(self) -> None:
        self.end_process(told=False)

    # ------------------------------------------------------------------ what happens to it

    def tell(self, event: dict[str, Any]) -> None:
        if event["ev"] in ("exit", "overdue"):
            self.world.trouble_told_s.append(self.world.now_s)
        told = {"t": self.clock(), "generation": self.orders["generation"] if self.orders else None, **event}
        check_event(told, "host")
        self.log.append(told)
        if not self.reachable():
            return
        waiting, self._waiting = self._waiting, []
        for cursor, call in waiting:
            self.world.at(ANSWER_S, lambda cursor=cursor, call=call: self._end_poll(cursor, call))  # type: ignore[misc]

    def end_process(self, *, told: bool) -> None:
        process = self.process
        if process is None or not process.alive:
            return
        process.alive = False
        if told:
            self.tell({"ev": "exit", "code": None, "signal": 9, "log_tail": [], "pid": 1})
        if self.orders:
            self.world.jobs[self.job_key].member_died()

    def die(self, *, released: bool = False) -> None:
        """The machine is gone, or (`released`) is given back."""
        if not self.alive:
            return
        self.alive, self.lost = False, not released
        waiting, self._waiting = self._waiting, []
        for _, call in waiting:
            call.end(error=AgentGone("the actor died"))
        self.end_process(told=False)

    def _look_at_lease(self) -> None:
        left_s = self.heard_at_s + self.world.lease_s - self.world.now_s
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
                }
                kind = {"kind": "collateral", "deterministic": False}
                process.agent.tell({"ev": "exception", **exception, **kind, "step": process.step})

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
            process.agent.tell(dict(event))

    def _restore(self) -> None:
        self._tell({"ev": "joined"})
        self._tell({"ev": "phase", "phase": "restore"})
        self._later(RESTORE_S, self._compile)

    def _compile(self) -> None:
        self.step = self.world.commits[-1][1] if self.world.commits else 0
        self.resumed_step = self.step
        self._tell({"ev": "restored", "step": self.step, "skipped": []})
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
            self.processes[0].agent.tell({"ev": "metrics", "step": self.step, "metrics": {"loss": 1.0}, "seconds": {}})
        ending = self.step >= self.world.max_steps or self.stop_reason is not None
        if ending or self.step % self.world.save_steps == 0:
            self._save(self.step, ending)
        if not ending:
            self._later(self.world.step_s, self._take_step)

    def _save(self, step: int, ending: bool) -> None:
        self._tell({"ev": "saving", "step": step})
        self._later(SAVE_S, lambda: self._commit(step, ending))

    def _commit(self, step: int, ending: bool) -> None:
        fenced = any(process.fence != self.world.driver_term for process in self.processes.values())
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
            process.done = True
            process.agent.tell({"ev": "done", "step": self.step, "stop_reason": reason, "result": result})
            process.alive = False
            process.agent.tell({"ev": "exit", "code": 0, "signal": None, "log_tail": [], "pid": 1})


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

    def add_slot(self, number: int) -> FakeSlot:
        slot = FakeSlot(number, start_agent(self.world, number))
        slot.asked = self.ask(slot, "describe")
        self.slots.append(slot)
        return slot

    def call(self, host: int, method: str, *args: Any, **kwargs: Any) -> Call:
        return self.ask(self.members[host], method, *args, **kwargs)

    def ask(self, slot: FakeSlot, method: str, *args: Any, **kwargs: Any) -> Call:
        return slot.agent.call(method, args, {**kwargs, "driver_term": self.driver_term})

    def mailbox(self) -> FakeMailbox:
        return FakeMailbox(self.world)

    def prepare(self, preparation: dict[str, Any]) -> None:
        for slot in self.slots:
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
                slot.asked = self.ask(slot, "describe")
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
