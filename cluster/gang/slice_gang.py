"""The gang of a TPU run: its seats come in whole slices.

Seats are numbered slice by slice, and inside a slice by worker id; each slice of seats has a placement group of its own, so that
one can be given back without the others. A slice that has lost a machine is left for another whole one as soon as there is one;
until then it is waited for. Spare slices, and those beyond `hosts.min_slices`, are taken when they are there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.gang.gang import Gang
from cluster.gang.slots import Seat
from cluster.hosts.capacity import whole_slices
from cluster.hosts.config import hosts_per_slice, max_slices, min_slices, seats_of_whole_slices, slice_of
from cluster.hosts.process_env import megascale_env
from cluster.placement import placement_groups, tpu_slices
from cluster.placement.bundles import NOWHERE, Place, View, living_nodes
from cluster.placement.waits import Attend, wait_until


class SliceGang(Gang):
    """As `Gang`. Only seats of slices whose agents are all there count as available."""

    _next_look_s = 0.0
    """When to look again whether there are slices for seats that have none, or a broken one."""

    def slice_of(self, host: int) -> int:
        return slice_of(self.config, host)

    def orders(self, host: int) -> dict[str, Any]:
        """With what the processes of several slices need to find each other: host 0 is where they meet."""
        address = self.descriptions[0].get("host_ip", "")
        num_slices = len(self.members) // hosts_per_slice(self.config)
        return {**super().orders(host), "env": megascale_env(self.slice_of(host), num_slices, address)}

    def refresh(self, *, members: bool = False) -> list[Seat]:
        available = super().refresh(members=members)
        self._look_for_slices(() if members else [seat for seat in self.members if not seat.lost])
        whole = seats_of_whole_slices(self.config, [seat.number for seat in available])
        return [seat for seat in available if seat.number in whole]

    def lose(self, *seats: Seat, avoid_nodes: Sequence[str] = (), fill: bool = True) -> None:
        """A seat keeps its place, for the machine may be well. If it is not, its slice moves as soon as there is another."""
        for seat in seats:
            self._leave(seat)
            seat.avoid_nodes = tuple(avoid_nodes)
        if fill:
            self.fill_vacant()

    # ------------------------------------------------------------------ taking slices

    def _take_base(self, deadline_s: float, attend: Attend) -> list[Seat]:
        first = tpu_slices.reserve(self.config, self._places, deadline_s, self._avoid_nodes, attend)
        placed = [Place(group, worker, alone=False) for group in first for worker in range(hosts_per_slice(self.config))]
        return [self._add_seat(place) for place in placed]

    def _take_further(self, base: Sequence[Seat], attend: Attend) -> list[Seat]:
        per_slice, further = hosts_per_slice(self.config), max_slices(self.config) - min_slices(self.config)
        for _ in range((further + self.config.spares) * per_slice):
            self.seats.append(Seat(len(self.seats), NOWHERE, "", None, vacant=True, avoid_nodes=tuple(self._avoid_nodes)))
        self._look_for_slices(base)

        def found() -> list[Seat]:
            placed = [seat for seat in self.seats[len(base) :] if self._places.hold(seat.place)]
            return [seat for seat in placed if placement_groups.is_created(seat.place.group)]

        if further:
            wait_until(lambda: len(found()) >= further * per_slice, self.config.wait_for_max_s, attend)
        return found()[: further * per_slice]

    def _slices(self) -> list[list[Seat]]:
        per_slice = hosts_per_slice(self.config)
        return [self.seats[first : first + per_slice] for first in range(0, len(self.seats), per_slice)]

    def _look_for_slices(self, training: Sequence[Seat]) -> None:
        """Moves seats that have no slice, or a broken one, to slices that are whole and free. Those that train stay."""
        now_s = time.monotonic()
        if now_s < self._next_look_s or all(seat.available for seat in self.seats):
            return
        self._next_look_s = now_s + tpu_slices.LOOK_AGAIN_S
        view, at_work = View(), set(training)
        wanting = [seats for seats in self._slices() if at_work.isdisjoint(seats) and self._want_another(seats, view)]
        if not wanting:
            return
        avoid = sorted({node for seat in self.seats for node in seat.avoid_nodes})
        for seats, name in zip(wanting, whole_slices(self.config, living_nodes(), avoid), strict=False):
            self._move_slice(seats, name)

    def _want_another(self, seats: Sequence[Seat], view: View) -> bool:
        group = seats[0].place.group
        if not self._places.hold(seats[0].place):
            return True
        if view.is_gone(group):  # agents do that when their leases end
            self._places.drop(group)
            self._hire_steward()
            return True
        return any(view.node_id(seat.place) in (None, *seat.avoid_nodes) for seat in seats)

    def _move_slice(self, seats: Sequence[Seat], name: str) -> None:
        for seat in seats:
            if not seat.vacant:
                self._leave(seat)
        if self._places.hold(seats[0].place):
            self._places.give_back(seats[0].place.group)
        group = tpu_slices.ask_for(self.config, self._places, seats[0].number, name)
        for worker, seat in enumerate(seats):
            seat.place, seat.avoid_nodes = Place(group, worker, alone=False), ()
            self._fill(seat)

    def _seat_anew(self, dead: Sequence[Seat], living: Mapping[str, Any]) -> None:
        for seat in dead:
            seat.vacant = True
            if self._places.hold(seat.place) and seat.place.group.id.hex() not in living:
                self._places.drop(seat.place.group)
        self.fill_vacant()
