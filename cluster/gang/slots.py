"""Slots: each has room for one host of a run, and the agent of that host."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.agent.agent import HostAgent
from cluster.gang.steward import LEASE_GROUP, hire
from cluster.hosts.config import HostsConfig, bundle_resources
from cluster.hosts.process_env import process_env
from cluster.placement.bundles import Bundle
from cluster.placement.cleanup import NAMESPACE, name_of
from gangway.wire.answers import Description

MAX_CONCURRENCY = 16
"""How many calls an agent answers at a time; each long poll takes one for its whole time."""


@dataclass(eq=False)
class Slot:
    """Room for one host, and its agent, which may not run yet. The number stays when the agent or the bundle changes."""

    number: int
    """Part of the names of the logs of this slot."""
    bundle: Bundle
    name: str
    """Name of the agent; each new agent gets another one."""
    agent: Any
    """The handle of the Ray actor. Calls to one that has no machine yet wait."""
    description: Description | None = None
    """The agent's last answer to `HostAgent.describe`; None until it has answered."""
    probe: Any = field(default=None, repr=False)
    """The open call to the agent's `describe`, if any."""
    death_message: str = ""
    """Ray's message about the death of its last agent."""
    next_probe_s: float = 0.0
    """Earliest time of the next `describe`; on the clock `time.monotonic`, as the next two."""
    next_replacement_s: float = 0.0
    """Earliest time at which a dead agent may be replaced again."""
    next_search_s: float = 0.0
    """When to look for another bundle, as long as no agent answers."""
    lost: bool = False
    """Whether the driver has given its agent up. Its next agent is not a member until `set_members` says so."""
    unassigned: bool = False
    """Whether the last agent was given up and no new one was asked for yet."""
    avoid_nodes: tuple[str, ...] = ()
    """Machines that it must not use, as `Gang.lose` was last called with."""

    @property
    def available(self) -> bool:
        return self.description is not None

    @property
    def node_id(self) -> str | None:
        return self.description["node_id"] if self.description else None

    def record(self) -> dict[str, Any]:
        """Returns what another driver needs to find the slot, JSON-able."""
        return {"number": self.number, "name": self.name, "avoid_nodes": self.avoid_nodes, **self.bundle.record()}


class AgentMaker:
    """Creates the agents of one driver of a run."""

    def __init__(
        self, config: HostsConfig, run_name: str, *, driver_term: int, lease_s: float, log_dir: str, cache_dir: str, module: str
    ):
        self.config, self.run_name, self.driver_term, self.lease_s = config, run_name, driver_term, lease_s
        self.log_dir, self.cache_dir, self.module = log_dir, cache_dir, module
        self._counter = itertools.count()

    def hire_steward(self) -> tuple[str, Any]:
        """Asks Ray for the steward of this driver; returns its name and its handle."""
        return hire(self.run_name, self.driver_term, self.lease_s)

    def create(self, bundle: Bundle, number: int) -> tuple[str, Any]:
        """Asks Ray for an agent in this bundle; returns its name and its handle. It need not run yet: calls to it wait."""
        need = bundle_resources(self.config)
        name = name_of(self.run_name, "host", number, self.driver_term, next(self._counter))
        options = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",  # training goes on while there is no driver
            "num_cpus": need["CPU"],
            "num_gpus": need.get("GPU", 0),
            "resources": {"TPU": need["TPU"]} if "TPU" in need else None,
            "max_restarts": 0,  # a restarted agent would know nothing of its process; the gang asks for a new one
            "max_concurrency": MAX_CONCURRENCY,
            "enable_task_events": False,  # long polls would fill Ray's record of tasks
            "scheduling_strategy": PlacementGroupSchedulingStrategy(bundle.group, bundle.index),
        }
        remote: Any = ray.remote
        agent = remote(concurrency_groups={LEASE_GROUP: 1})(HostAgent).options(**options)
        return name, agent.remote(
            self.module,
            # By slot this is only a default: on CPU the start orders name the cache of the rank.
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
