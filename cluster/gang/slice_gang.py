"""The gang of a TPU run: its slots come in whole slices.

Slots are numbered slice by slice, and inside a slice by worker id. Each slice has a separate placement group, so that it can be
given back without the others. If a slice has lost a machine, its slots move to another whole slice as soon as there is one; until
then the run waits for the machine. Spare slices, and those beyond `hosts.min_slices`, are taken when they are available.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.gang.gang import Gang
from cluster.gang.slots import Slot
from cluster.hosts.capacity import whole_slices
from cluster.hosts.config import hosts_per_slice, max_slices, min_slices, slice_of, slots_of_whole_slices
from cluster.hosts.process_env import megascale_env
from cluster.placement import placement_groups, tpu_slices
from cluster.placement.bundles import NOWHERE, Bundle, View, living_nodes
from gangway.waits import CheckStop, wait_until
from gangway.wire.orders import MachineOrders


class SliceGang(Gang):
    """A `Gang` whose slots count as available only if all agents of their slice answer."""

    _next_look_s = 0.0
    """When to look again for slices, for slots that have none or a broken one."""

    def orders(self, host: int) -> MachineOrders:
        """Adds the variables with which the processes of several slices find each other, at host 0."""
        description = self.members[0].description
        address = description["host_ip"] if description else ""
        num_slices = len(self.members) // hosts_per_slice(self.config)
        number = slice_of(self.config, host)
        return {**super().orders(host), "slice": number, "env": megascale_env(number, num_slices, address)}

    def refresh(self, *, members: bool = False) -> list[Slot]:
        available = super().refresh(members=members)
        self._look_for_slices(() if members else [slot for slot in self.members if not slot.lost])
        whole = slots_of_whole_slices(self.config, [slot.number for slot in available])
        return [slot for slot in available if slot.number in whole]

    def lose(self, *slots: Slot, avoid_nodes: Sequence[str] = (), fill: bool = True) -> None:
        """Kills the agents of these slots. The slots keep their bundles, since the machines may be fine. If one is not, its
        whole slice moves as soon as there is another."""
        for slot in slots:
            self._end_agent(slot)
            slot.avoid_nodes = tuple(avoid_nodes)
        if fill:
            self.fill_unassigned()

    # ------------------------------------------------------------------ taking slices

    def _take_base(self, deadline_s: float, check_stop: CheckStop) -> list[Slot]:
        groups = tpu_slices.reserve(self.config, self._bundles, deadline_s, self._avoid_nodes, check_stop)
        workers = range(hosts_per_slice(self.config))
        return [self._add_slot(Bundle(group, worker, alone=False)) for group in groups for worker in workers]

    def _take_further(self, base: Sequence[Slot], check_stop: CheckStop) -> list[Slot]:
        per_slice, further = hosts_per_slice(self.config), max_slices(self.config) - min_slices(self.config)
        for _ in range((further + self.config.spares) * per_slice):
            self.slots.append(Slot(len(self.slots), NOWHERE, "", None, unassigned=True, avoid_nodes=tuple(self._avoid_nodes)))
        self._look_for_slices(base)

        def created() -> list[Slot]:
            placed = [slot for slot in self.slots[len(base) :] if self._bundles.hold(slot.bundle)]
            return [slot for slot in placed if placement_groups.is_created(slot.bundle.group)]

        if further:
            wait_until(lambda: len(created()) >= further * per_slice, self.config.wait_for_max_s, check_stop)
        return created()[: further * per_slice]

    def _slices(self) -> list[list[Slot]]:
        per_slice = hosts_per_slice(self.config)
        return [self.slots[first : first + per_slice] for first in range(0, len(self.slots), per_slice)]

    def _look_for_slices(self, training: Sequence[Slot]) -> None:
        """Moves slots that have no slice, or a broken one, to whole and free slices. The slots in `training` stay."""
        now_s = time.monotonic()
        if now_s < self._next_look_s or all(slot.available for slot in self.slots):
            return
        self._next_look_s = now_s + tpu_slices.LOOK_AGAIN_S
        view, busy = View(), set(training)
        to_move = [slots for slots in self._slices() if busy.isdisjoint(slots) and self._needs_slice(slots, view)]
        if not to_move:
            return
        avoid = sorted({node for slot in self.slots for node in slot.avoid_nodes})
        for slots, name in zip(to_move, whole_slices(self.config, living_nodes(), avoid), strict=False):
            self._move_slice(slots, name)

    def _needs_slice(self, slots: Sequence[Slot], view: View) -> bool:
        """Returns whether these slots, which share a slice, have to move to another one."""
        group = slots[0].bundle.group
        if not self._bundles.hold(slots[0].bundle):
            return True
        if view.is_gone(group):  # agents whose leases ended have removed it
            self._bundles.groups.remove(group)
            self._hire_steward()  # the old one ended when the group was removed
            return True
        return any(view.node_id(slot.bundle) in (None, *slot.avoid_nodes) for slot in slots)

    def _move_slice(self, slots: Sequence[Slot], name: str) -> None:
        for slot in slots:
            if not slot.unassigned:
                self._end_agent(slot)
        if self._bundles.hold(slots[0].bundle):
            self._bundles.give_back(slots[0].bundle.group)
        group = tpu_slices.ask_for(self.config, self._bundles, slots[0].number, name)
        for worker, slot in enumerate(slots):
            # The chosen slice has none of the machines to avoid.
            slot.bundle, slot.avoid_nodes = Bundle(group, worker, alone=False), ()
            self._fill(slot)

    def _refill(self, without_agent: Sequence[Slot], living: Mapping[str, Any]) -> None:
        for slot in without_agent:
            slot.unassigned = True
            if self._bundles.hold(slot.bundle) and slot.bundle.group.id.hex() not in living:
                self._bundles.groups.remove(slot.bundle.group)
        self.fill_unassigned()
