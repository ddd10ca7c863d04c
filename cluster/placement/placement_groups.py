"""Helpers around Ray's placement groups: waiting for them, removing them, listing them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from gangway.waits import CHECK_STOP_INTERVAL_S, CheckStop, do_nothing, wait_until

REMOVE_TIMEOUT_S = 20.0


def wait_answers(refs: Sequence[Any], deadline_s: float, check_stop: CheckStop = do_nothing) -> list[Any]:
    """Waits for these answers, at most until `deadline_s` (of `time.monotonic`). Returns the references whose answers
    have come."""
    if not refs:  # `ray.wait` refuses an empty list
        return []
    while True:
        check_stop()
        # In short slices: nothing can interrupt Ray's own wait, and a stop request would have to wait for its end.
        slice_s = min(CHECK_STOP_INTERVAL_S, deadline_s - time.monotonic())
        ready = ray.wait(list(refs), num_returns=len(refs), timeout=max(0.0, slice_s))[0]
        if len(ready) == len(refs) or time.monotonic() >= deadline_s:
            return ready


def is_ready(group: PlacementGroup, deadline_s: float, check_stop: CheckStop = do_nothing) -> bool:
    """Waits for all bundles of a group, at most until `deadline_s` (of `time.monotonic`). Returns whether they are there."""
    # `ready()` also answers for a group that was removed meanwhile.
    return bool(wait_answers([group.ready()], deadline_s, check_stop)) and is_created(group)


def wait_ready(group: PlacementGroup, deadline_s: float, check_stop: CheckStop = do_nothing) -> None:
    """Waits for all bundles of a group. Raises TimeoutError if they are not all there at `deadline_s`."""
    if not is_ready(group, deadline_s, check_stop):
        raise TimeoutError(f"placement group {group.id.hex()}")


def remove(groups: Collection[PlacementGroup], check_stop: CheckStop = do_nothing) -> None:
    """Removes these groups and waits until they are gone: until then their names are in use."""
    for group in groups:
        remove_placement_group(group)
    wait_until(lambda: all(is_removed(group) for group in groups), REMOVE_TIMEOUT_S, check_stop)


def is_removed(group: PlacementGroup) -> bool:
    # Ray gives no state for a group that it does not know any more.
    return placement_group_table(group).get("state", "REMOVED") == "REMOVED"


def is_created(group: PlacementGroup) -> bool:
    """Returns whether Ray has found room for all bundles of the group."""
    return placement_group_table(group).get("state") == "CREATED"


def by_id(group_id: str) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id)))


def living() -> dict[str, dict[str, Any]]:
    """Returns Ray's table of the groups that hold, or wait for, machines: all groups of the cluster, by id."""
    return {key: info for key, info in placement_group_table().items() if info["state"] != "REMOVED"}


def node_ids(group: PlacementGroup) -> dict[int, str]:
    """Returns the machine of each bundle that has one, by bundle index."""
    return placement_group_table(group).get("bundles_to_node_id", {})
