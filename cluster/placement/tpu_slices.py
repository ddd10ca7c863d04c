"""Whole TPU slices: a placement group for each, so that host i of a slice is its worker i, and no two runs share one.

This module chooses the slices, among those that are whole and free. Ray gives the machines of a slice to one group only.
Ray's own `SlicePlacementGroup` holds several slices in one group, so that no single slice can be given back or replaced.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from ray.util.placement_group import PlacementGroup

from cluster.hosts.capacity import whole_slices
from cluster.hosts.config import HostsConfig, bundle_resources, hosts_per_slice, min_slices, pod_type, slice_bundle_labels
from cluster.placement import placement_groups
from cluster.placement.bundles import Bundles, living_nodes
from gangway.waits import CheckStop, wait_until

LOOK_AGAIN_S = 5.0
"""How often to look which slices have become whole or have lost a host, and how long to wait for the group of a free slice."""
LOOK_FOR_FIRST_S = 1.0
"""The same while a start waits for its first slices."""
MAX_JITTER_S = 1.0
"""Two runs that start at once may each take a slice that the other needs. Both give theirs back and try again after different,
random times of at most this length."""


def reserve(
    config: HostsConfig, bundles: Bundles, deadline_s: float, avoid_nodes: Sequence[str], check_stop: CheckStop
) -> list[PlacementGroup]:
    """Reserves `min_slices` slices, all or none; returns their groups. Raises TimeoutError, and what `check_stop` raises."""
    count = min_slices(config)
    while True:
        free = whole_slices(config, living_nodes(), avoid_nodes)
        if len(free) >= count:
            # At random, so that another run which starts at the same moment is likely to choose others.
            names = sorted(random.sample(free, count))
            per_slice = hosts_per_slice(config)
            groups = [ask_for(config, bundles, index * per_slice, name) for index, name in enumerate(names)]
            until_s = min(deadline_s, time.monotonic() + LOOK_AGAIN_S)
            if all(placement_groups.is_ready(group, until_s, check_stop) for group in groups):
                return groups
            # All go back: two runs that each kept a part would wait for each other for ever.
            for group in groups:
                bundles.give_back(group)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"{count} slices of type {pod_type(config)}")
        pause_s = LOOK_FOR_FIRST_S if len(free) < count else random.random() * MAX_JITTER_S
        wait_until(lambda: False, min(left_s, pause_s), check_stop)


def ask_for(config: HostsConfig, bundles: Bundles, number: int, name: str) -> PlacementGroup:
    """Asks for the slice of this name, for the slots from `number` on. Returns its group at once, which is soon ready if the
    slice is free."""
    per_slice = hosts_per_slice(config)
    resources = [bundle_resources(config) for _ in range(per_slice)]
    if per_slice == 1:  # a slice of one host has no name: any machine of the right type will do
        return bundles.ask_for_slice(number, resources, slice_bundle_labels(config, [None]))
    # Ray's own slice reservation takes this resource too: so no other run can reserve the same slice.
    resources[0] = {**resources[0], f"TPU-{pod_type(config)}-head": 1}
    return bundles.ask_for_slice(number, resources, slice_bundle_labels(config, [name]))
