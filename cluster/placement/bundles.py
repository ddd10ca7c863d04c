"""Places: the bundles of placement groups that a run holds, or waits for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # as in ray.util.tpu: there is no public way to ask
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from cluster.hosts.capacity import Node
from cluster.hosts.config import NODE_ID_LABEL, HostsConfig, bundle, min_hosts, strategy
from cluster.placement import placement_groups
from cluster.placement.cleanup import group_name
from cluster.placement.waits import CheckStop, do_nothing


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
    """What Ray says of groups and machines, asked at most once for each: for changes of many slots at a time."""

    def __init__(self) -> None:
        self._bundles: dict[PlacementGroup, dict[int, str]] = {}

    def node_id(self, place: Bundle) -> str | None:
        """The living machine that a place is on; None while Ray has none for it."""
        if place.group not in self._bundles:
            self._bundles[place.group] = placement_groups.node_ids(place.group)
        node_id = self._bundles[place.group].get(place.index)
        return node_id if node_id in self._living_nodes else None

    def is_gone(self, group: PlacementGroup) -> bool:
        """Whether a group was removed."""
        return group.id.hex() not in self._living_groups

    @cached_property
    def _living_nodes(self) -> set[str]:
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    @cached_property
    def _living_groups(self) -> set[str]:
        return set(placement_groups.living())


NOWHERE = Bundle(PlacementGroup(ray.PlacementGroupID.nil()), 0, alone=False)
"""Of a slot for which nothing was asked yet."""


def bundle_of(record: Mapping[str, Any]) -> Bundle:
    """The place of which this is the record."""
    return Bundle(placement_groups.by_id(record["group"]), record["bundle"], record["alone"])


def living_nodes() -> list[Node]:
    """The machines of the cluster with what they have and what is free."""
    free = available_resources_per_node()
    return [
        Node(
            node_id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"], node["Resources"]),
            labels=node.get("Labels") or {},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


class Bundles:
    """The groups that one driver of a run knows to be the run's. All are detached: they outlive the driver."""

    def __init__(self, config: HostsConfig, run_name: str, driver_term: int):
        self.config, self.run_name, self.driver_term = config, run_name, driver_term
        self.groups: list[PlacementGroup] = []
        self.unassigned: list[Bundle] = []
        """Bundles of the shared group that were left for another place: they cannot be given back before the others."""
        self._counter = itertools.count()

    def take_base(self, deadline_s: float, avoid_nodes: Sequence[str], check_stop: CheckStop = do_nothing) -> list[Bundle]:
        """Room for the hosts that the run cannot do without (not TPU slices): all of it, or TimeoutError."""
        group = self._group(min_hosts(self.config), strategy(self.config), group_name(self.run_name), avoid_nodes)
        placement_groups.wait_ready(group, deadline_s, check_stop)
        return [Bundle(group, index, alone=False) for index in range(min_hosts(self.config))]

    def ask_for_one(self, number: int, avoid_nodes: Sequence[str]) -> Bundle:
        """Room for one more host, in a group of its own, as soon as Ray has it."""
        name = group_name(self.run_name, number, self.driver_term, next(self._counter))
        return Bundle(self._group(1, "PACK", name, avoid_nodes), 0, alone=True)

    def ask_for_slice(self, number: int, bundles: list[dict[str, float]], labels: list[dict[str, str]]) -> PlacementGroup:
        """Room for the hosts of a TPU slice, in a group of its own, for the slots from `number` on."""
        name = group_name(self.run_name, number, self.driver_term, next(self._counter))
        group = placement_group(bundles, strategy="STRICT_SPREAD", name=name, lifetime="detached", bundle_label_selector=labels)
        self.groups.append(group)
        return group

    def give_back(self, group: PlacementGroup) -> None:
        """Gives up a group that nobody sits in any more. It takes its time, and nobody waits for its name."""
        self.drop(group)
        remove_placement_group(group)

    def drop(self, group: PlacementGroup) -> None:
        """It was removed by another."""
        self.groups.remove(group)

    def exchange(self, place: Bundle, number: int, avoid_nodes: Sequence[str], view: View) -> Bundle:
        """Another bundle for this slot, not on these machines: one that was left unassigned, or a new one, maybe pending."""
        found = self.unassigned_elsewhere(avoid_nodes, view)
        if found is not None:
            self.unassigned.remove(found)
        self._leave(place)
        return found or self.ask_for_one(number, avoid_nodes)

    def unassigned_elsewhere(self, avoid_nodes: Collection[str], view: View) -> Bundle | None:
        """A place that nobody sits in and that has a machine, not one of these."""
        return next((place for place in self.unassigned if view.node_id(place) not in (None, *avoid_nodes)), None)

    def ask_anew(self, gone: PlacementGroup) -> PlacementGroup:
        """Asks once more for the group that the hosts share, which somebody has removed (not of TPU slices). It may wait."""
        self.groups.remove(gone)
        group = self._group(min_hosts(self.config), strategy(self.config), group_name(self.run_name), ())
        self.unassigned = [dataclasses.replace(place, group=group) for place in self.unassigned]
        return group

    def _leave(self, place: Bundle) -> None:
        """Gives back what can be given back; what stays unassigned is Ray's to find machines for, before any later group."""
        if not place.alone:
            self.unassigned.append(place)
        if place.alone or len(self.unassigned) == min_hosts(self.config):
            self.unassigned = [unassigned for unassigned in self.unassigned if unassigned.group != place.group]
            self.give_back(place.group)

    def hold(self, place: Bundle) -> bool:
        """Whether it is one of these: its group may have been given back, and no other taken yet."""
        return place.group in self.groups

    def give_all_back(self) -> None:
        placement_groups.remove(self.groups)
        self.forget()

    def forget(self) -> None:
        """They are another driver's now."""
        self.groups, self.unassigned = [], []

    def record(self) -> dict[str, Any]:
        return {"groups": [group.id.hex() for group in self.groups], "unassigned": [place.record() for place in self.unassigned]}

    def recall(self, record: Mapping[str, Any]) -> None:
        """What an earlier driver held when it wrote this."""
        self.groups = [placement_groups.by_id(key) for key in record["groups"]]
        self.unassigned = [bundle_of(place) for place in record["unassigned"]]

    def _group(self, count: int, how: str, name: str, avoid_nodes: Sequence[str]) -> PlacementGroup:
        labels = [{NODE_ID_LABEL: f"!in({','.join(avoid_nodes)})"}] * count if avoid_nodes else None
        bundles = [bundle(self.config)] * count
        group = placement_group(bundles, strategy=how, name=name, lifetime="detached", bundle_label_selector=labels)
        self.groups.append(group)
        return group
