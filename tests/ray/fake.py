"""A Ray cluster of several nodes on this machine, which may claim to be hosts of TPU slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.cluster_utils import Cluster

from orchestrator.faultlab.testbed.local_cluster import FakeNode, slice_nodes
from tests.programs.processes import PATIENCE_S

__all__ = ["FakeNode", "cluster_of", "slice_nodes"]


@contextmanager
def cluster_of(nodes: Sequence[FakeNode], **init: Any) -> Iterator[tuple[Cluster, list[Any]]]:
    """A local Ray cluster of a head without CPUs and these nodes; connects to it, and shuts it down. Yields their handles too."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        handles = [_add(cluster, node) for node in nodes]
        cluster.wait_for_nodes(timeout=PATIENCE_S)
        ray.init(address=cluster.address, include_dashboard=False, **init)
        yield cluster, handles
    finally:
        ray.shutdown()
        cluster.shutdown()


def _add(cluster: Cluster, node: FakeNode) -> Any:
    return cluster.add_node(
        wait=False, num_cpus=node.num_cpus, resources=dict(node.resources), labels=dict(node.labels), env_vars=dict(node.env)
    )
