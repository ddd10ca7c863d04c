"""The bundles of placement groups that a run holds or waits for: each is room for one host."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from cluster.hosts.capacity import Node
from cluster.hosts.config import NODE_ID_LABEL, HostsConfig, bundle_resources, min_hosts, strategy
from cluster.placement import placement_groups
from cluster.placement.cleanup import gang_name, name_of
from cluster.ray_internals import available_resources_per_node
from gangway.waits import CheckStop, do_nothing


@dataclass(frozen=True)
class Bundle:
    """A bundle of a placement group: room for one host."""

    group: PlacementGroup
    index: int
    alone: bool
    """Whether the group has this one bundle."""

    def record(self) -> dict[str, Any]:
        return {"group": self.group.id.hex(), "bundle": self.index, "alone": self.alone}


class View:
    """A snapshot of what Ray reports of groups and machines. It asks Ray at most once for each, so that a change of many slots is
    cheap, and is to be dropped after that change."""

    def __init__(self) -> None:
        self._bundles: dict[PlacementGroup, dict[int, str]] = {}

    def node_id(self, bundle: Bundle) -> str | None:
        """Returns the living machine that the bundle is on; None while Ray has none for it."""
        if bundle.group not in self._bundles:
            self._bundles[bundle.group] = placement_groups.node_ids(bundle.group)
        node_id = self._bundles[bundle.group].get(bundle.index)
        return node_id if node_id in self._living_nodes else None

    def is_gone(self, group: PlacementGroup) -> bool:
        """Returns whether the group was removed."""
        return group.id.hex() not in self._living_groups

    @cached_property
    def _living_nodes(self) -> set[str]:
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    @cached_property
    def _living_groups(self) -> set[str]:
        return set(placement_groups.living())


NOWHERE = Bundle(PlacementGroup(ray.PlacementGroupID.nil()), 0, alone=False)
"""The bundle of a slot for which no group was asked yet."""


def bundle_of(record: Mapping[str, Any]) -> Bundle:
    """Returns the bundle that `Bundle.record` described."""
    return Bundle(placement_groups.by_id(record["group"]), record["bundle"], record["alone"])


def living_nodes() -> list[Node]:
    """Returns the living machines of the cluster, with their total and their free resources."""
    free = available_resources_per_node()
    return [
        Node(
            node_id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            total=node["Resources"],
            # A node that has just joined is not in the table of free resources yet: nothing uses it.
            free=free.get(node["NodeID"], node["Resources"]),
            labels=node.get("Labels") or {},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


class Bundles:
    """The placement groups of a run, as one of its drivers knows them. All are detached: they outlive the driver."""

    def __init__(self, config: HostsConfig, run_name: str, driver_term: int):
        self.config, self.run_name, self.driver_term = config, run_name, driver_term
        self.groups: list[PlacementGroup] = []
        self.unassigned: list[Bundle] = []
        """Bundles of the shared group in which no agent is any more. Ray gives a group back only as a whole."""
        self._counter = itertools.count()

    def take_base(self, deadline_s: float, avoid_nodes: Sequence[str], check_stop: CheckStop = do_nothing) -> list[Bundle]:
        """Reserves the `min_hosts` bundles of the shared group (not for TPU slices). Raises TimeoutError unless all are there."""
        group = self._ask_for_group(min_hosts(self.config), strategy(self.config), gang_name(self.run_name), avoid_nodes)
        placement_groups.wait_ready(group, deadline_s, check_stop)
        return [Bundle(group, index, alone=False) for index in range(min_hosts(self.config))]

    def ask_for_bundle(self, number: int, avoid_nodes: Sequence[str]) -> Bundle:
        """Asks for room for one more host, in a separate group. It may be pending until Ray has room."""
        name = name_of(self.run_name, "slot", number, self.driver_term, next(self._counter))
        return Bundle(self._ask_for_group(1, "PACK", name, avoid_nodes), 0, alone=True)

    def ask_for_slice(self, number: int, resources: list[dict[str, float]], labels: list[dict[str, str]]) -> PlacementGroup:
        """Asks for room for the hosts of a TPU slice, in a separate group, for the slots from `number` on."""
        name = name_of(self.run_name, "slot", number, self.driver_term, next(self._counter))
        group = placement_group(resources, strategy="STRICT_SPREAD", name=name, lifetime="detached", bundle_label_selector=labels)
        self.groups.append(group)
        return group

    def give_back(self, group: PlacementGroup) -> None:
        """Removes a group in which no agent is any more. Does not wait for Ray to finish: the name is not used again."""
        self.groups.remove(group)
        remove_placement_group(group)

    def exchange(self, bundle: Bundle, number: int, avoid_nodes: Sequence[str], view: View) -> Bundle:
        """Returns another bundle for this slot, not on these machines: an unassigned one, or a new one, which may be pending."""
        free_bundle = self.unassigned_elsewhere(avoid_nodes, view)
        # Taken out before the old bundle is released: that may give the whole shared group back.
        if free_bundle is not None:
            self.unassigned.remove(free_bundle)
        self._release(bundle)
        return free_bundle or self.ask_for_bundle(number, avoid_nodes)

    def unassigned_elsewhere(self, avoid_nodes: Collection[str], view: View) -> Bundle | None:
        """Returns an unassigned bundle that has a machine, not one of these; None if there is none."""
        return next((bundle for bundle in self.unassigned if view.node_id(bundle) not in (None, *avoid_nodes)), None)

    def ask_anew(self, gone: PlacementGroup) -> PlacementGroup:
        """Asks again for the shared group, which somebody has removed (not for TPU slices). The new group may be pending."""
        self.groups.remove(gone)
        group = self._ask_for_group(min_hosts(self.config), strategy(self.config), gang_name(self.run_name), ())
        self.unassigned = [replace(bundle, group=group) for bundle in self.unassigned]
        return group

    def _release(self, bundle: Bundle) -> None:
        """Gives the bundle's group back if nothing else is in it; else the bundle becomes unassigned.

        For a pending unassigned bundle Ray goes on looking for a machine, and serves it before any later group.
        """
        if not bundle.alone:
            self.unassigned.append(bundle)
        if bundle.alone or len(self.unassigned) == min_hosts(self.config):
            self.unassigned = [unassigned for unassigned in self.unassigned if unassigned.group != bundle.group]
            self.give_back(bundle.group)

    def hold(self, bundle: Bundle) -> bool:
        """Returns whether the group of this bundle is still held: it may have been given back, and no other taken yet."""
        return bundle.group in self.groups

    def give_all_back(self) -> None:
        placement_groups.remove(self.groups)
        self.forget()

    def forget(self) -> None:
        """Drops all groups without removing them: they belong to another driver now."""
        self.groups, self.unassigned = [], []

    def record(self) -> dict[str, Any]:
        return {
            "groups": [group.id.hex() for group in self.groups],
            "unassigned": [bundle.record() for bundle in self.unassigned],
        }

    def recall(self, record: Mapping[str, Any]) -> None:
        """Restores the groups from the `record` of an earlier driver."""
        self.groups = [placement_groups.by_id(key) for key in record["groups"]]
        self.unassigned = [bundle_of(about) for about in record["unassigned"]]

    def _ask_for_group(self, count: int, how: str, name: str, avoid_nodes: Sequence[str]) -> PlacementGroup:
        # Ray has no other way to keep a bundle off a machine than a label selector.
        labels = [{NODE_ID_LABEL: f"!in({','.join(avoid_nodes)})"}] * count if avoid_nodes else None
        resources = [bundle_resources(self.config)] * count
        group = placement_group(resources, strategy=how, name=name, lifetime="detached", bundle_label_selector=labels)
        self.groups.append(group)
        return group
