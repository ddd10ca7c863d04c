"""The gang: one host agent on each machine of a run.

Hosts sit on seats. The hosts that a run cannot do without share one placement group, all of them or none; each further seat, for
a host that may come later or for a spare, has a group of its own, so that a missing one holds nothing up. TPU hosts sit on whole
slices (`slice_gang.py`). Agents and groups outlive their driver: the next one adopts them, or clears them away, or they leave by
themselves when their lease ends.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from cluster.agent import preemption
from cluster.agent.driver_lease import StaleDriver
from cluster.gang.adoption import AdoptError, newest_generation
from cluster.gang.calls import GONE_ERRORS, Mailbox
from cluster.gang.lease_keeper import LeaseKeeper
from cluster.gang.slots import AgentMaker, Seat
from cluster.hosts.capacity import explain_missing
from cluster.hosts.config import devices_per_host, num_hosts, strategy
from cluster.hosts.process_env import compile_cache_dir
from cluster.placement import placement_groups
from cluster.placement.bundles import Place, Places, View, living_nodes, place_of
from cluster.placement.cleanup import clear, find_agent
from cluster.placement.waits import Attend, do_nothing, wait_answers, wait_until

AGENT_START_TIMEOUT_S = 60.0
"""For a Ray actor to answer once its place is reserved."""
ADOPT_TIMEOUT_S = 10.0
"""For the agents of a gang that is to be adopted."""
PROBE_INTERVAL_S = 2.0
"""How often agents that nobody polls are asked whether they are there. Less often if there are very many."""
PROBES_PER_S = 200
REPLACEMENT_INTERVAL_S = 2.0
"""How often an agent that has died is replaced."""
PROBE_TIMEOUT_S = 10.0
"""For an agent that had answered before; later it counts as not available."""
RELEASE_TIMEOUT_S = 5.0
STEWARD = -1
"""The steward's place among the seats whose leases are kept."""
FAILURE_LOOK_S = 0.5
"""How often a start that waits for all agents looks whether one of them has died."""


class GangTimeout(Exception):
    """The machines of the gang were not to be had in time; the message says what is missing."""


