"""Which hosts failed so often that they are better avoided: a pure function of the failures so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from orchestrator.failures.classify import FailureKind
from orchestrator.failures.history import PastFailure
from trainers.config.section import Section, require

HOSTS_FAULT = frozenset(
    {
        FailureKind.PROCESS_CRASH,
        FailureKind.HOST_LOST,
        FailureKind.HANG,
        FailureKind.DEVICE_ERROR,
        FailureKind.RUNTIME_ERROR,
    }
)
"""Kinds that speak against the host; a program's own errors, a lost coordinator or a preemption would befall any host."""


@dataclass(frozen=True, kw_only=True)
class QuarantinePolicy(Section):
    max_failures_per_host: int = 3
    """Failures of one host (or machine) within `window_s` that are put up with; with one more it is avoided, if there are
    others."""
    max_device_errors_per_host: int = 0
    """The same for errors of its devices: by default, the first is enough for a spare to take its place. (Of an error of the
    runtime that does not say why, one more is put up with.)"""
    window_s: float = 3600.0

    def __post_init__(self):
        require(self.max_failures_per_host >= 1, f"max_failures_per_host = {self.max_failures_per_host}: expected at least 1")
        least = self.max_device_errors_per_host
        require(least >= 0, f"max_device_errors_per_host = {least}: expected 0 or more")
        require(self.window_s > 0, f"window_s = {self.window_s}: expected more than 0 (seconds)")


Place = TypeVar("Place", int, str)
"""A slot or a node."""


@dataclass(frozen=True)
class Quarantine:
    """What to avoid, each with the reason as a sentence."""

    slots: dict[int, str] = field(default_factory=dict)
    """By slot number: those on machines to avoid, and those that failed where they are."""
    nodes: dict[str, str] = field(default_factory=dict)
    """Machines, by node id."""


def quarantined(
    history: Sequence[PastFailure], now_s: float, policy: QuarantinePolicy, places: Mapping[int, str | None]
) -> Quarantine:
    """What to avoid at `now_s`. `places`: every slot that there is, with its node (None: not known yet).

    Never all of the slots: those with the fewest failures are left. Where one machine has all the slots, it is no more at fault
    than they are, and they are judged one by one. What a slot did on another machine than its present one does not count.
    """
    recent = [
        past for past in history if past.kind in HOSTS_FAULT and past.at_s is not None and now_s - past.at_s <= policy.window_s
    ]
    of_node = _by((past.node_id, past.kind) for past in recent if past.node_id is not None)
    of_slot = _by(
        (past.slot, past.kind) for past in recent if past.slot is not None and past.node_id in (None, places.get(past.slot))
    )
    known = {node for node in places.values() if node is not None}
    nodes = {node: kinds for node, kinds in of_node.items() if _too_often(kinds, policy) and known - {node}}
    slots = {slot: of_slot[slot] for slot in places if slot in of_slot and _too_often(of_slot[slot], policy)}
    slots |= {slot: nodes[node] for slot, node in places.items() if node in nodes}
    if set(slots) == set(places):
        fewest = min((kinds.total() for kinds in slots.values()), default=0)
        slots = {slot: kinds for slot, kinds in slots.items() if kinds.total() > fewest}
        spared = {places[slot] for slot in places if slot not in slots}
        nodes = {node: kinds for node, kinds in nodes.items() if node not in spared}
    bad_nodes = {node: f"node {node[:12]} {_history(kinds, policy)}" for node, kinds in sorted(nodes.items())}
    reasons = {slot: bad_nodes.get(places[slot] or "", f"it {_history(kinds, policy)}") for slot, kinds in sorted(slots.items())}
    return Quarantine({slot: f"slot {slot} is avoided: {reason}" for slot, reason in reasons.items()}, bad_nodes)


def _by(failures: Iterable[tuple[Place, FailureKind]]) -> dict[Place, Counter[FailureKind]]:
    """How often each slot, or each node, has failed, by kind."""
    found: dict[Place, Counter[FailureKind]] = {}
    for place, kind in failures:
        found.setdefault(place, Counter())[kind] += 1
    return found


def _too_often(kinds: Counter[FailureKind], policy: QuarantinePolicy) -> bool:
    most = policy.max_device_errors_per_host
    return (
        kinds.total() > policy.max_failures_per_host
        or kinds[FailureKind.DEVICE_ERROR] > most
        or kinds[FailureKind.RUNTIME_ERROR] > most + 1
    )


def _history(kinds: Counter[FailureKind], policy: QuarantinePolicy) -> str:
    if kinds.total() > policy.max_failures_per_host:
        return f"has failed {kinds.total()} times in {policy.window_s:g} s"
    errors = kinds[FailureKind.DEVICE_ERROR], kinds[FailureKind.RUNTIME_ERROR]
    told = [f"{n} {what}{'' if n == 1 else 's'}" for n, what in zip(errors, ("device error", "runtime error"), strict=True) if n]
    return f"had {' and '.join(told)} in {policy.window_s:g} s"
