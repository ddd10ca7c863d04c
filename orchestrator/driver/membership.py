"""Who trains: the slots of the gang, what is known against them, and who takes whose place."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from cluster.gang.gang import Gang
from cluster.gang.slots import Slot
from cluster.hosts.config import devices_per_host, hosts_at_a_time, min_hosts, num_hosts, slots_of_slices, slots_of_whole_slices
from cluster.placement.waits import CheckStop, do_nothing
from orchestrator.config.job import JobConfig
from orchestrator.failures.history import PastFailure
from orchestrator.policies import elasticity
from orchestrator.policies.elasticity import Members
from orchestrator.policies.quarantine import Quarantine, quarantined
from orchestrator.run_state.incidents import Action

TELL_INTERVAL_S = 30.0
"""How often a wait for machines says again what is missing."""


@dataclass(frozen=True)
class Change:
    """What became of the gang between two generations."""

    before: int
    after: int
    action: Action
    detail: str = ""


class NoHosts(Exception):
    """There are not enough machines to go on; the message says what is missing."""


class Roster:
    def __init__(self, config: JobConfig, gang: Gang, clock: Callable[[], float] = time.monotonic):
        self.config, self.gang, self.clock = config, gang, clock
        self.leaving: dict[int, str] = {}
        """Slots whose machine is about to be taken away, and why."""

    @property
    def size(self) -> int:
        return len(self.gang.members)

    def allowed(self, wanted: int | None = None) -> list[int]:
        """Numbers of hosts that the configuration can train on; `wanted` alone, if given."""
        return self._allowed if wanted is None else [wanted]

    @cached_property
    def _allowed(self) -> list[int]:
        """Asked for in every round of the watch, and always the same."""
        hosts = self.config.hosts
        return elasticity.allowed_counts(min_hosts(hosts), num_hosts(hosts), self._fits)

    def possible(self, avoid: Quarantine) -> int:
        """How many hosts the next generation would have, were it put together now: no more than `form` would take."""
        could = [slot for slot in self.gang.refresh() if slot.number not in self.leaving]
        members = self._members([slot.number for slot in self.gang.members], could, set(avoid.slots), self.allowed())
        return len(members.slots) if members is not None else 0

    def idle(self) -> list[Slot]:
        """Slots whose agents could be members and are not."""
        members = set(self.gang.members)
        return [slot for slot in self.gang.slots if slot.available and slot not in members and slot.number not in self.leaving]

    def hosts_on(self, nodes: Collection[str]) -> list[int]:
        return [host for host, slot in enumerate(self.gang.members) if slot.node_id in nodes]

    def quarantine(self, history: Sequence[PastFailure], now_s: float) -> Quarantine:
        places = {slot.number: slot.node_id for slot in self.gang.slots}
        return quarantined(history, now_s, self.config.driver.quarantine, places)

    def form(
        self,
        lost: Collection[int] = (),
        *,
        avoid: Quarantine,
        wanted: int | None = None,
        waiting: Callable[[str], None] = lambda missing: None,
        check_stop: CheckStop = do_nothing,
    ) -> Change:
        """Puts the hosts of the next generation together. `lost`: hosts whose agent is gone.

        Goes on with what there is as soon as that is allowed; else waits for machines, `hosts.replacement_timeout_s` at most
        (then it raises NoHosts), and says now and then what is missing (`waiting`). If no other comes in the time that a start
        has, the quarantine is lifted. `check_stop` is called at least once a second: what it raises ends the wait.
        """
        before = list(self.gang.members)
        gone = [slot for host, slot in enumerate(before) if host in lost or slot.number in self.leaving]
        nodes = {slot.node_id for slot in gone if slot.number in self.leaving} | set(avoid.nodes)
        # Where an agent was lost long ago (the run has backed off), its successor may be there already.
        still = [slot for slot in gone if not slot.lost or slot.number in {*self.leaving, *avoid.slots}]
        if still:  # not filled yet: the start of an agent would take from the machine what those who go on need now
            self.gang.lose(*still, avoid_nodes=[node for node in nodes if node], fill=False)
        for slot in gone:
            self.leaving.pop(slot.number, None)
        members = self._choose([slot.number for slot in before], set(avoid.slots), wanted, waiting, check_stop)
        by_number = {slot.number: slot for slot in self.gang.slots}
        self.gang.set_members([by_number[number] for number in members.slots])
        told = [reason for slot, reason in avoid.slots.items() if slot not in members.slots]
        action = _action([slot.number for slot in before], members.slots, {slot.number for slot in gone})
        return Change(len(before), len(members.slots), action, "; ".join(told))

    def _choose(
        self,
        present: Sequence[int],
        avoid: Collection[int],
        wanted: int | None,
        waiting: Callable[[str], None],
        check_stop: CheckStop,
    ) -> Members:
        allowed, hosts = self.allowed(wanted), self.config.hosts
        limit_s = hosts.replacement_timeout_s or math.inf
        picky_s = min(hosts.start_timeout_s, limit_s / 2)
        began_s, waited_s = self.clock(), 0.0
        available = self.gang.refresh()
        while (members := self._members(present, available, avoid, allowed)) is None:
            self.gang.fill_unassigned()
            if waited_s >= picky_s:
                self.gang.clear_avoided_nodes()  # a machine that often fails is better than none
                picky_s = math.inf
            missing = f"{len(available)} hosts are left; {self.gang.missing()}"
            if waited_s >= limit_s:
                raise NoHosts(f"no other host came within {limit_s:g} s (hosts.replacement_timeout_s): {missing}")
            waiting(missing)
            until_s = min(waited_s + TELL_INTERVAL_S, limit_s, picky_s)
            available = self.gang.wait_available(len(available) + 1, until_s - waited_s, check_stop)
            waited_s = self.clock() - began_s
        return members

    def _members(
        self, present: Sequence[int], available: Sequence[Slot], avoid: Collection[int], allowed: Sequence[int]
    ) -> Members | None:
        hosts = self.config.hosts
        whole = slots_of_whole_slices(hosts, [slot.number for slot in available])
        return elasticity.choose_members(present, whole, allowed=allowed, avoid=slots_of_slices(hosts, avoid))

    def _fits(self, hosts: int) -> bool:
        if hosts % hosts_at_a_time(self.config.hosts):
            return False
        try:
            self.config.training.check_devices(hosts * devices_per_host(self.config.hosts))
        except ValueError:
            return False
        return True


def _action(before: Sequence[int], after: Sequence[int], gone: Collection[int]) -> Action:
    if len(after) != len(before):
        return Action.GROW if len(after) > len(before) else Action.SHRINK
    return Action.RESTART if list(before) == list(after) and not gone else Action.REPLACE