class Gang:
    """The seats of a run and who sits there. Made by `reserve` or `adopt`. Not for several threads at a time.

    A thread of its own keeps the leases of all agents, until `release`, or until the driver has given no sign of life for very
    long: it calls `refresh` about once a second.
    """

    def __init__(self, maker: AgentMaker, avoid_nodes: Sequence[str] = ()):
        self.config, self.run_name, self.epoch = maker.config, maker.run_name, maker.epoch
        self.seats: list[Seat] = []
        self.members: list[Seat] = []
        """In host order: `members[i]` is JAX's process i."""
        self.leads: list[dict[str, Any]] = []
        """After `adopt`: what the agent of each member said when this driver took the lead (`HostAgent.lead`)."""
        self._maker, self._avoid_nodes = maker, tuple(avoid_nodes)
        self._places = Places(self.config, self.run_name, self.epoch)
        self._preparation: dict[str, Any] | None = None
        self.version = 0
        """Changes with each change of `record()`."""
        self._keeper = LeaseKeeper(maker.lease_s, maker.keep)
        weakref.finalize(self, self._keeper.stop)  # a gang that nobody has any more is left to its leases
        self._steward_name, self._steward = "", None
        self._probe_interval_s = PROBE_INTERVAL_S

    @property
    def agents(self) -> list[Any]:
        """The members' actor handles in host order."""
        return [seat.agent for seat in self.members]

    @property
    def descriptions(self) -> list[dict[str, Any]]:
        """What each member's agent last said of itself, in host order: host_ip, node_id, pid, ..."""
        return [seat.description or {} for seat in self.members]

    def slice_of(self, host: int) -> int:
        """The TPU slice that a host belongs to; 0 elsewhere."""
        return 0

    def orders(self, host: int) -> dict[str, Any]:
        """What the machines add to the orders of a host's training process."""
        config = self.config
        return {
            "local_device_ids": list(range(devices_per_host(config))) if config.kind == "gpu" else None,
            "slice": self.slice_of(host),
            # By rank, not by seat: whoever takes a host's place finds the programs of that place compiled.
            "cache_dir": compile_cache_dir(config, host, self._maker.cache_dir) if config.kind == "cpu" else None,
        }

    def call(self, host: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of a member's agent in this driver's name; returns Ray's reference to the answer."""
        return self.ask(self.members[host], method, *args, **kwargs)

    def ask(self, seat: Seat, method: str, *args: Any, **kwargs: Any) -> Any:
        """The same for any seat."""
        return getattr(seat.agent, method).remote(*args, epoch=self.epoch, **kwargs)

    def mailbox(self) -> Mailbox:
        """Where answers to `call` and `ask` arrive for whoever expects them there."""
        return Mailbox()

    def draining_nodes(self) -> dict[str, float | None]:
        """The machines that Ray is told to empty, by node id, and the seconds that are left (None: nobody says)."""
        return preemption.draining_nodes()

    def cluster_address(self) -> str:
        """Of the Ray cluster that the gang is in."""
        return ray.get_runtime_context().gcs_address

    def prepare(self, preparation: dict[str, Any]) -> None:
        """Starts the standbys of all agents, those of later included, without waiting for any.

        A `go` that follows at once waits for a first preparation, but may still take a standby made with an earlier one.
        """
        self._preparation = preparation
        for seat in self.seats:
            if not seat.vacant:
                self.ask(seat, "prepare", preparation)

    def record(self) -> dict[str, Any]:
        """What another driver needs to adopt this gang, JSON-able. `version` says when it has changed."""
        return {
            "hosts": dataclasses.asdict(self.config),
            "seats": [seat.record() for seat in self.seats],
            "members": [seat.number for seat in self.members],
            **self._places.record(),
        }

    # ------------------------------------------------------------------ who sits where

    def set_members(self, seats: Iterable[Seat]) -> None:
        """Makes these the gang, in this order. Raises ValueError if one is not available, or comes twice."""
        seats = list(seats)
        for seat in seats:
            if not seat.available:
                raise ValueError(f"seat {seat.number} of run {self.run_name!r} is not available: no agent has answered there")
        if len(set(seats)) < len(seats):
            raise ValueError(f"a seat comes twice among {[seat.number for seat in seats]}")
        self.members = seats
        for seat in seats:
            seat.lost = False
        self.version += 1

    def refresh(self, *, members: bool = False) -> list[Seat]:
        """The seats that are available now. Never waits.

        One whose agent has died gets a new one. Members are left to whoever polls them, unless they were lost; with `members`,
        as between generations, they are asked and replaced too. Raises StaleDriver if a newer driver leads the agents.
        """
        self._keeper.heard()
        followed = set() if members else {seat for seat in self.members if not seat.lost}
        asked = {seat.probe: seat for seat in self.seats if seat.probe is not None}
        came = ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else ()
        dead = [asked[ref] for ref in came if not self._take_answer(asked[ref], ref)]
        self._replace([seat for seat in dead if seat not in followed])
        self._part([asked[ref] for ref in came])
        waiting = [seat for seat in self.seats if not seat.available or seat not in followed]
        self._probe_interval_s = max(PROBE_INTERVAL_S, len(waiting) / PROBES_PER_S)
        for seat in waiting:
            self._probe(seat)
        self._go_where_room_is([seat for seat in waiting if seat not in followed])
        return [seat for seat in self.seats if seat.available]

    def wait_available(self, count: int, timeout_s: float, attend: Attend = do_nothing) -> list[Seat]:
        """Waits until so many seats are available, members included, at most `timeout_s`; returns those that are. Calls `attend`
        at least once a second: it may raise to end the wait.

        Between generations: members whose agents die are replaced.
        """
        wait_until(lambda: len(self.refresh(members=True)) >= count, timeout_s, attend)
        return self.refresh(members=True)

    def lose(self, *seats: Seat, avoid_nodes: Sequence[str] = (), fill: bool = True) -> None:
        """Ends the agents of these seats, whatever is left of them, and asks for new ones (without `fill`: `fill_vacant` will);
        until that answers, a seat is pending.

        It sits in the same place; if that is on one of the machines to avoid, or its machine is gone, in one that was left and
        has a machine, or in a group of its own that avoids them. Called without machines to avoid, it may come back to one that
        it had to avoid. Other groups that were removed meanwhile (agents do that when their leases end) are asked for anew.
        """
        view = View()
        gone = {seat.place.group for seat in seats if view.is_gone(seat.place.group)}
        for seat in seats:
            self._leave(seat)
            if seat.place.group not in gone:
                self._move(seat, avoid_nodes, view)
            seat.avoid_nodes = tuple(avoid_nodes)
        if gone:
            self._hire_steward()  # the one before has left with the groups
        for group in gone:
            self._ask_anew(group)
        if fill:
            self.fill_vacant()

    def _leave(self, seat: Seat) -> None:
        self._keeper.drop(seat.number)
        if seat.agent is not None:
            ray.kill(seat.agent)
        seat.description, seat.probe, seat.lost, seat.vacant = None, None, True, True
        self.version += 1

    def _ask_anew(self, gone: PlacementGroup) -> None:
        """All who sat in a group that was removed are to sit in another one: none of their agents can live."""
        sat = [seat for seat in self.seats if seat.place.group == gone]
        for seat in sat:
            if not seat.vacant:
                self._leave(seat)
        if all(seat.place.alone for seat in sat):
            self._places.groups.remove(gone)
            for seat in sat:
                seat.place = self._places.ask_for_one(seat.number, ())
        else:
            group = self._places.ask_anew(gone)
            for seat in sat:
                seat.place = dataclasses.replace(seat.place, group=group)

    def _move(self, seat: Seat, avoid_nodes: Sequence[str], view: View) -> None:
        node_id = view.node_id(seat.place)
        moving_helps = avoid_nodes or seat.avoid_nodes or self._places.vacant
        elsewhere = node_id in avoid_nodes or (node_id is None and moving_helps)
        if elsewhere:
            seat.place = self._places.exchange(seat.place, seat.number, avoid_nodes, view)

    def fill_vacant(self) -> None:
        """Asks for an agent on every seat that has been left without one."""
        for seat in self.seats:
            if seat.vacant and self._places.hold(seat.place):
                self._fill(seat)

    def missing(self) -> str:
        """Why hosts are missing: what was asked for, and what the cluster has."""
        return explain_missing(self.config, living_nodes())

    def put_up_with_any(self) -> bool:
        """Lets seats without an agent come back to the machines that they were to avoid. False if there are none."""
        kept_away = [seat for seat in self.seats if not seat.available and seat.avoid_nodes]
        if kept_away:
            self.lose(*kept_away)
        return bool(kept_away)

    def release(self) -> None:
        """Ends all agents, and with them their processes, and gives the machines back; not if a newer driver leads them."""
        self._keeper.stop()
        try:
            self._end_agents()
        except StaleDriver:
            self._places.forget()
        else:
            self._places.give_all_back()
            if self._steward is not None:
                ray.kill(self._steward)
        self.seats, self.members = [], []

    def _end_agents(self) -> None:
        asked = [self.ask(seat, "shutdown") for seat in self.seats if seat.available]
        for ref in ray.wait(asked, num_returns=len(asked), timeout=RELEASE_TIMEOUT_S)[0] if asked else ():
            with suppress(ray.exceptions.RayActorError):  # gone before
                ray.get(ref)
        for seat in self.seats:
            self._keeper.drop(seat.number)
            if seat.agent is not None:
                ray.kill(seat.agent)

    # ------------------------------------------------------------------ taking machines

    def _hire_steward(self) -> None:
        """To be there before the first group: from then on whatever the run holds is given back, whoever dies."""
        former = self._steward
        self._steward_name, self._steward = self._maker.hire_steward()
        self._keeper.keep(STEWARD, self._steward)
        if former is not None:
            ray.kill(former)

    def take_hosts(self, timeout_s: float, attend: Attend) -> None:
        """Called once, by `gangs.reserve`. Raises GangTimeout; what was taken until then is for `release`."""
        attend, deadline_s = self._keeping(attend), time.monotonic() + timeout_s
        self._hire_steward()
        try:
            base = self._take_base(deadline_s, attend)
        except TimeoutError as error:
            raise self._explained(timeout_s) from error
        begin = [*base, *self._take_further(base, attend)]
        self._wait_for_answers(begin, max(deadline_s, time.monotonic() + AGENT_START_TIMEOUT_S), attend)
        self.set_members(begin)

    def _take_base(self, deadline_s: float, attend: Attend) -> list[Seat]:
        """Seats for the hosts that the run cannot do without. Raises TimeoutError."""
        return [self._add_seat(place) for place in self._places.take_base(deadline_s, self._avoid_nodes, attend)]

    def _take_further(self, base: Sequence[Seat], attend: Attend) -> list[Seat]:
        """Adds seats for more hosts and for spares; returns those of which the gang may begin with."""
        further = num_hosts(self.config) - len(base)
        nodes = placement_groups.node_ids(base[0].place.group).values() if self._spread() else ()
        avoid = [*self._avoid_nodes, *nodes]
        optional = [self._add_seat(self._places.ask_for_one(len(self.seats), avoid)) for _ in range(further + self.config.spares)]
        return self._placed(optional, further, attend)

    def _keeping(self, attend: Attend) -> Attend:
        """For a wait in which nobody calls `refresh`."""

        def attend_and_keep() -> None:
            self._keeper.heard()
            attend()

        return attend_and_keep

    def _placed(self, seats: Sequence[Seat], count: int, attend: Attend) -> list[Seat]:
        """At most `count` of these seats for which Ray finds room while the start waits for them."""

        def found() -> list[Seat]:
            return [seat for seat in seats if placement_groups.is_created(seat.place.group)]

        if count:
            wait_until(lambda: len(found()) >= count, self.config.wait_for_max_s, attend)
        return found()[:count]

    def _explained(self, timeout_s: float) -> GangTimeout:
        why = explain_missing(self.config, living_nodes(), self._avoid_nodes)
        return GangTimeout(f"the hosts of run {self.run_name!r} could not be had within {timeout_s:g} s: {why}")

    # ------------------------------------------------------------------ agents

    def _add_seat(self, place: Place) -> Seat:
        seat = Seat(len(self.seats), place, "", None)
        self._fill(seat)
        self.seats.append(seat)
        return seat

    def _fill(self, seat: Seat) -> None:
        seat.name, seat.agent = self._maker.create(seat.place, seat.number)
        seat.vacant = False
        self.version += 1
        self._ask_for_life(seat)
        if self._preparation is not None:
            self.ask(seat, "prepare", self._preparation)

    def _wait_for_answers(self, seats: Sequence[Seat], deadline_s: float, attend: Attend) -> None:
        """Raises GangTimeout if an agent has died, or does not answer in time."""
        while missing := {seat.probe: seat for seat in seats if not seat.available}:
            for ref in wait_answers(list(missing), min(deadline_s, time.monotonic() + FAILURE_LOOK_S), attend):
                seat = missing[ref]
                if not self._take_answer(seat, ref):
                    raise GangTimeout(f"an agent of run {self.run_name!r} did not start: {seat.trouble}")
                if seat.probe is None and not seat.available:
                    self._ask_for_life(seat)
            if time.monotonic() >= deadline_s and (silent := [seat.number for seat in seats if not seat.available]):
                raise GangTimeout(f"agents of run {self.run_name!r} did not start: those of the seats {silent} do not answer")

    def _ask_for_life(self, seat: Seat) -> None:
        seat.probe, seat.next_probe_s = self.ask(seat, "describe"), time.monotonic() + self._probe_interval_s

    def _probe(self, seat: Seat) -> None:
        now_s = time.monotonic()
        if seat.vacant:
            return
        if seat.probe is None and now_s >= seat.next_probe_s:
            self._ask_for_life(seat)
        elif seat.available and now_s > seat.next_probe_s + PROBE_TIMEOUT_S:
            seat.description = None  # it will be available again if it ever answers

    def _take_answer(self, seat: Seat, ref: Any) -> bool:
        """False if the agent is dead."""
        seat.probe = None
        try:
            seat.description = ray.get(ref)
        except ray.exceptions.ActorUnavailableError:  # alive, and cut off just now: asked again
            seat.description = None
            return True
        except GONE_ERRORS as error:
            seat.description, seat.trouble = None, str(error)
            return False
        self._keeper.keep(seat.number, seat.agent)
        return True

    def _replace(self, dead: Sequence[Seat]) -> None:
        """New agents for those that have died: at once, but not all the time, should none live there."""
        now_s = time.monotonic()
        due = [seat for seat in dead if now_s >= seat.next_replacement_s]
        for seat in due:
            seat.next_replacement_s = now_s + REPLACEMENT_INTERVAL_S
        if due:
            self.lose(*due)

    def _part(self, answered: Sequence[Seat]) -> None:
        """Of hosts that must not share a machine, one that has just come to the machine of another goes elsewhere."""
        alone = [seat for seat in answered if seat.available and seat.place.alone] if self._spread() else []
        taken = Counter(seat.node_id or "" for seat in self.seats if seat.available) if alone else Counter()
        for seat in alone:
            if taken[seat.node_id or ""] > 1:
                taken[seat.node_id or ""] -= 1
                self.lose(seat, avoid_nodes=list(taken))

    def _go_where_room_is(self, seats: Sequence[Seat]) -> None:
        """The groups of a run compete for a machine that comes: a place that was left may have got the one a seat waits for."""
        now_s = time.monotonic()
        due = [seat for seat in seats if not seat.vacant and not seat.available and now_s >= seat.next_search_s]
        if not due or not self._places.vacant:
            return
        view, taken = View(), {seat.node_id for seat in self.seats if seat.node_id is not None} if self._spread() else set()
        for seat in due:
            seat.next_search_s = now_s + PROBE_INTERVAL_S
            avoid = {*seat.avoid_nodes, *taken}
            if view.node_id(seat.place) is None and self._places.vacant_elsewhere(avoid, view) is not None:
                self.lose(seat, avoid_nodes=tuple(avoid))

    def _spread(self) -> bool:
        return strategy(self.config) == "STRICT_SPREAD"

    # ------------------------------------------------------------------ adopting

    def take_over(self, record: Mapping[str, Any], attend: Attend) -> None:
        """Called once, by `gangs.adopt`. Raises AdoptError, StaleDriver, and what `attend` raises."""
        try:
            self._adopt(record, attend)
        except BaseException:
            self._keeper.stop()
            raise

    def _adopt(self, record: Mapping[str, Any], attend: Attend) -> None:
        if record["hosts"] != dataclasses.asdict(self.config):
            raise AdoptError("the configuration of the hosts is another one now")
        self._places.recall(record)
        self._hire_steward()
        living = placement_groups.living()
        dead = []
        for about in record["seats"]:
            seat = Seat(about["number"], place_of(about), about["name"], None, avoid_nodes=tuple(about["avoid_nodes"]))
            self.seats.append(seat)
            seat.agent = find_agent(seat.name) if seat.name else None
            if seat.agent is None:
                dead.append(seat)
            else:
                seat.probe, seat.next_probe_s = seat.agent.lead.remote(self.epoch), time.monotonic() + PROBE_INTERVAL_S
        by_number = {seat.number: seat for seat in self.seats}
        self._find_generation([by_number[number] for number in record["members"]], attend)
        names = {info["name"] for key, info in living.items() if key in record["groups"]}
        clear(self.run_name, keep={*names, self._steward_name, *(seat.name for seat in self.seats)}, attend=attend)
        self._seat_anew(dead, living)

    def _seat_anew(self, dead: Sequence[Seat], living: Mapping[str, Any]) -> None:
        """Asks for agents on these seats; the groups of some may not be among the living ones."""
        for seat in dead:
            if seat.place.group.id.hex() not in living:
                seat.place = self._places.ask_for_one(seat.number, self._avoid_nodes)
            self._fill(seat)

    def _find_generation(self, recorded: Sequence[Seat], attend: Attend) -> None:
        """Takes those as members who have the orders of the newest generation, whether or not they were recorded as such."""
        for asked in (recorded, self.seats):  # a spare whose machine has not come yet would never answer
            probes = [seat.probe for seat in asked if seat.probe is not None]
            wait_answers(probes, time.monotonic() + ADOPT_TIMEOUT_S, attend)
            for seat in self.seats:
                self._take_lead(seat)
            by_number = {seat.number: seat for seat in self.seats}
            leads = {seat.number: seat.description for seat in self.seats if seat.description is not None}
            try:
                self.members = [by_number[number] for number in newest_generation(leads)]
                break
            except AdoptError:
                if asked is self.seats:
                    raise
        self.leads = [leads[seat.number] for seat in self.members]

    def _take_lead(self, seat: Seat) -> None:
        if seat.probe is not None and ray.wait([seat.probe], timeout=0)[0]:
            self._take_answer(seat, seat.probe)
