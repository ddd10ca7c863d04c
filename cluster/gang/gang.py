"""The gang: one host agent on each machine of a run.

Each host occupies a slot. The `min_hosts` hosts share one placement group: Ray reserves all of them or none. Each further slot,
for a host that may come later or for a spare, has a separate group, so that a missing machine delays nothing. TPU hosts occupy
whole slices (`slice_gang.py`). Agents and groups outlive their driver: the next driver adopts them or removes them, or the
agents end by themselves when their leases run out.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import ray
from ray.util.placement_group import PlacementGroup

from cluster.agent import preemption
from cluster.agent.driver_lease import StaleDriver
from cluster.gang.adoption import AdoptError, newest_generation
from cluster.gang.calls import Mailbox, unheard
from cluster.gang.lease_keeper import LeaseKeeper
from cluster.gang.probes import AgentDied, Probes
from cluster.gang.slots import AgentMaker, Slot
from cluster.hosts.capacity import explain_missing
from cluster.hosts.config import HostsConfig, devices_per_host, num_hosts, spreads
from cluster.hosts.process_env import compile_cache_dir
from cluster.placement import placement_groups
from cluster.placement.bundles import Bundle, Bundles, View, bundle_of, living_nodes
from cluster.placement.cleanup import clear, find_agent
from gangway.waits import Beside, CheckStop, do_nothing, wait_until
from gangway.wire.answers import TakenOver
from gangway.wire.orders import MachineOrders

AGENT_START_TIMEOUT_S = 60.0
"""How long an agent may take to answer once its bundle is reserved."""
ADOPT_TIMEOUT_S = 10.0
"""How long the agents of a gang that is to be adopted may take to answer."""
REPLACEMENT_INTERVAL_S = 2.0
"""How often an agent that has died is replaced."""
SEARCH_INTERVAL_S = 2.0
"""How often another bundle is looked for, for a slot whose bundle has no machine."""
RELEASE_TIMEOUT_S = 5.0
STEWARD = -1
"""The number of the steward among the slots whose leases are renewed."""


class GangTimeout(Exception):
    """The machines of the gang were not available in time; the message says what is missing."""


class Gang:
    """The slots of a run and their agents. Made by `reserve` or `adopt`. Not thread-safe.

    A background thread renews the leases of all agents until `release`. It stops earlier if the driver, which calls `refresh`
    about once a second, gives no sign of life for very long.
    """

    def __init__(self, maker: AgentMaker, avoid_nodes: Sequence[str] = ()):
        self.config, self.run_name, self.driver_term = maker.config, maker.run_name, maker.driver_term
        self.slots: list[Slot] = []
        self.members: list[Slot] = []
        """In host order: `members[i]` is JAX's process i."""
        self.leads: list[TakenOver] = []
        """After `adopt`: the answer of each member's agent to `HostAgent.take_over`."""
        self._maker, self._avoid_nodes = maker, tuple(avoid_nodes)
        self._bundles = Bundles(self.config, self.run_name, self.driver_term)
        self._preparation: dict[str, Any] | None = None
        self.version = 0
        """Increases with each change of `record()`."""
        self._keeper = LeaseKeeper(maker.lease_s, maker.keep)
        weakref.finalize(self, self._keeper.stop)  # without this, a gang that was dropped unreleased would never end
        self._steward_name, self._steward = "", None
        self._draining: Beside[dict[str, float | None]] = Beside(preemption.draining_nodes, {})
        self._probes = Probes(lambda slot: self.ask(slot, "describe"), lambda slot: self._keeper.keep(slot.number, slot.agent))

    @property
    def descriptions(self) -> list[Mapping[str, Any]]:
        """Each member's last answer to `HostAgent.describe`, in host order: host_ip, node_id, pid, ..."""
        return [slot.description or {} for slot in self.members]

    def orders(self, host: int) -> MachineOrders:
        """Returns the part of a host's start orders that depends on its machine."""
        config = self.config
        return {
            "local_device_ids": list(range(devices_per_host(config))) if config.kind == "gpu" else None,
            "slice": 0,
            # By rank, not by slot: a spare that replaces a host finds the compiled programs of that rank.
            "cache_dir": compile_cache_dir(config, host, self._maker.cache_dir) if config.kind == "cpu" else None,
        }

    def call(self, host: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of a member's agent in this driver's name; returns Ray's reference to the answer."""
        return self.ask(self.members[host], method, *args, **kwargs)

    def tell(self, host: int, method: str, *args: Any) -> None:
        """The same; nobody waits for the answer."""
        unheard(self.call(host, method, *args))

    def ask(self, slot: Slot, method: str, *args: Any, **kwargs: Any) -> Any:
        """The same for any slot."""
        return getattr(slot.agent, method).remote(*args, driver_term=self.driver_term, **kwargs)

    def mailbox(self) -> Mailbox:
        """Where answers to `call` and `ask` arrive for whoever expects them there."""
        return Mailbox()

    def draining_nodes(self) -> dict[str, float | None]:
        """The machines that Ray must empty, by node id, and the seconds that are left (None: nobody says), as of the last answer.
        Never waits: a head that is gone gives no answer for a minute."""
        return self._draining.look()

    def cluster_address(self) -> str:
        """Of the Ray cluster that the gang is in."""
        return ray.get_runtime_context().gcs_address

    def prepare(self, preparation: dict[str, Any]) -> None:
        """Starts the standbys of all agents, including agents that come later. Waits for none.

        A `start` that follows at once waits for the first preparation, but may still take a standby of an earlier one.
        """
        self._preparation = preparation
        for slot in self.slots:
            if not slot.unassigned:
                unheard(self.ask(slot, "prepare", preparation))

    def record(self) -> dict[str, Any]:
        """Returns what another driver needs to adopt this gang, JSON-able. `version` tells whether it has changed."""
        return {
            "run_name": self.run_name,
            "hosts": dataclasses.asdict(self.config),
            "slots": [slot.record() for slot in self.slots],
            "members": [slot.number for slot in self.members],
            **self._bundles.record(),
        }

    # ------------------------------------------------------------------ members and slots

    def set_members(self, slots: Iterable[Slot]) -> None:
        """Makes these slots the gang, in this order. Raises ValueError if one is not available, or occurs twice."""
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
        """Returns the slots that are available now. Never waits.

        A slot whose agent has died gets a new one. Members are not asked, since the driver polls them, unless they were lost.
        With `members`, as between generations, they are asked and replaced too. Raises StaleDriver if the agents have a newer
        driver.
        """
        # First: it raises StaleDriver before anything of a newer driver is touched.
        self._keeper.driver_alive()
        polled = set() if members else {slot for slot in self.members if not slot.lost}
        answered, dead_slots = self._probes.take_answers(self.slots)
        # Only the driver decides about a member that it polls: an agent replaced here would hide its failure.
        self._replace([slot for slot in dead_slots if slot not in polled])
        self._separate(answered)
        waiting = [slot for slot in self.slots if not slot.available or slot not in polled]
        self._probes.slow_down_for(len(waiting))
        for slot in waiting:
            self._probes.probe(slot)
        self._move_to_free_bundles([slot for slot in waiting if slot not in polled])
        return [slot for slot in self.slots if slot.available]

    def wait_available(self, count: int, timeout_s: float, check_stop: CheckStop = do_nothing) -> list[Slot]:
        """Waits until `count` slots are available, members included, at most `timeout_s`; returns the available ones.

        To be called between generations: members whose agents die are replaced. `check_stop` is called at least once a second and
        may raise to end the wait.
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
        """Kills the agents of these slots, and asks for new ones (without `fill`: `fill_unassigned` does that later). A slot is
        pending until its new agent answers.

        The slot keeps its bundle unless that is on a machine to avoid, or its machine is gone. Then it gets an unassigned bundle
        that has a machine, or a new group that avoids these machines. Without `avoid_nodes`, it may return to a machine that it
        had to avoid before. Groups that were removed meanwhile (by agents whose leases ended) are asked for again,
        those of spares too: their agents are dead, whether or not they have been asked since.
        """
        view = View()
        spares = set(self.slots) - set(self.members)
        gone = {slot.bundle.group for slot in {*slots, *spares} if view.is_gone(slot.bundle.group)}
        for slot in slots:
            self._end_agent(slot)
            if slot.bundle.group not in gone:
                self._move(slot, avoid_nodes, view)
            slot.avoid_nodes = tuple(avoid_nodes)
        if gone:
            self._hire_steward()  # the old one ended when the groups were removed
        for group in gone:
            self._ask_again_for(group)
        if fill:
            self.fill_unassigned()

    def _end_agent(self, slot: Slot) -> None:
        """Kills the slot's agent, if it has one, and marks the slot as lost and unassigned."""
        # First: the lease of an agent that is to go must not be renewed.
        self._keeper.drop(slot.number)
        if slot.agent is not None:
            ray.kill(slot.agent)
        slot.description, slot.probe, slot.lost, slot.unassigned = None, None, True, True
        self.version += 1

    def _ask_again_for(self, gone: PlacementGroup) -> None:
        """Asks for a new group for the slots of a group that was removed: Ray has killed all their agents."""
        affected = [slot for slot in self.slots if slot.bundle.group == gone]
        for slot in affected:
            if not slot.unassigned:
                self._end_agent(slot)
        if all(slot.bundle.alone for slot in affected):
            self._bundles.groups.remove(gone)
            for slot in affected:
                slot.bundle = self._bundles.ask_for_bundle(slot.number, ())
        else:
            group = self._bundles.ask_anew(gone)
            for slot in affected:
                slot.bundle = dataclasses.replace(slot.bundle, group=group)

    def _move(self, slot: Slot, avoid_nodes: Sequence[str], view: View) -> None:
        node_id = view.node_id(slot.bundle)
        # Without any of these, a new bundle would only wait for the same machine again.
        moving_helps = avoid_nodes or slot.avoid_nodes or self._bundles.unassigned
        if node_id in avoid_nodes or (node_id is None and moving_helps):
            slot.bundle = self._bundles.exchange(slot.bundle, slot.number, avoid_nodes, view)

    def fill_unassigned(self) -> None:
        """Asks for an agent on every slot that is unassigned and has a bundle."""
        for slot in self.slots:
            if slot.unassigned and self._bundles.hold(slot.bundle):
                self._fill(slot)

    def missing(self) -> str:
        """Explains why hosts are missing: what was asked for, and what the cluster has."""
        return explain_missing(self.config, living_nodes())

    def clear_avoided_nodes(self) -> bool:
        """Lets slots without an agent return to the machines that they had to avoid. Returns False if there are no such slots."""
        restricted = [slot for slot in self.slots if not slot.available and slot.avoid_nodes]
        if restricted:
            self.lose(*restricted)
        return bool(restricted)

    def release(self) -> None:
        """Ends all agents with their processes, and gives the machines back. Does nothing if the agents have a newer driver."""
        # First: if this process gets stuck below, the leases end and the agents give the machines back.
        self._keeper.stop()
        try:
            self._end_agents()
        except StaleDriver:
            self._bundles.forget()
        else:
            self._bundles.give_all_back()
            # After the groups: if this process dies before, the steward removes the rest.
            if self._steward is not None:
                ray.kill(self._steward)
        self.slots, self.members = [], []

    def _end_agents(self) -> None:
        # `shutdown` first: it copies the last logs, and raises StaleDriver before anything of a newer driver is killed.
        calls = [self.ask(slot, "shutdown") for slot in self.slots if slot.available]
        # Bounded: an agent that does not answer loses its machine with its group in any case.
        for ref in ray.wait(calls, num_returns=len(calls), timeout=RELEASE_TIMEOUT_S)[0] if calls else ():
            with suppress(ray.exceptions.RayActorError):  # gone before
                ray.get(ref)
        for slot in self.slots:
            self._keeper.drop(slot.number)
            if slot.agent is not None:
                ray.kill(slot.agent)

    # ------------------------------------------------------------------ taking machines

    def _hire_steward(self) -> None:
        """Starts a steward, before the first group: from then on the groups are given back, whichever process dies."""
        former = self._steward
        self._steward_name, self._steward = self._maker.hire_steward()
        self._keeper.keep(STEWARD, self._steward)
        # Only now: between two stewards there must be no moment without one.
        if former is not None:
            ray.kill(former)

    def take_hosts(self, timeout_s: float, check_stop: CheckStop) -> None:
        """Reserves the machines and starts the agents. `acquire.reserve` calls it once. After GangTimeout, call `release`."""
        check_stop, deadline_s = self._keeper.with_sign_of_life(check_stop), time.monotonic() + timeout_s
        self._hire_steward()
        try:
            base = self._take_base(deadline_s, check_stop)
        except TimeoutError as error:
            why = explain_missing(self.config, living_nodes(), self._avoid_nodes)
            raise GangTimeout(f"the hosts of run {self.run_name!r} could not be had within {timeout_s:g} s: {why}") from error
        members = [*base, *self._take_further(base, check_stop)]
        # The timeout is for machines: agents on the machine that came last still get their whole time to start.
        deadline_s = max(deadline_s, time.monotonic() + AGENT_START_TIMEOUT_S)
        try:
            silent = self._probes.wait_for_all(members, deadline_s, check_stop)
        except AgentDied as error:
            raise GangTimeout(f"an agent of run {self.run_name!r} did not start: {error}") from error
        if silent:
            raise GangTimeout(f"agents of run {self.run_name!r} did not start: those of the slots {silent} do not answer")
        self.set_members(members)

    def _take_base(self, deadline_s: float, check_stop: CheckStop) -> list[Slot]:
        """Returns slots for the `min_hosts` hosts. Raises TimeoutError."""
        return [self._add_slot(bundle) for bundle in self._bundles.take_base(deadline_s, self._avoid_nodes, check_stop)]

    def _take_further(self, base: Sequence[Slot], check_stop: CheckStop) -> list[Slot]:
        """Adds slots for more hosts and for spares; returns those with which the gang may begin."""
        further = num_hosts(self.config) - len(base)
        # Machines of the base are avoided here, since each of these groups is separate: STRICT_SPREAD holds within a group only.
        nodes = placement_groups.node_ids(base[0].bundle.group).values() if spreads(self.config) else ()
        avoid = [*self._avoid_nodes, *nodes]
        count = further + self.config.spares
        optional = [self._add_slot(self._bundles.ask_for_bundle(len(self.slots), avoid)) for _ in range(count)]
        return placed(optional, further, self.config, check_stop)

    # ------------------------------------------------------------------ agents

    def _add_slot(self, bundle: Bundle) -> Slot:
        slot = Slot(len(self.slots), bundle, "", None)
        self._fill(slot)
        self.slots.append(slot)
        return slot

    def _fill(self, slot: Slot) -> None:
        slot.name, slot.agent = self._maker.create(slot.bundle, slot.number)
        slot.unassigned = False
        self.version += 1
        self._probes.send(slot)
        if self._preparation is not None:
            unheard(self.ask(slot, "prepare", self._preparation))

    def _replace(self, dead_slots: Sequence[Slot]) -> None:
        """Asks for new agents for these slots: at once, but not too often, since agents may keep dying there."""
        now_s = time.monotonic()
        due = [slot for slot in dead_slots if now_s >= slot.next_replacement_s]
        for slot in due:
            slot.next_replacement_s = now_s + REPLACEMENT_INTERVAL_S
        if due:
            self.lose(*due)

    def _separate(self, answered: Sequence[Slot]) -> None:
        """Moves slots that have just come to the machine of another slot, where hosts must not share a machine.

        Ray keeps apart only the bundles of one group, and each of these slots has a separate group.
        """
        movable = [slot for slot in answered if slot.available and slot.bundle.alone] if spreads(self.config) else []
        if not movable:
            return
        num_slots_on = Counter(slot.node_id or "" for slot in self.slots if slot.available)
        for slot in movable:
            if num_slots_on[slot.node_id or ""] > 1:
                # Only all but one of the slots on the machine move.
                num_slots_on[slot.node_id or ""] -= 1
                # Away from every machine in use: elsewhere it would only meet another slot.
                self.lose(slot, avoid_nodes=list(num_slots_on))

    def _move_to_free_bundles(self, slots: Sequence[Slot]) -> None:
        """Moves pending slots to unassigned bundles that have a machine.

        The groups of a run compete for a new machine. An unassigned bundle may have got the machine that a slot waits for.
        """
        now_s = time.monotonic()
        due = [slot for slot in slots if not slot.unassigned and not slot.available and now_s >= slot.next_search_s]
        if not due or not self._bundles.unassigned:
            return
        view = View()
        in_use = {slot.node_id for slot in self.slots if slot.node_id is not None} if spreads(self.config) else set()
        for slot in due:
            slot.next_search_s = now_s + SEARCH_INTERVAL_S
            avoid = {*slot.avoid_nodes, *in_use}
            if view.node_id(slot.bundle) is None and self._bundles.unassigned_elsewhere(avoid, view) is not None:
                self.lose(slot, avoid_nodes=tuple(avoid))

    # ------------------------------------------------------------------ adopting

    def take_over(self, record: Mapping[str, Any], check_stop: CheckStop) -> None:
        """Takes over the gang that `record` describes. `acquire.adopt` calls it once. Raises AdoptError, StaleDriver, and what
        `check_stop` raises."""
        # Else its thread would keep the agents alive for a driver that gave them up.
        try:
            self._adopt(record, check_stop)
        except BaseException:
            self._keeper.stop()
            raise

    def _adopt(self, record: Mapping[str, Any], check_stop: CheckStop) -> None:
        if (name := record.get("run_name")) != self.run_name:
            whose = f"of {name}, of which this run is a copy, or was moved" if name else "of an older version of gangway"
            raise AdoptError(f"it is the gang {whose}")
        if record["hosts"] != dataclasses.asdict(self.config):
            raise AdoptError("the configuration of the hosts is another one now")
        self._bundles.recall(record)
        self._hire_steward()
        living = placement_groups.living()
        without_agent = []
        for about in record["slots"]:
            slot = Slot(about["number"], bundle_of(about), about["name"], None, avoid_nodes=tuple(about["avoid_nodes"]))
            self.slots.append(slot)
            slot.agent = find_agent(slot.name) if slot.name else None
            if slot.agent is None:
                without_agent.append(slot)
            else:
                self._probes.sent(slot, slot.agent.take_over.remote(self.driver_term))
        by_number = {slot.number: slot for slot in self.slots}
        self._find_generation([by_number[number] for number in record["members"]], check_stop)
        names = {info["name"] for key, info in living.items() if key in record["groups"]}
        # Only now: until the generation is found, anything may belong to it. This ends the former driver's steward too.
        clear(self.run_name, keep={*names, self._steward_name, *(slot.name for slot in self.slots)}, check_stop=check_stop)
        self._refill(without_agent, living)

    def _refill(self, without_agent: Sequence[Slot], living: Mapping[str, Any]) -> None:
        """Asks for agents on these slots. Where the group of a slot is not among the living ones, it asks for a new one first."""
        for slot in without_agent:
            if slot.bundle.group.id.hex() not in living:
                slot.bundle = self._bundles.ask_for_bundle(slot.number, self._avoid_nodes)
            self._fill(slot)

    def _find_generation(self, recorded: Sequence[Slot], check_stop: CheckStop) -> None:
        """Makes the slots with the orders of the newest generation the members, whether or not they were recorded as members."""
        # First only the recorded members: a spare without a machine never answers, and waiting for it takes the whole timeout.
        for candidates in (recorded, self.slots):
            refs = [slot.probe for slot in candidates if slot.probe is not None]
            placement_groups.wait_answers(refs, time.monotonic() + ADOPT_TIMEOUT_S, check_stop)
            self._probes.take_answers(self.slots)
            by_number = {slot.number: slot for slot in self.slots}
            leads = {slot.number: slot.description for slot in self.slots if slot.description is not None}
            try:
                self.members = [by_number[number] for number in newest_generation(leads)]
                break
            except AdoptError:
                if candidates is self.slots:
                    raise
        self.leads = [cast(TakenOver, leads[slot.number]) for slot in self.members]


def placed(slots: Sequence[Slot], count: int, config: HostsConfig, check_stop: CheckStop) -> list[Slot]:
    """Returns at most `count` of these slots: those for which Ray finds room within `hosts.wait_for_max_s`."""

    def created() -> list[Slot]:
        return [slot for slot in slots if placement_groups.is_created(slot.bundle.group)]

    if count:
        wait_until(lambda: len(created()) >= count, config.wait_for_max_s, check_stop)
    return created()[:count]
