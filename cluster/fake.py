"""Machines that are not there: Ray nodes on this one that claim to be hosts of a cluster, or of TPU slices. For tests.

Ray tells TPU slices by the labels and resources of their nodes alone, so processes that use no TPU run on fake ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.cluster_utils import Cluster

from cluster.topology import (
    POD_TYPE_LABEL,
    SLICE_NAME_LABEL,
    WORKER_ID_LABEL,
    HostsConfig,
    chips_per_host,
    hosts_per_slice,
    pod_type,
)

TOPOLOGY_LABEL = "ray.io/tpu-topology"


@dataclass(frozen=True, kw_only=True)
class FakeNode:
    num_cpus: float = 1
    resources: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


def slice_nodes(config: HostsConfig, name: str, num_cpus: float = 1) -> list[FakeNode]:
    """The hosts of one TPU slice, by worker id."""
    return [_slice_node(config, name, worker, num_cpus) for worker in range(hosts_per_slice(config))]


def _slice_node(config: HostsConfig, name: str, worker: int, num_cpus: float) -> FakeNode:
    head = {f"TPU-{pod_type(config)}-head": 1.0} if worker == 0 else {}
    return FakeNode(
        num_cpus=num_cpus,
        resources={"TPU": chips_per_host(config), name: 1.0, **head},
        labels={
            SLICE_NAME_LABEL: name,
            WORKER_ID_LABEL: str(worker),
            POD_TYPE_LABEL: pod_type(config),
            TOPOLOGY_LABEL: config.topology or "",
        },
        # Without these Ray would ask the cloud's metadata server, which is not there, and wait for it.
        env={
            "TPU_NAME": name,
            "TPU_WORKER_ID": str(worker),
            "TPU_ACCELERATOR_TYPE": pod_type(config),
            "TPU_TOPOLOGY": config.topology or "",
        },
    )


@contextmanager
def cluster_of(nodes: Sequence[FakeNode], **init: Any) -> Iterator[tuple[Cluster, list[Any]]]:
    """A local Ray cluster of a head without CPUs and these nodes; connects to it, and shuts it down. Yields their handles too."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        handles = [_add(cluster, node) for node in nodes]
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, include_dashboard=False, **init)
        yield cluster, handles
    finally:
        ray.shutdown()
        cluster.shutdown()


def _add(cluster: Cluster, node: FakeNode) -> Any:
    return cluster.add_node(
        wait=False, num_cpus=node.num_cpus, resources=dict(node.resources), labels=dict(node.labels), env_vars=dict(node.env)
    )
