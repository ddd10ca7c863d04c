"""Fake TPU slices, for chaos and for tests: labels and resources that make Ray nodes of this machine look like TPU hosts.

Ray recognises a TPU slice by the labels and resources of its nodes alone. So processes that use no TPU can run on fake slices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.hosts.config import (
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
    """Returns the nodes of one fake TPU slice, in the order of their worker ids."""
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
