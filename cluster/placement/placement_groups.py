"""Placement groups: what Ray leaves to its callers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from cluster.placement.waits import CheckStop, do_nothing, wait_answers, wait_until

REMOVE_TIMEOUT_S = 20.0


def is_ready(group: PlacementGroup, deadline_s: float, check_stop: CheckStop = do_nothing) -> bool:
    """Waits for all bundles of a group, at most until `deadline_s` (of `time.monotonic`)."""
    return bool(wait_answers([group.ready()], deadline_s, check_stop)) and is_created(group)  # it answers if it was removed, too


def wait_ready(group: PlacementGroup, deadline_s: float, check_stop: CheckStop = do_nothing) -> None:
    """Raises TimeoutError if the bundles of a group are not all there at `deadline_s`."""
    if not is_ready(group, deadline_s, check_stop):
        raise TimeoutError(f"placement group {group.id.hex()}")


def remove(groups: Collection[PlacementGroup], check_stop: CheckStop = do_nothing) -> None:
    """Gives back what these groups hold, and waits for it: until then their names are taken."""
    for group in groups:
        remove_placement_group(group)
    wait_until(lambda: all(is_removed(group) for group in groups), REMOVE_TIMEOUT_S, check_stop)


def is_removed(group: PlacementGroup) -> bool:
    return placement_group_table(group).get("state", "REMOVED") == "REMOVED"


def is_created(group: PlacementGroup) -> bool:
    """Whether Ray has found room for all bundles of a group."""
    return placement_group_table(group).get("state") == "CREATED"


def by_id(group_id: str) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id)))


def living() -> dict[str, dict[str, Any]]:
    """All groups of the cluster that hold, or wait for, machines: what Ray knows of each, by its id."""
    return {key: info for key, info in placement_group_table().items() if info["state"] != "REMOVED"}


def node_ids(group: PlacementGroup) -> dict[int, str]:
    """The machine of each bundle that has one."""
    return placement_group_table(group).get("bundles_to_node_id", {})
