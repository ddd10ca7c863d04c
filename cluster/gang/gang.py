"""The gang: one host agent on each machine of a run.

Hosts sit on slots. The hosts that a run cannot do without share one placement group, all of them or none; each further slot, for
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
from cluster.gang.slots import AgentMaker, Slot
from cluster.hosts.capacity import explain_missing
from cluster.hosts.config import devices_per_host, num_hosts, strategy
from cluster.hosts.process_env import compile_cache_dir
from cluster.placement import placement_groups
from cluster.placement.bundles import Bundle, Bundles, View, bundle_of, living_nodes
from cluster.placement.cleanup import clear, find_agent
from cluster.placement.waits import CheckStop, do_nothing, wait_answers, wait_until

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
"""The steward's place among the slots whose leases are kept."""
FAILURE_LOOK_S = 0.5
"""How often a start that waits for all agents looks whether one of them has died."""


class GangTimeout(Exception):
    """The machines of the gang were not to be had in time; the message says what is missing."""


class Gang:
    """The slots of a run and who sits there. Made by `reserve` or `adopt`. Not for several threads at a time.

    A thread of its own keeps the leases of all agents, until `release`, or until the driver has given no sign of life for very
    long: it calls `refresh` about once a second.
    """

    def __init__(self, maker: AgentMaker, avoid_nodes: Sequence[str] = ()):
        self.config, self.run_name, self.driver_term = maker.config, maker.run_name, maker.driver_term
        self.slots: list[Slot] = []
        self.members: list[Slot] = []
        """In host order: `members[i]` is JAX's process i."""
        self.leads: list[dict[str, Any]] = []
        """After `adopt`: what the agent of each member said when this driver took the lead (`HostAgent.lead`)."""
        self._maker, self._avoid_nodes = maker, tuple(avoid_nodes)
        self._places = Bundles(self.config, self.run_name, self.driver_term)
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
        return [slot.agent for slot in self.members]

    @property
    def descriptions(self) -> list[dict[str, Any]]:
        """What each member's agent last said of itself, in host order: host_ip, node_id, pid, ..."""
        return [slot.description or {} for slot in self.members]

    def slice_of(self, host: int) -> int:
        """The TPU slice that a host belongs to; 0 elsewhere."""
        return 0

    def orders(self, host: int) -> dict[str, Any]:
        """What the machines add to the orders of a host's training process."""
        config = self.config
        return {
            "local_device_ids": list(range(devices_per_host(config))) if config.kind == "gpu" else None,
            "slice": self.slice_of(host),
            # By rank, not by slot: whoever takes a host's place finds the programs of that place compiled.
            "cache_dir": compile_cache_dir(config, host, self._maker.cache_dir) if config.kind == "cpu" else None,
        }

    def call(self, host: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of a member's agent in this driver's name; returns Ray's reference to the answer."""
        return self.ask(self.members[host], method, *args, **kwargs)

    def ask(self, slot: Slot, method: str, *args: Any, **kwargs: Any) -> Any:
        """The same for any slot."""
        return getattr(slot.agent, method).remote(*args, driver_term=self.driver_term, **kwargs)

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
        for slot in self.slots:
            if not slot.unassigned:
                self.ask(slot, "prepare", preparation)

    def record(self) -> dict[str, Any]:
        """What another driver needs to adopt this gang, JSON-able. `version` says when it has changed."""
        return {
            "hosts": dataclasses.asdict(self.config),
            "slots": [slot.record() for slot in self.slots],
            "members": [slot.number for slot in self.members],
            **self._places.record(),
        }

    # ------------------------------------------------------------------ who sits where

    def set_members(self, slots: Iterable[Slot]) -> None:
        """Makes these the gang, in this order. Raises ValueError if one is not available, or comes twice."""
        slots = list(slots)
        for slot in slots:
            if not slot.available:
                raise ValueError(f"slot {slot.number} of run {self.run_name!r} is not available: no agent has answered there")
        if len(set(slots)) < len(slots):
            raise ValueError(f"a slot comes twice among {[slot.number for slot in slots]}")
        self.members = slots
        for slot in slots:
            slot.lost = False
        self.version += 1

    def refresh(self, *, members: bool = False) -> list[Slot]:
        """The slots that are available now. Never waits.

        One whose agent has died gets a new one. Members are left to whoever polls them, unless they were lost; with `members`,
        as between generations, they are asked and replaced too. Raises StaleDriver if a newer driver leads the agents.
        """
        self._keeper.heard()
        followed = set() if members else {slot for slot in self.members if not slot.lost}
        asked = {slot.probe: slot for slot in self.slots if slot.probe is not None}
        came = ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else ()
        dead = [asked[ref] for ref in came if not self._take_answer(asked[ref], ref)]
        self._replace([slot for slot in dead if slot not in followed])
        self._part([asked[ref] for ref in came])
        waiting = [slot for slot in self.slots if not slot.available or slot not in followed]
        self._probe_interval_s = max(PROBE_INTERVAL_S, len(waiting) / PROBES_PER_S)
        for slot in waiting:
            self._probe(slot)
        self._go_where_room_is([slot for slot in waiting if slot not in followed])
        return [slot for slot in self.slots if slot.available]

    def wait_available(self, count: int, timeout_s: float, check_stop: CheckStop = do_nothing) -> list[Slot]:
        """Waits until so many slots are available, members included, at most `timeout_s`; returns those that are. Calls
        `check_stop` at least once a second: it may raise to end the wait.

        Between generations: members whose agents die are replaced.
        """
        available = self.refresh(members=True)

        def enough() -> bool:
            nonlocal available
            available = self.refresh(members=True)
            return len(available) >= count

        if len(available) < count:
            wait_until(enough, timeout_s, check_stop)
        return available

    def lose(self, *slots: Slot, avoid_nodes: Sequence[str] = (), fill: bool = True) -> None:
        """Ends the agents of these slots, whatever is left of them, and asks for new ones (without `fill`: `fill_unassigned`
        will); until that answers, a slot is pending.

        It sits in the same place; if that is on one of the machines to avoid, or its machine is gone, in one that was left and
        has a machine, or in a group of its own that avoids them. Called without machines to avoid, it may come back to one that
        it had to avoid. Other groups that were removed meanwhile (agents do that when their leases end) are asked for anew.
        """
        view = View()
        gone = {slot.place.group for slot in slots if view.is_gone(slot.place.group)}
        for slot in slots:
            self._leave(slot)
            if slot.place.group not in gone:
                self._move(slot, avoid_nodes, view)
            slot.avoid_nodes = tuple(avoid_nodes)
        if gone:
            self._hire_steward()  # the one before has left with the groups
        for group in gone:
            self._ask_anew(group)
        if fill:
            self.fill_unassigned()

    def _leave(self, slot: Slot) -> None:
        self._keeper.drop(slot.number)
        if slot.agent is not None:
            ray.kill(slot.agent)
        slot.description, slot.probe, slot.lost, slot.unassigned = None, None, True, True
        self.version += 1

    def _ask_anew(self, gone: PlacementGroup) -> None:
        """All who sat in a group that was removed are to sit in another one: none of their agents can live."""
        sat = [slot for slot in self.slots if slot.place.group == gone]
        for slot in sat:
            if not slot.unassigned:
                self._leave(slot)
        if all(slot.place.alone for slot in sat):
            self._places.groups.remove(gone)
            for slot in sat:
                slot.place = self._places.ask_for_one(slot.number, ())
        else:
            group = self._places.ask_anew(gone)
            for slot in sat:
                slot.place = dataclasses.replace(slot.place, group=group)

    def _move(self, slot: Slot, avoid_nodes: Sequence[str], view: View) -> None:
        node_id = view.node_id(slot.place)
        moving_helps = avoid_nodes or slot.avoid_nodes or self._places.unassigned
        elsewhere = node_id in avoid_nodes or (node_id is None and moving_helps)
        if elsewhere:
            slot.place = self._places.exchange(slot.place, slot.number, avoid_nodes, view)

    def fill_unassigned(self) -> None:
        """Asks for an agent on every slot that has been left without one."""
        for slot in self.slots:
            if slot.unassigned and self._places.hold(slot.place):
                self._fill(slot)

    def missing(self) -> str:
        """Why hosts are missing: what was asked for, and what the cluster has."""
        return explain_missing(self.config, living_nodes())

    def clear_avoided_nodes(self) -> bool:
        """Lets slots without an agent come back to the machines that they were to avoid. False if there are none."""
        kept_away = [slot for slot in self.slots if not slot.available and slot.avoid_nodes]
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
        self.slots, self.members = [], []

    def _end_agents(self) -> None:
        asked = [self.ask(slot, "shutdown") for slot in self.slots if slot.available]
        for ref in ray.wait(asked, num_returns=len(asked), timeout=RELEASE_TIMEOUT_S)[0] if asked else ():
            with suppress(ray.exceptions.RayActorError):  # gone before
                ray.get(ref)
        for slot in self.slots:
            self._keeper.drop(slot.number)
            if slot.agent is not None:
                ray.kill(slot.agent)

    # ------------------------------------------------------------------ taking machines

    def _hire_steward(self) -> None:
        """To be there before the first group: from then on whatever the run holds is given back, whoever dies."""
        former = self._steward
        self._steward_name, self._steward = self._maker.hire_steward()
        self._keeper.keep(STEWARD, self._steward)
        if former is not None:
            ray.kill(former)

    def take_hosts(self, timeout_s: float, check_stop: CheckStop) -> None:
        """Called once, by `gangs.reserve`. Raises GangTimeout; what was taken until then is for `release`."""
        check_stop, deadline_s = self._keeping(check_stop), time.monotonic() + timeout_s
        self._hire_steward()
        try:
            base = self._take_base(deadline_s, check_stop)
        except TimeoutError as error:
            raise self._explained(timeout_s) from error
        begin = [*base, *self._take_further(base, check_stop)]
        self._wait_for_answers(begin, max(deadline_s, time.monotonic() + AGENT_START_TIMEOUT_S), check_stop)
        self.set_members(begin)

    def _take_base(self, deadline_s: float, check_stop: CheckStop) -> list[Slot]:
        """Slots for the hosts that the run cannot do without. Raises TimeoutError."""
        return [self._add_slot(place) for place in self._places.take_base(deadline_s, self._avoid_nodes, check_stop)]

    def _take_further(self, base: Sequence[Slot], check_stop: CheckStop) -> list[Slot]:
        """Adds slots for more hosts and for spares; returns those of which the gang may begin with."""
        further = num_hosts(self.config) - len(base)
        nodes = placement_groups.node_ids(base[0].place.group).values() if self._spread() else ()
        avoid = [*self._avoid_nodes, *nodes]
        optional = [self._add_slot(self._places.ask_for_one(len(self.slots), avoid)) for _ in range(further + self.config.spares)]
        return self._placed(optional, further, check_stop)

    def _keeping(self, check_stop: CheckStop) -> CheckStop:
        """For a wait in which nobody calls `refresh`."""

        def attend_and_keep() -> None:
            self._keeper.heard()
            check_stop()

        return attend_and_keep

    def _placed(self, slots: Sequence[Slot], count: int, check_stop: CheckStop) -> list[Slot]:
        """At most `count` of these slots for which Ray finds room while the start waits for them."""

        def found() -> list[Slot]:
            return [slot for slot in slots if placement_groups.is_created(slot.place.group)]

        if count:
            wait_until(lambda: len(found()) >= count, self.config.wait_for_max_s, check_stop)
        return found()[:count]

    def _explained(self, timeout_s: float) -> GangTimeout:
        why = explain_missing(self.config, living_nodes(), self._avoid_nodes)
        return GangTimeout(f"the hosts of run {self.run_name!r} could not be had within {timeout_s:g} s: {why}")

    # ------------------------------------------------------------------ agents

    def _add_slot(self, place: Bundle) -> Slot:
        slot = Slot(len(self.slots), place, "", None)
        self._fill(slot)
        self.slots.append(slot)
        return slot

    def _fill(self, slot: Slot) -> None:
        slot.name, slot.agent = self._maker.create(slot.place, slot.number)
        slot.unassigned = False
        self.version += 1
        self._ask_for_life(slot)
        if self._preparation is not None:
            self.ask(slot, "prepare", self._preparation)

    def _wait_for_answers(self, slots: Sequence[Slot], deadline_s: float, check_stop: CheckStop) -> None:
        """Raises GangTimeout if an agent has died, or does not answer in time."""
        while missing := {slot.probe: slot for slot in slots if not slot.available}:
            for ref in wait_answers(list(missing), min(deadline_s, time.monotonic() + FAILURE_LOOK_S), check_stop):
                slot = missing[ref]
                if not self._take_answer(slot, ref):
                    raise GangTimeout(f"an agent of run {self.run_name!r} did not start: {slot.trouble}")
                if slot.probe is None and not slot.available:
                    self._ask_for_life(slot)
            if time.monotonic() >= deadline_s and (silent := [slot.number for slot in slots if not slot.available]):
                raise GangTimeout(f"agents of run {self.run_name!r} did not start: those of the slots {silent} do not answer")

    def _ask_for_life(self, slot: Slot) -> None:
        slot.probe, slot.next_probe_s = self.ask(slot, "describe"), time.monotonic() + self._probe_interval_s

    def _probe(self, slot: Slot) -> None:
        now_s = time.monotonic()
        if slot.unassigned:
            return
        if slot.probe is None and now_s >= slot.next_probe_s:
            self._ask_for_life(slot)
        elif slot.available and now_s > slot.next_probe_s + PROBE_TIMEOUT_S:
            slot.description = None  # it will be available again if it ever answers

    def _take_answer(self, slot: Slot, ref: Any) -> bool:
        """False if the agent is dead."""
        slot.probe = None
        try:
            slot.description = ray.get(ref)
        except ray.exceptions.ActorUnavailableError:  # alive, and cut off just now: asked again
            slot.description = None
            return True
        except GONE_ERRORS as error:
            slot.description, slot.trouble = None, str(error)
            return False
        self._keeper.keep(slot.number, slot.agent)
        return True

    def _replace(self, dead: Sequence[Slot]) -> None:
        """New agents for those that have died: at once, but not all the time, should none live there."""
        now_s = time.monotonic()
        due = [slot for slot in dead if now_s >= slot.next_replacement_s]
        for slot in due:
            slot.next_replacement_s = now_s + REPLACEMENT_INTERVAL_S
        if due:
            self.lose(*due)

    def _part(self, answered: Sequence[Slot]) -> None:
        """Of hosts that must not share a machine, one that has just come to the machine of another goes elsewhere."""
        alone = [slot for slot in answered if slot.available and slot.place.alone] if self._spread() else []
        taken = Counter(slot.node_id or "" for slot in self.slots if slot.available) if alone else Counter()
        for slot in alone:
            if taken[slot.node_id or ""] > 1:
                taken[slot.node_id or ""] -= 1
                self.lose(slot, avoid_nodes=list(taken))

    def _go_where_room_is(self, slots: Sequence[Slot]) -> None:
        """The groups of a run compete for a machine that comes: a place that was left may have got the one a slot waits for."""
        now_s = time.monotonic()
        due = [slot for slot in slots if not slot.unassigned and not slot.available and now_s >= slot.next_search_s]
        if not due or not self._places.unassigned:
            return
        view, taken = View(), {slot.node_id for slot in self.slots if slot.node_id is not None} if self._spread() else set()
        for slot in due:
            slot.next_search_s = now_s + PROBE_INTERVAL_S
            avoid = {*slot.avoid_nodes, *taken}
            if view.node_id(slot.place) is None and self._places.unassigned_elsewhere(avoid, view) is not None:
                self.lose(slot, avoid_nodes=tuple(avoid))

    def _spread(self) -> bool:
        return strategy(self.config) == "STRICT_SPREAD"

    # ------------------------------------------------------------------ adopting

    def take_over(self, record: Mapping[str, Any], check_stop: CheckStop) -> None:
        """Called once, by `gangs.adopt`. Raises AdoptError, StaleDriver, and what `check_stop` raises."""
        try:
            self._adopt(record, check_stop)
        except BaseException:
            self._keeper.stop()
            raise

    def _adopt(self, record: Mapping[str, Any], check_stop: CheckStop) -> None:
        if record["hosts"] != dataclasses.asdict(self.config):
            raise AdoptError("the configuration of the hosts is another one now")
        self._places.recall(record)
        self._hire_steward()
        living = placement_groups.living()
        dead = []
        for about in record["slots"]:
            slot = Slot(about["number"], bundle_of(about), about["name"], None, avoid_nodes=tuple(about["avoid_nodes"]))
            self.slots.append(slot)
            slot.agent = find_agent(slot.name) if slot.name else None
            if slot.agent is None:
                dead.append(slot)
            else:
                slot.probe, slot.next_probe_s = slot.agent.lead.remote(self.driver_term), time.monotonic() + PROBE_INTERVAL_S
        by_number = {slot.number: slot for slot in self.slots}
        self._find_generation([by_number[number] for number in record["members"]], check_stop)
        names = {info["name"] for key, info in living.items() if key in record["groups"]}
        clear(self.run_name, keep={*names, self._steward_name, *(slot.name for slot in self.slots)}, check_stop=check_stop)
        self._fill_slot_anew(dead, living)

    def _fill_slot_anew(self, dead: Sequence[Slot], living: Mapping[str, Any]) -> None:
        """Asks for agents on these slots; the groups of some may not be among the living ones."""
        for slot in dead:
            if slot.place.group.id.hex() not in living:
                slot.place = self._places.ask_for_one(slot.number, self._avoid_nodes)
            self._fill(slot)

    def _find_generation(self, recorded: Sequence[Slot], check_stop: CheckStop) -> None:
        """Takes those as members who have the orders of the newest generation, whether or not they were recorded as such."""
        for asked in (recorded, self.slots):  # a spare whose machine has not come yet would never answer
            probes = [slot.probe for slot in asked if slot.probe is not None]
            wait_answers(probes, time.monotonic() + ADOPT_TIMEOUT_S, check_stop)
            for slot in self.slots:
                self._take_lead(slot)
            by_number = {slot.number: slot for slot in self.slots}
            leads = {slot.number: slot.description for slot in self.slots if slot.description is not None}
            try:
                self.members = [by_number[number] for number in newest_generation(leads)]
                break
            except AdoptError:
                if asked is self.slots:
                    raise
        self.leads = [leads[slot.number] for slot in self.members]

    def _take_lead(self, slot: Slot) -> None:
        if slot.probe is not None and ray.wait([slot.probe], timeout=0)[0]:
            self._take_answer(slot, slot.probe)
