"""Whole TPU slices, reserved so that host i of the gang is worker i of its slice.

Ray's `SlicePlacementGroup` holds the hosts. Which slices they are is decided before, here: one group holds the heads of all
slices at once, so that two runs never hold half of what each needs, and leaves out slices that lack a host or hold one to avoid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.tpu import SlicePlacementGroup

from cluster import groups
from cluster.capacity import Node, unusable_slices
from cluster.topology import (
    POD_TYPE_LABEL,
    SLICE_NAME_LABEL,
    WORKER_ID_LABEL,
    HostsConfig,
    bundle,
    chips_per_host,
    generation,
    hosts_per_slice,
    pod_type,
    slice_bundle_labels,
)

LOOK_AGAIN_S = 5.0
"""How often to look which slices have become whole, or have lost a host, while waiting."""


def reserve(
    config: HostsConfig,
    name: str,
    taken: list[PlacementGroup],
    deadline_s: float,
    living_nodes: Callable[[], list[Node]],
    avoid_nodes: Sequence[str] = (),
) -> PlacementGroup:
    """The group of all hosts, slice by slice. All groups are detached, and are added to `taken` as soon as they are asked for.

    Raises TimeoutError.
    """
    names: Sequence[str | None] = [None] * config.slices
    if hosts_per_slice(config) > 1:
        names = _reserve_heads(config, name, taken, deadline_s, living_nodes, avoid_nodes)
    held = SlicePlacementGroup(
        topology=config.topology or "",
        accelerator_version=generation(config.accelerator or ""),
        resources_per_bundle=bundle(config),
        num_slices=config.slices,
        chips_per_vm=chips_per_host(config),
        name=name,
        lifetime="detached",
        bundle_label_selector=slice_bundle_labels(config, names),
    )
    group = held.slice_placement_group
    assert group is not None
    taken.append(group)  # all that `held` has: since the slices are named, it holds no heads of its own
    groups.wait_ready(group, deadline_s)
    return group


def _reserve_heads(
    config: HostsConfig,
    name: str,
    taken: list[PlacementGroup],
    deadline_s: float,
    living_nodes: Callable[[], list[Node]],
    avoid_nodes: Sequence[str],
) -> list[str]:
    """Holds the head of each slice; returns the names of the slices."""
    while time.monotonic() < deadline_s:
        labels = {WORKER_ID_LABEL: "0", POD_TYPE_LABEL: pod_type(config)}
        if unusable := unusable_slices(config, living_nodes(), avoid_nodes):
            labels[SLICE_NAME_LABEL] = f"!in({','.join(unusable)})"
        heads = placement_group(
            [{f"TPU-{pod_type(config)}-head": 1}] * config.slices,
            strategy="STRICT_SPREAD",
            lifetime="detached",
            name=name.removesuffix("-gang") + "-heads",
            bundle_label_selector=[labels] * config.slices,
        )
        taken.append(heads)
        if groups.is_ready(heads, min(deadline_s, time.monotonic() + LOOK_AGAIN_S)):
            return _slice_names(heads, living_nodes())
        groups.remove(heads)
        taken.remove(heads)
    raise TimeoutError(f"{config.slices} slices of type {pod_type(config)}")


def _slice_names(heads: PlacementGroup, nodes: Sequence[Node]) -> list[str]:
    labels = {node.node_id: node.labels for node in nodes}
    return sorted(labels[node_id][SLICE_NAME_LABEL] for node_id in groups.node_ids(heads).values())
