"""The real gang (`cluster.gang.gang.Gang`) on a Ray that is simulated: the agents of `fake_gang`, placement groups that
have their machines at once. For runs of thousands of hosts, whose driver is then all real but for what Ray itself does.

Whatever the driver does is metered: its CPU time is kept apart from that of the simulation, and is added to the world's clock.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray

from cluster.gang import gang as gangs
from cluster.gang.calls import AgentGone, NoAnswer
from cluster.gang.gang import Gang
from cluster.gang.lease_keeper import TURN_S, LeaseKeeper
from cluster.hosts.capacity import Node
from cluster.placement import bundles, placement_groups
from tests.unit.driving import Launched
from tests.unit.fake_gang import Agent, Call, FakeMailbox, World, start_agent


class MeteredWorld(World):
    """A world that knows how much CPU time its driver took, all its threads together: `driver_cpu_s`.

    With `in_time`, the world's clock goes on by that time too: what the driver does late, it does late here as well.
    """

    def __init__(self, *, in_time: bool = False, **about: Any):
        super().__init__(**about)
        self.in_time = in_time
        self.max_effects = self.max_events = math.inf
        self.driver_cpu_s = 0.0
        self._driver_since_s: float | None = None
        """Of the thread's CPU clock, while the driver has the word."""
        self.switched: list[Callable[[bool], None]] = []
        """Called with True when the driver gets the word, and with False when the world does."""

    def _give(self, *, to_driver: bool) -> None:
        for callback in self.switched:
            callback(to_driver)
        if to_driver:
            self._driver_since_s = time.thread_time()
        elif self._driver_since_s is not None:
            spent_s = time.thread_time() - self._driver_since_s
            self._driver_since_s = None
            self.driver_cpu_s += spent_s
            if self.in_time:
                self.now_s += spent_s

    @contextmanager
    def driver(self) -> Iterator[None]:
        """What runs inside is the driver's work, outside of which it is called."""
        assert self._driver_since_s is None
        self._give(to_driver=True)
        try:
            yield
        finally:
            self._give(to_driver=False)

    driver_thread = driver

    def advance(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        if self._driver_since_s is None:
            super().advance(seconds, until)
            return
        self._give(to_driver=False)
        try:
            super().advance(seconds, until)
        finally:
            self._give(to_driver=True)


class Handle:
    """Of a Ray actor."""

    def __init__(self, agent: Agent):
        self.agent = agent

    def __getattr__(self, method: str) -> Method:
        return Method(self.agent, method)


class Method:
    def __init__(self, agent: Agent, name: str):
        self._agent, self._name = agent, name

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *arguments: Any, **by_name: Any) -> Call:
        if self._name == "take_over":  # the one that takes the term by its place
            arguments, by_name = arguments[1:], {"driver_term": arguments[0]}
        return self._agent.call(self._name, arguments, by_name)


class Group:
    def __init__(self, name: str, count: int):
        self.name, self.count = name, count
        self.id = self

    def hex(self) -> str:
        return self.name


class Steward(Agent):
    """It never leaves."""

    def _look_at_lease(self) -> None: ...


class Maker:
    """As `cluster.gang.slots.AgentMaker`."""

    def __init__(self, simulated: SimulatedRay, config: Any, run_name: str, *, driver_term: int, lease_s: float, **about: Any):
        self.config, self.run_name, self.driver_term, self.lease_s, self.cache_dir = config, run_name, driver_term, lease_s, ""
        self._ray = simulated

    def hire_steward(self) -> tuple[str, Handle]:
        return "steward", Handle(Steward(self._ray.world, -1, -1))

    def create(self, place: Any, number: int) -> tuple[str, Handle]:
        agent = start_agent(self._ray.world, number)
        agent.node_id = f"{place.group.name}/{place.index}"
        self._ray.agents[agent.name] = agent
        return agent.name, Handle(agent)

    def keep(self, handle: Handle) -> Call:
        return handle.keep.remote(driver_term=self.driver_term)


class SimulatedGang(Gang):
    world: World

    def mailbox(self) -> Any:
        return FakeMailbox(self.world)

    def draining_nodes(self) -> dict[str, float | None]:
        return {}

    def cluster_address(self) -> str:
        return "10.0.0.1:6379"


