"""The Ray of a file of tests, on this machine, and what it has left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ray

from cluster.placement import placement_groups
from cluster.placement.bundles import living_nodes
from orchestrator.driver.ray_cluster import ASKED_BY_NOBODY, without_helpers


@contextmanager
def own_ray(num_cpus: int) -> Iterator[None]:
    """Starts a Ray without what no test asks for, connects to it, and shuts it down."""
    with without_helpers(ASKED_BY_NOBODY):
        ray.init("local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def everything_is_free():
    nodes = living_nodes()
    whole = all(node.free.get(kind) == node.total.get(kind) for node in nodes for kind in ("CPU", "TPU"))
    return whole and not placement_groups.living() and not any("bundle_group" in name for node in nodes for name in node.free)
