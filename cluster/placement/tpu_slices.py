"""Whole TPU slices: a placement group for each, so that host i of a slice is its worker i, and no two runs share one.

Which slices they are is decided here, among those that are whole and free; Ray gives the machines of one to one group alone.
Ray's own `SlicePlacementGroup` holds several slices in one group, of which none can be given back, or replaced, by itself.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from ray.util.placement_group import PlacementGroup

from cluster.hosts.capacity import whole_slices
from cluster.hosts.config import HostsConfig, bundle, hosts_per_slice, min_slices, pod_type, slice_bundle_labels
from cluster.placement import placement_groups
from cluster.placement.bundles import Bundles, living_nodes
from cluster.placement.waits import CheckStop, wait_until

LOOK_AGAIN_S = 5.0
"""How often to look which slices have become whole, or have lost a host; and how long a slice that was free may take to come."""
LOOK_FOR_FIRST_S = 1.0
"""The same while a start waits for its first slices."""
LONGEST_TURN_S = 1.0
"""Two starts that have taken slices from each other try again after different times, at most so long."""


def reserve(
    config: HostsConfig, places: Bundles, deadline_s: float, avoid_nodes: Sequence[str], check_stop: CheckStop
) -> list[PlacementGroup]:
    """The groups of the slices that a run cannot do without: all, or none. Raises TimeoutError, and what `check_stop` raises."""
    count = min_slices(config)
    while True:
        free = whole_slices(config, living_nodes(), avoid_nodes)
        if len(free) >= count:
            # At random, so that another run which starts at the same moment is likely to choose others.
            names = sorted(random.sample(free, count))
            taken = [ask_for(config, places, place * hosts_per_slice(config), name) for place, name in enumerate(names)]
            until_s = min(deadline_s, time.monotonic() + LOOK_AGAIN_S)
            if all(placement_groups.is_ready(group, until_s, check_stop) for group in taken):
                return taken
            for group in taken:
                places.give_back(group)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"{count} slices of type {pod_type(config)}")
        pause_s = LOOK_FOR_FIRST_S if len(free) < count else random.random() * LONGEST_TURN_S
        wait_until(lambda: False, min(left_s, pause_s), check_stop)


def ask_for(config: HostsConfig, places: Bundles, number: int, name: str) -> PlacementGroup:
    """Asks for the slice of this name, for the slots from `number` on; it is there soon if it is free."""
    per_slice = hosts_per_slice(config)
    bundles = [bundle(config) for _ in range(per_slice)]
    if per_slice == 1:  # has no name of its own: any machine of the right type will do
        return places.ask_for_slice(number, bundles, slice_bundle_labels(config, [None]))
    # Whoever holds a slice holds its head, as those do who use Ray's own way to reserve one.
    bundles[0] = {**bundles[0], f"TPU-{pod_type(config)}-head": 1}
    return places.ask_for_slice(number, bundles, slice_bundle_labels(config, [name]))
