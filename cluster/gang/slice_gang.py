"""The gang of a TPU run: its slots come in whole slices.

Slots are numbered slice by slice, and inside a slice by worker id; each slice of slots has a placement group of its own, so that
one can be given back without the others. A slice that has lost a machine is left for another whole one as soon as there is one;
until then it is waited for. Spare slices, and those beyond `hosts.min_slices`, are taken when they are there.
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
from cluster.placement.waits import CheckStop, wait_until


class SliceGang(Gang):
    """As `Gang`. Only slots of slices whose agents are all there count as available."""

    _next_look_s = 0.0
    """When to look again whether there are slices for slots that have none, or a broken one."""

    def slice_of(self, host: int) -> int:
        return slice_of(self.config, host)

    def orders(self, host: int) -> dict[str, Any]:
        """With what the processes of several slices need to find each other: host 0 is where they meet."""
        address = self.descriptions[0].get("host_ip", "")
        num_slices = len(self.members) // hosts_per_slice(self.config)
        return {**super().orders(host), "env": megascale_env(self.slice_of(host), num_slices, address)}

    def refresh(self, *, members: bool = False) -> list[Slot]:
        available = super().refresh(members=members)
        self._look_for_slices(() if members else [slot for slot in self.members if not slot.lost])
        whole = slots_of_whole_slices(self.config, [slot.number for slot in available])
        return [slot for slot in available if slot.number in whole]

    def lose(self, *slots: Slot, avoid_nodes: Sequence[str] = (), fill: bool = True) -> None:
        """A slot keeps its place, for the machine may be well. If it is not, its slice moves as soon as there is another."""
        for slot in slots:
            self._leave(slot)
            slot.avoid_nodes = tuple(avoid_nodes)
        if fill:
            self.fill_unassigned()

    # ------------------------------------------------------------------ taking slices

    def _take_base(self, deadline_s: float, check_stop: CheckStop) -> list[Slot]:
        first = tpu_slices.reserve(self.config, self._places, deadline_s, self._avoid_nodes, check_stop)
        placed = [Bundle(group, worker, alone=False) for group in first for worker in range(hosts_per_slice(self.config))]
        return [self._add_slot(place) for place in placed]

    def _take_further(self, base: Sequence[Slot], check_stop: CheckStop) -> list[Slot]:
        per_slice, further = hosts_per_slice(self.config), max_slices(self.config) - min_slices(self.config)
        for _ in range((further + self.config.spares) * per_slice):
            self.slots.append(Slot(len(self.slots), NOWHERE, "", None, unassigned=True, avoid_nodes=tuple(self._avoid_nodes)))
        self._look_for_slices(base)

        def found() -> list[Slot]:
            placed = [slot for slot in self.slots[len(base) :] if self._places.hold(slot.place)]
            return [slot for slot in placed if placement_groups.is_created(slot.place.group)]

        if further:
            wait_until(lambda: len(found()) >= further * per_slice, self.config.wait_for_max_s, check_stop)
        return found()[: further * per_slice]

    def _slices(self) -> list[list[Slot]]:
        per_slice = hosts_per_slice(self.config)
        return [self.slots[first : first + per_slice] for first in range(0, len(self.slots), per_slice)]

    def _look_for_slices(self, training: Sequence[Slot]) -> None:
        """Moves slots that have no slice, or a broken one, to slices that are whole and free. Those that train stay."""
        now_s = time.monotonic()
        if now_s < self._next_look_s or all(slot.available for slot in self.slots):
            return
        self._next_look_s = now_s + tpu_slices.LOOK_AGAIN_S
        view, at_work = View(), set(training)
        wanting = [slots for slots in self._slices() if at_work.isdisjoint(slots) and self._want_another(slots, view)]
        if not wanting:
            return
        avoid = sorted({node for slot in self.slots for node in slot.avoid_nodes})
        for slots, name in zip(wanting, whole_slices(self.config, living_nodes(), avoid), strict=False):
            self._move_slice(slots, name)

    def _want_another(self, slots: Sequence[Slot], view: View) -> bool:
        group = slots[0].place.group
        if not self._places.hold(slots[0].place):
            return True
        if view.is_gone(group):  # agents do that when their leases end
            self._places.drop(group)
            self._hire_steward()
            return True
        return any(view.node_id(slot.place) in (None, *slot.avoid_nodes) for slot in slots)

    def _move_slice(self, slots: Sequence[Slot], name: str) -> None:
        for slot in slots:
            if not slot.unassigned:
                self._leave(slot)
        if self._places.hold(slots[0].place):
            self._places.give_back(slots[0].place.group)
        group = tpu_slices.ask_for(self.config, self._places, slots[0].number, name)
        for worker, slot in enumerate(slots):
            slot.place, slot.avoid_nodes = Bundle(group, worker, alone=False), ()
            self._fill(slot)

    def _fill_slot_anew(self, dead: Sequence[Slot], living: Mapping[str, Any]) -> None:
        for slot in dead:
            slot.unassigned = True
            if self._places.hold(slot.place) and slot.place.group.id.hex() not in living:
                self._places.drop(slot.place.group)
        self.fill_unassigned()
