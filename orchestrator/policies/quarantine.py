"""Quarantine: decides which slots and machines failed so often that they are avoided. A pure function of the past failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gangway.config.section import Section, require
from orchestrator.failures.classify import MACHINE, FailureKind
from orchestrator.failures.history import PastFailure

HOSTS_FAULT = MACHINE
"""Kinds that count against the host. Errors of the program, a lost coordinator or a preemption could happen on any host."""


@dataclass(frozen=True, kw_only=True)
class QuarantinePolicy(Section):
    max_failures_per_host: int = 3
    """How many failures within `window_s` one slot (or machine) may have. With one more it is avoided, if there are others."""
    max_device_errors_per_host: int = 0
    """The same for errors of its devices: by default a spare replaces the host at the first one. (For errors of the runtime that
    do not say why, the limit is one higher.)"""
    window_s: float = 3600.0
    """Failures that are older do not count."""

    def __post_init__(self):
        require(self.max_failures_per_host >= 1, f"max_failures_per_host = {self.max_failures_per_host}: expected at least 1")
        least = self.max_device_errors_per_host
        require(least >= 0, f"max_device_errors_per_host = {least}: expected 0 or more")
        require(self.window_s > 0, f"window_s = {self.window_s}: expected more than 0 (seconds)")


Kinds = Counter[FailureKind]
"""How often a slot or a machine has failed, by kind."""
Key = TypeVar("Key", int, str)
"""A slot number or a node id."""


@dataclass(frozen=True)
class Quarantine:
    """The slots and machines to avoid, each with the reason as a sentence."""

    slots: dict[int, str] = field(default_factory=dict)
    """Slots by number: those on machines to avoid, and those that failed too often themselves."""
    nodes: dict[str, str] = field(default_factory=dict)
    """Machines, by node id."""


def quarantined(
    history: Sequence[PastFailure], now_s: float, policy: QuarantinePolicy, node_of_slot: Mapping[int, str | None]
) -> Quarantine:
    """Returns what to avoid at `now_s`. `node_of_slot`: every slot, with its node (None: not known yet).

    All slots are never avoided: those with the fewest failures are left. If one machine has all the slots, the slots are judged
    and not the machine. A failure of a slot counts only on the machine that the slot is on now.
    """
    recent = [past for past in history if _counts(past, now_s, policy)]
    by_node = _by_key((past.node_id, past.kind) for past in recent if past.node_id is not None)
    by_slot = _by_key((past.slot, past.kind) for past in recent if past.slot is not None and _happened_here(past, node_of_slot))
    nodes = {node: kinds for node, kinds in by_node.items() if _too_often(kinds, policy) and _is_other_node(node, node_of_slot)}
    slots: dict[int, Kinds] = {}
    for slot, node in node_of_slot.items():
        if node in nodes:
            slots[slot] = nodes[node]
        elif slot in by_slot and _too_often(by_slot[slot], policy):
            slots[slot] = by_slot[slot]
    if len(slots) == len(node_of_slot):
        slots, nodes = _without_the_best(slots, nodes, node_of_slot)
    return _with_reasons(slots, nodes, node_of_slot, policy)


def _counts(past: PastFailure, now_s: float, policy: QuarantinePolicy) -> bool:
    """Whether a failure counts against its host: it is the host's fault, and recent."""
    return past.kind in HOSTS_FAULT and past.at_s is not None and now_s - past.at_s <= policy.window_s


def _happened_here(past: PastFailure, node_of_slot: Mapping[int, str | None]) -> bool:
    """Whether the slot is still on the machine on which it failed, as far as that is known."""
    return past.slot is not None and past.node_id in (None, node_of_slot.get(past.slot))


def _is_other_node(node: str, node_of_slot: Mapping[int, str | None]) -> bool:
    """Whether some slot is on another machine than this one."""
    return any(other is not None and other != node for other in node_of_slot.values())


def _without_the_best(
    slots: Mapping[int, Kinds], nodes: Mapping[str, Kinds], node_of_slot: Mapping[int, str | None]
) -> tuple[dict[int, Kinds], dict[str, Kinds]]:
    """Removes the slots with the fewest failures, and their machines, from what is to be avoided."""
    fewest = min((kinds.total() for kinds in slots.values()), default=0)
    avoided = {slot: kinds for slot, kinds in slots.items() if kinds.total() > fewest}
    usable_nodes = {node for slot, node in node_of_slot.items() if slot not in avoided}
    return avoided, {node: kinds for node, kinds in nodes.items() if node not in usable_nodes}


def _with_reasons(
    slots: Mapping[int, Kinds], nodes: Mapping[str, Kinds], node_of_slot: Mapping[int, str | None], policy: QuarantinePolicy
) -> Quarantine:
    quarantine = Quarantine()
    for node, kinds in sorted(nodes.items()):
        quarantine.nodes[node] = f"node {node[:12]} {_history(kinds, policy)}"
    for slot, kinds in sorted(slots.items()):
        reason = quarantine.nodes.get(node_of_slot[slot] or "", f"it {_history(kinds, policy)}")
        quarantine.slots[slot] = f"slot {slot} is avoided: {reason}"
    return quarantine


def _by_key(failures: Iterable[tuple[Key, FailureKind]]) -> dict[Key, Kinds]:
    """Counts the failures of each slot, or of each machine, by kind."""
    counts: dict[Key, Kinds] = {}
    for key, kind in failures:
        counts.setdefault(key, Counter())[kind] += 1
    return counts


def _too_often(kinds: Kinds, policy: QuarantinePolicy) -> bool:
    most = policy.max_device_errors_per_host
    return (
        kinds.total() > policy.max_failures_per_host
        or kinds[FailureKind.DEVICE_ERROR] > most
        or kinds[FailureKind.RUNTIME_ERROR] > most + 1
    )


def _history(kinds: Kinds, policy: QuarantinePolicy) -> str:
    if kinds.total() > policy.max_failures_per_host:
        return f"has failed {kinds.total()} times in {policy.window_s:g} s"
    parts = []
    for kind, name in ((FailureKind.DEVICE_ERROR, "device error"), (FailureKind.RUNTIME_ERROR, "runtime error")):
        if count := kinds[kind]:
            parts.append(f"{count} {name}{'' if count == 1 else 's'}")
    return f"had {' and '.join(parts)} in {policy.window_s:g} s"