class SimulatedRay:
    """As the module `cluster.gang.acquire` for a driver (`reserve`, `adopt`, `clear`), within `patched`."""

    def __init__(self, world: MeteredWorld):
        self.world = world
        self.agents: dict[str, Agent] = {}
        self.groups: dict[str, Group] = {}
        self._numbers = itertools.count()

    # ------------------------------------------------------------------ as the module cluster.gang.acquire

    def clear(self, run_name: str, *, check_stop: Callable[[], None]) -> None:
        for agent in self.agents.values():
            agent.die()
        self.groups.clear()

    def reserve(self, hosts: Any, run_name: str, *, check_stop: Callable[[], None], **about: Any) -> Gang:
        gang = self._gang(Maker(self, hosts, run_name, **about))
        gang.take_hosts(hosts.start_timeout_s, check_stop)
        return gang

    def adopt(self, hosts: Any, run_name: str, record: Any, *, check_stop: Callable[[], None], **about: Any) -> Gang:
        gang = self._gang(Maker(self, hosts, run_name, **about))
        gang.take_over(record, check_stop)
        return gang

    def _gang(self, maker: Maker) -> SimulatedGang:
        gang = SimulatedGang(maker)  # type: ignore[arg-type]
        gang.world = self.world
        self.world.at(TURN_S, lambda: self._keep(gang._keeper))
        return gang

    def _keep(self, keeper: LeaseKeeper) -> None:
        """What the keeper's thread does."""
        if not keeper._stopped.is_set():
            with self.world.driver_thread():
                keeper.turn()
            self.world.at(TURN_S, lambda: self._keep(keeper))

    # ------------------------------------------------------------------ as Ray

    def wait(self, refs: list[Call], *, timeout: float, num_returns: int = 1) -> tuple[list[Call], list[Call]]:
        def come() -> list[Call]:
            return [ref for ref in refs if ref.answer is not None]

        if timeout > 0:
            self.world.advance(timeout, until=lambda: len(come()) >= num_returns)
        return come(), [ref for ref in refs if ref.answer is None]

    def get(self, ref: Call) -> Any:
        assert ref.answer is not None
        value, error = ref.answer
        if isinstance(error, AgentGone):
            raise ray.exceptions.ActorDiedError
        if isinstance(error, NoAnswer):
            raise ray.exceptions.ActorUnavailableError("", None)
        if error is not None:
            raise error
        return value

    def kill(self, handle: Handle) -> None:
        handle.agent.die(released=True)

    def node_ids(self, group: Group) -> dict[int, str]:
        return {index: f"{group.name}/{index}" for index in range(group.count)} if group.name in self.groups else {}

    def nodes(self) -> list[dict[str, Any]]:
        seen = [node for group in self.groups.values() for node in self.node_ids(group).values()]
        return [{"NodeID": node, "Alive": True} for node in seen]

    def living_nodes(self) -> list[Any]:
        room = {"CPU": 1.0}
        return [Node(node_id=node["NodeID"], ip="10.0.0.1", total=room, free={}, labels={}) for node in self.nodes()]

    def placement_group(self, bundles: list[Any], *, name: str, **how: Any) -> Group:
        self.groups[name] = Group(name, len(bundles))
        return self.groups[name]

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Everything of Ray, and the time, that the gang's modules ask."""
        clock = SimpleNamespace(monotonic=lambda: self.world.now_s, sleep=self.world.sleep)
        stand_ins: dict[Any, dict[str, Any]] = {
            ray: {"wait": self.wait, "get": self.get, "kill": self.kill, "nodes": self.nodes},
            placement_groups: {
                "living": lambda: {name: {"name": name} for name in self.groups},
                "node_ids": self.node_ids,
                "is_created": lambda group: True,
                "wait_ready": lambda *about: None,
                "by_id": self.groups.__getitem__,
                "remove": lambda gone, *about: [self.groups.pop(group.name) for group in list(gone)],
            },
            bundles: {
                "placement_group": self.placement_group,
                "remove_placement_group": lambda group: self.groups.pop(group.name, None),
            },
            gangs: {
                "LeaseKeeper": self._keeper,
                "living_nodes": self.living_nodes,
                "find_agent": lambda name: Handle(self.agents[name]) if self.agents[name].alive else None,
                "clear": lambda *about, **how: [],
                "time": clock,
            },
        }
        with ExitStack() as patches:
            for module, names in stand_ins.items():
                for name, stand_in in names.items():
                    patches.enter_context(mock.patch.object(module, name, stand_in))
            for module in ("gangway.waits", "cluster.placement.placement_groups"):
                patches.enter_context(mock.patch(f"{module}.time", clock))
            yield

    def _keeper(self, lease_s: float, call: Callable[[Any], Any]) -> LeaseKeeper:
        return LeaseKeeper(lease_s, call, clock=lambda: self.world.now_s, start=False)


def launched(world: MeteredWorld, hosts: int, **driver: Any) -> tuple[Launched, SimulatedRay]:
    """A launch of a run of so many hosts, in a simulated Ray; to be run within its `patched`."""
    made, simulated = Launched(world, hosts=hosts, **driver), SimulatedRay(world)
    made.gangs = simulated
    return made, simulated
