"""Slots: room for one host of a run each, and the agents in them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.agent.agent import HostAgent
from cluster.gang.steward import LEASE_GROUP, hire
from cluster.hosts.config import HostsConfig, bundle
from cluster.hosts.process_env import process_env
from cluster.placement.bundles import Bundle
from cluster.placement.cleanup import NAMESPACE, agent_name

MAX_CONCURRENCY = 16
"""Calls that an agent answers at a time; a long poll is one of them."""


@dataclass(eq=False)
class Slot:
    """Room for one host, and the agent in it, which may not be there yet. The number stays when agent and place change."""

    number: int
    """It names the logs of what runs here."""
    place: Bundle
    name: str
    """Of the agent; every agent has another one."""
    agent: Any
    """The handle of the Ray actor. Calls to one that has no machine yet wait."""
    description: dict[str, Any] | None = None
    """What the agent last said of itself (`HostAgent.describe`); None as long as it has not answered."""
    probe: Any = field(default=None, repr=False)
    """A question to the agent that is still open."""
    trouble: str = ""
    """What Ray said of the death of its last agent."""
    next_probe_s: float = 0.0
    """Of `time.monotonic`, as the next two."""
    next_replacement_s: float = 0.0
    """When its agent may be replaced again, should it be dead."""
    next_search_s: float = 0.0
    """When to look whether another place has room for it, as long as no agent answers."""
    lost: bool = False
    """Whether the gang's owner has given its agent up: the one that is to come is nobody's member yet."""
    unassigned: bool = False
    """Whether no agent was asked for since the last one was given up."""
    avoid_nodes: tuple[str, ...] = ()
    """Where it shall not come to sit: what `Gang.lose` was last told."""

    @property
    def available(self) -> bool:
        return self.description is not None

    @property
    def node_id(self) -> str | None:
        return self.description["node_id"] if self.description else None

    def record(self) -> dict[str, Any]:
        """What another driver needs to find it, JSON-able."""
        return {"number": self.number, "name": self.name, "avoid_nodes": self.avoid_nodes, **self.place.record()}


class AgentMaker:
    """Makes the agents of one driver of a run."""

    def __init__(
        self, config: HostsConfig, run_name: str, *, driver_term: int, lease_s: float, log_dir: str, cache_dir: str, module: str
    ):
        self.config, self.run_name, self.driver_term, self.lease_s = config, run_name, driver_term, lease_s
        self.log_dir, self.cache_dir, self.module = log_dir, cache_dir, module
        self._counter = itertools.count()

    def hire_steward(self) -> tuple[str, Any]:
        """Asks Ray for an actor that gives the run's groups back should nobody else; returns its name and its handle."""
        return hire(self.run_name, self.driver_term, self.lease_s)

    def create(self, place: Bundle, number: int) -> tuple[str, Any]:
        """Asks Ray for an agent in this place; returns its name and its handle. It need not run yet: calls to it wait."""
        need = bundle(self.config)
        name = agent_name(self.run_name, number, self.driver_term, next(self._counter))
        options = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",  # training goes on while there is no driver
            "num_cpus": need["CPU"],
            "num_gpus": need.get("GPU", 0),
            "resources": {"TPU": need["TPU"]} if "TPU" in need else None,
            "max_restarts": 0,
            "max_concurrency": MAX_CONCURRENCY,
            "enable_task_events": False,  # long polls would fill Ray's record of tasks
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place.group, place.index),
        }
        remote: Any = ray.remote
        agent = remote(concurrency_groups={LEASE_GROUP: 1})(HostAgent).options(**options)
        return name, agent.remote(
            self.module,
            process_env(self.config, number, self.cache_dir),
            f"{self.log_dir}/host-{number:04d}",
            local_log_dir=self.config.log_dir,
            lease_s=self.lease_s,
            notice_file=self.config.notice_file,
            metadata=self.config.metadata,
            run_name=self.run_name,
            private_files=self.config.private_files,
        )

    def keep(self, agent: Any) -> Any:
        """Sends the call that renews the lease of an agent or a steward; returns Ray's reference to its answer."""
        return agent.keep.options(concurrency_group=LEASE_GROUP).remote(driver_term=self.driver_term)
