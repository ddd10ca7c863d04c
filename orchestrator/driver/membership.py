"""Membership: which slots train, which are avoided, and which spare replaces a lost host."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from cluster.gang.gang_like import AnyGang, SlotLike
from cluster.hosts.config import devices_per_host, hosts_at_a_time, min_hosts, num_hosts, slots_of_slices, slots_of_whole_slices
from gangway.waits import CheckStop, do_nothing
from orchestrator.config.job import JobConfig
from orchestrator.failures.history import PastFailure
from orchestrator.policies import elasticity
from orchestrator.policies.elasticity import Members
from orchestrator.policies.quarantine import Quarantine, quarantined
from orchestrator.run_state.incidents import Action

REPORT_INTERVAL_S = 30.0
"""How often a wait for machines reports what is missing."""


@dataclass(frozen=True)
class Change:
    """How the gang changed between two generations."""

    before: int
    after: int
    action: Action
    detail: str = ""


class NoHosts(Exception):
    """There are not enough machines to go on; the message says what is missing."""


class Membership:
    def __init__(self, config: JobConfig, gang: AnyGang, clock: Callable[[], float] = time.monotonic):
        self.config, self.gang, self.clock = config, gang, clock
        self.leaving: dict[int, str] = {}
        """Slots whose machine is about to be taken away, with the reason."""

    @property
    def size(self) -> int:
        return len(self.gang.members)

    def allowed(self, num_hosts: int | None = None) -> list[int]:
        """Returns the numbers of hosts that the configuration can train on; only `num_hosts` if given."""
        return self._allowed if num_hosts is None else [num_hosts]

    @cached_property
    def _allowed(self) -> list[int]:
        """Cached: it is asked for in every round of the poller, and never changes."""
        hosts = self.config.hosts
        return elasticity.allowed_counts(min_hosts(hosts), num_hosts(hosts), self._fits)

    def possible(self, avoid: Quarantine) -> int:
        """Returns how many hosts `form` would take now for the next generation."""
        usable = [slot for slot in self.gang.refresh() if slot.number not in self.leaving]
        members = self._members([slot.number for slot in self.gang.members], usable, set(avoid.slots), self.allowed())
        return len(members.slots) if members is not None else 0

    def idle(self) -> list[SlotLike]:
        """Returns the slots whose agents could be members and are not."""
        members = set(self.gang.members)
        return [slot for slot in self.gang.slots if slot.available and slot not in members and slot.number not in self.leaving]

    def hosts_on(self, nodes: Collection[str]) -> list[int]:
        return [host for host, slot in enumerate(self.gang.members) if slot.node_id in nodes]

    def quarantine(self, history: Sequence[PastFailure], now_s: float) -> Quarantine:
        node_of_slot = {slot.number: slot.node_id for slot in self.gang.slots}
        return quarantined(history, now_s, self.config.driver.quarantine, node_of_slot)

    def form(
        self,
        lost: Collection[int] = (),
        *,
        avoid: Quarantine,
        num_hosts: int | None = None,
        waiting: Callable[[str], None] = lambda missing: None,
        check_stop: CheckStop = do_nothing,
    ) -> Change:
        """Chooses the hosts of the next generation. `lost`: hosts whose agent is gone; `num_hosts`: the only number allowed.

        Returns as soon as an allowed number of hosts is available. Otherwise waits for machines, and reports now and then what is
        missing (`waiting`). After `hosts.replacement_timeout_s` it raises NoHosts. After the time limit of a start, machines in
        quarantine are used too. `check_stop` is called at least once a second: what it raises ends the wait.
        """
        before = list(self.gang.members)
        gone = [slot for host, slot in enumerate(before) if host in lost or slot.number in self.leaving]
        nodes = {slot.node_id for slot in gone if slot.number in self.leaving} | set(avoid.nodes)
        # After a back-off the new agent of a lost slot may be there already: it must not be killed again.
        to_lose = [slot for slot in gone if not slot.lost or slot.number in {*self.leaving, *avoid.slots}]
        if to_lose:  # not filled yet: starting an agent takes CPU from hosts on the same machine that recover now
            self.gang.lose(*to_lose, avoid_nodes=[node for node in nodes if node], fill=False)
        for slot in gone:
            # The notice was about the old machine: the slot may come back on another one.
            self.leaving.pop(slot.number, None)
        members = self._choose([slot.number for slot in before], set(avoid.slots), num_hosts, waiting, check_stop)
        by_number = {slot.number: slot for slot in self.gang.slots}
        self.gang.set_members([by_number[number] for number in members.slots])
        reasons = [reason for slot, reason in avoid.slots.items() if slot not in members.slots]
        action = _action([slot.number for slot in before], members.slots, {slot.number for slot in gone})
        return Change(len(before), len(members.slots), action, "; ".join(reasons))

    def _choose(
        self,
        present: Sequence[int],
        avoid: Collection[int],
        num_hosts: int | None,
        waiting: Callable[[str], None],
        check_stop: CheckStop,
    ) -> Members:
        allowed, hosts = self.allowed(num_hosts), self.config.hosts
        limit_s = hosts.replacement_timeout_s or math.inf
        # Half the limit at most: there must be time left in which such a machine can be taken.
        quarantine_s = min(hosts.start_timeout_s, limit_s / 2)
        began_s, waited_s = self.clock(), 0.0
        available = self.gang.refresh()
        while (members := self._members(present, available, avoid, allowed)) is None:
            # Only now: without new agents no gang is possible, so the CPU that they take delays nobody.
            self.gang.fill_unassigned()
            if waited_s >= quarantine_s:
                self.gang.clear_avoided_nodes()  # a machine that often fails is better than none
                quarantine_s = math.inf
            missing = f"{len(available)} hosts are left; {self.gang.missing()}"
            if waited_s >= limit_s:
                raise NoHosts(f"no other host came within {limit_s:g} s (hosts.replacement_timeout_s): {missing}")
            waiting(missing)
            until_s = min(waited_s + REPORT_INTERVAL_S, limit_s, quarantine_s)
            # One host more may be enough; whether it is, the loop decides.
            available = self.gang.wait_available(len(available) + 1, until_s - waited_s, check_stop)
            waited_s = self.clock() - began_s
        return members

    def _members(
        self, present: Sequence[int], available: Sequence[SlotLike], avoid: Collection[int], allowed: Sequence[int]
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
