"""Placement groups: what Ray leaves to its callers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

REMOVE_TIMEOUT_S = 20.0


def is_ready(group: PlacementGroup, deadline_s: float) -> bool:
    """Waits for all bundles of a group, at most until `deadline_s` (of `time.monotonic`)."""
    return bool(ray.wait([group.ready()], timeout=max(0.0, deadline_s - time.monotonic()))[0])


def wait_ready(group: PlacementGroup, deadline_s: float) -> None:
    """Raises TimeoutError if the bundles of a group are not all there at `deadline_s`."""
    if not is_ready(group, deadline_s):
        raise TimeoutError(f"placement group {group.id.hex()}")


def remove(group: PlacementGroup) -> None:
    """Gives back what a group holds, and waits for it: until then its name is taken."""
    remove_placement_group(group)
    wait_until(lambda: is_removed(group), REMOVE_TIMEOUT_S)


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
    """The machine of each bundle."""
    return placement_group_table(group)["bundles_to_node_id"]


def wait_until(done: Callable[[], bool], timeout_s: float) -> bool:
    """For what Ray does in its own time and gives no notice of."""
    deadline_s = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def place() -> dict[str, Any]:
    """Where Ray has put this process; a process without Ray is on the machine's own."""
    if not ray.is_initialized():
        return {"host_ip": "127.0.0.1", "node_id": None, "labels": {}}
    context = ray.get_runtime_context()
    return {"host_ip": ray.util.get_node_ip_address(), "node_id": context.get_node_id(), "labels": context.get_node_labels()}
