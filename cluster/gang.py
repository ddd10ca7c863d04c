"""The gang: one host agent on each machine of a run, all of them or none.

CPU and GPU hosts sit on one placement group; each spare has a group of its own, so that a missing spare holds nothing up.
TPU hosts sit on whole slices (`slices.py`), each on the machine whose worker id is the host's place in its slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # as in ray.util.tpu: there is no public way to ask
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster import groups, slices
from cluster.agent import HostAgent
from cluster.topology import (
    NODE_ID_LABEL,
    HostsConfig,
    Node,
    bundle,
    devices_per_host,
    explain_missing,
    megascale_env,
    num_hosts,
    process_env,
    slice_of,
    strategy,
)

NAMESPACE = "gangway"
TRAINING_MODULE = "trainers.worker"
CACHE_DIR = "~/.cache/gangway/compile"
AGENT_START_TIMEOUT_S = 60.0
"""For a Ray actor to answer once its place is reserved."""
SPARE_TIMEOUT_S = 2.0
"""For a spare to answer; one that has found no machine yet, or has lost it, does not."""
CLEAR_TIMEOUT_S = 20.0
MAX_CONCURRENCY = 16
"""Calls that an agent answers at a time; a long poll is one of them."""


class GangTimeout(Exception):
    """The machines of the gang were not to be had in time; the message says what is missing."""


@dataclass(frozen=True)
class Place:
    """A bundle of a placement group: room for one host."""

    group: PlacementGroup
    index: int


@dataclass
class Member:
    """An agent and its place. `number` is the host it was started for, which names its logs and its compile cache."""

    agent: Any
    place: Place
    number: int
    description: dict[str, Any] = field(default_factory=dict)


def living_nodes() -> list[Node]:
    """The machines of the cluster with what they have and what is free."""
    free = available_resources_per_node()
    return [
        Node(
            node_id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"], node["Resources"]),
            labels=node.get("Labels") or {},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def reserve(
    config: HostsConfig,
    run_name: str,
    *,
    log_dir: str,
    cache_dir: str = CACHE_DIR,
    module: str = TRAINING_MODULE,
    avoid_nodes: Sequence[str] = (),
    timeout_s: float | None = None,
) -> Gang:
    """Takes all machines of the gang and starts an agent on each. `run_name` must be unique among the cluster's runs.

    `log_dir` is a local folder of each machine (or one they share); `~` in `cache_dir` is the machine's. Raises GangTimeout, with
    nothing left reserved, if they are not there within `timeout_s` (default: the configuration's).
    """
    gang = Gang(config, run_name, log_dir, cache_dir, module, avoid_nodes)
    try:
        gang._take_hosts(config.start_timeout_s if timeout_s is None else timeout_s)
    except BaseException:  # an interrupt too must leave nothing behind
        gang.release()
        raise
    return gang


def clear(run_name: str, timeout_s: float = CLEAR_TIMEOUT_S) -> list[str]:
    """Removes what an earlier driver of this run left in the cluster: agents, and groups that hold machines. Returns their names.

    A group outlives its driver's process for as long as the driver's job lives. Only one driver of a run may call this.
    """
    left = {key: info["name"] for key, info in groups.living().items() if _is_group_of(info["name"], run_name)}
    agents = _agents_of(run_name)
    for key in left:
        remove_placement_group(groups.by_id(key))
    for name in agents:
        _kill_named(name)
    groups.wait_until(lambda: not left.keys() & groups.living().keys() and not _agents_of(run_name), timeout_s)
    return [*left.values(), *agents]


class Gang:
    """The agents of a run in host order: `agents[i]` is JAX's process i. Made by `reserve`, which has filled it."""

    def __init__(
        self, config: HostsConfig, run_name: str, log_dir: str, cache_dir: str, module: str, avoid_nodes: Sequence[str] = ()
    ):
        self.config, self.run_name = config, run_name
        self._log_dir, self._cache_dir, self._module = log_dir, cache_dir, module
        self._avoid_nodes = tuple(avoid_nodes)
        self._members: list[Member] = []
        self._spares: list[Member] = []
        self._removers: list[Callable[[], None]] = []
        self._preparation: dict[str, Any] | None = None
        self._coordinator_ip = ""
        self._num_started = 0

    @property
    def agents(self) -> list[Any]:
        """Actor handles in host order."""
        return [member.agent for member in self._members]

    @property
    def spares(self) -> list[Any]:
        """Agents to take a host's place; one for which there is no machine answers when there is."""
        return [member.agent for member in self._spares]

    @property
    def descriptions(self) -> list[dict[str, Any]]:
        """What each agent said of itself when it started, in host order: host_ip, node_id, pid, ..."""
        return [member.description for member in self._members]

    def slice_of(self, host: int) -> int:
        """The TPU slice that a host belongs to; 0 elsewhere."""
        return slice_of(self.config, host)

    def orders(self, host: int) -> dict[str, Any]:
        """What the machines add to the orders of a host's training process."""
        own = self.config.kind == "gpu"
        return {"local_device_ids": list(range(devices_per_host(self.config))) if own else None, "slice": self.slice_of(host)}

    def prepare(self, preparation: dict[str, Any]) -> None:
        """Starts the standbys of all agents, spares and agents of later included, without waiting for any.

        A `go` that follows at once waits for a first preparation, but may still take a standby made with an earlier one.
        """
        self._preparation = preparation
        for member in [*self._members, *self._spares]:
            member.agent.prepare.remote(preparation)

    def replace(self, host: int, timeout_s: float | None = None) -> Any:
        """Puts another agent in a host's place, and returns it: a spare if one answers, else a new one where the old one was.

        A spare takes over at once, and the place it leaves open gets a new spare. Raises GangTimeout if a new one does not start.
        """
        old = self._members[host]
        ray.kill(old.agent)
        while self._spares:
            spare = self._spares.pop(0)
            if _answers(spare):
                self._members[host] = spare
                self._spares.append(self._create(old.place, old.number))
                return spare.agent
            ray.kill(spare.agent)
        timeout_s = self.config.start_timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        try:
            groups.wait_ready(old.place.group, deadline_s)
        except TimeoutError as error:
            raise self._explained(timeout_s) from error
        self._members[host] = self._create(old.place, old.number)
        self._wait_for_answers([self._members[host]], deadline_s)
        return self._members[host].agent

    def release(self) -> None:
        """Ends all agents, and with them their processes, and gives the machines back."""
        for member in [*self._members, *self._spares]:
            ray.kill(member.agent)
        for remove in self._removers:
            remove()
        self._members, self._spares, self._removers = [], [], []

    def _take_hosts(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        take = self._take_slices if self.config.kind == "tpu" else self._take_group
        try:
            places = take(deadline_s)
        except TimeoutError as error:
            raise self._explained(timeout_s) from error
        self._coordinator_ip = _node_of(places[0]).ip
        self._members = [self._create(place, number) for number, place in enumerate(places)]
        # The agents of spares wait for their groups inside Ray, and start whenever there is room for them.
        self._spares = [self._create(place, len(places) + number) for number, place in enumerate(self._take_spares())]
        self._wait_for_answers(self._members, max(deadline_s, time.monotonic() + AGENT_START_TIMEOUT_S))

    def _take_group(self, deadline_s: float) -> list[Place]:
        config, count = self.config, num_hosts(self.config)
        group = self._group(count, strategy(config), f"{self.run_name}-gang")
        groups.wait_ready(group, deadline_s)
        return [Place(group, index) for index in range(count)]

    def _take_slices(self, deadline_s: float) -> list[Place]:
        name = f"{self.run_name}-gang"
        group = slices.reserve(self.config, name, self._removers, deadline_s, living_nodes, self._avoid_nodes)
        return [Place(group, index) for index in range(num_hosts(self.config))]

    def _take_spares(self) -> list[Place]:
        return [Place(self._group(1, "PACK", f"{self.run_name}-spare-{index}"), 0) for index in range(self.config.spares)]

    def _group(self, count: int, how: str, name: str) -> PlacementGroup:
        labels = [{NODE_ID_LABEL: f"!in({','.join(self._avoid_nodes)})"}] * count if self._avoid_nodes else None
        group = placement_group([bundle(self.config)] * count, strategy=how, name=name, bundle_label_selector=labels)
        self._removers.append(lambda: groups.remove(group))
        return group

    def _explained(self, timeout_s: float) -> GangTimeout:
        why = explain_missing(self.config, living_nodes(), self._avoid_nodes)
        return GangTimeout(f"the hosts of run {self.run_name!r} could not be had within {timeout_s:g} s: {why}")

    def _create(self, place: Place, number: int) -> Member:
        """Asks Ray for an agent. It need not run yet: calls to it wait."""
        need = bundle(self.config)
        self._num_started += 1
        role = "host" if number < num_hosts(self.config) else "spare"
        options = {
            "name": f"{self.run_name}-{role}-{number}-{self._num_started}",
            "namespace": NAMESPACE,
            "num_cpus": need["CPU"],
            "num_gpus": need.get("GPU", 0),
            "resources": {"TPU": need["TPU"]} if "TPU" in need else None,
            "max_restarts": 0,
            "max_concurrency": MAX_CONCURRENCY,
            "enable_task_events": False,  # long polls would fill Ray's record of tasks
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place.group, place.index),
        }
        log_dir = f"{self._log_dir}/host-{number:04d}"
        agent: Any = ray.remote(HostAgent).options(**options).remote(self._module, self._env(number), log_dir)
        if self._preparation is not None:
            agent.prepare.remote(self._preparation)
        return Member(agent, place, number)

    def _env(self, number: int) -> dict[str, str]:
        config = self.config
        return {
            **megascale_env(slice_of(config, number), config.slices, self._coordinator_ip),
            **process_env(config, number, self._cache_dir),
        }

    def _wait_for_answers(self, members: Sequence[Member], deadline_s: float) -> None:
        answers = [member.agent.describe.remote() for member in members]
        try:
            found = ray.get(answers, timeout=max(0.0, deadline_s - time.monotonic()))
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
            raise GangTimeout(f"an agent of run {self.run_name!r} did not start: {error}") from error
        for member, description in zip(members, found, strict=True):
            member.description = description


def _node_of(place: Place) -> Node:
    """The machine that a place is on."""
    node_id = groups.node_ids(place.group)[place.index]
    return next(node for node in living_nodes() if node.node_id == node_id)


def _answers(spare: Member) -> bool:
    try:
        spare.description = ray.get(spare.agent.describe.remote(), timeout=SPARE_TIMEOUT_S)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return False
    return True


def _is_group_of(name: str, run_name: str) -> bool:
    kind = name.removeprefix(f"{run_name}-")
    return kind != name and (kind in ("gang", "heads") or _is_numbered(kind, "spare"))


def _is_numbered(name: str, kind: str) -> bool:
    number = name.removeprefix(f"{kind}-")
    return number != name and number.replace("-", "").isdigit()


def _agents_of(run_name: str) -> list[str]:
    ours = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
    kinds = {name: name.removeprefix(f"{run_name}-") for name in ours}
    return [name for name, kind in kinds.items() if kind != name and (_is_numbered(kind, "host") or _is_numbered(kind, "spare"))]


def _kill_named(name: str) -> None:
    with suppress(ValueError):  # gone by itself meanwhile
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
