"""Which hosts failed so often that they are better avoided: a pure function of the failures so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.failures import FailureKind
from orchestrator.restart import PastFailure
from trainers.checks import Section, require

HOSTS_FAULT = frozenset({FailureKind.PROCESS_CRASH, FailureKind.HOST_LOST, FailureKind.HANG})
"""Kinds that speak against the host; a program's own errors, a lost coordinator or a preemption would befall any host."""


@dataclass(frozen=True, kw_only=True)
class QuarantinePolicy(Section):
    max_failures_per_host: int = 3
    """Failures of one host (or machine) within `window_s` that are put up with; with one more it is avoided, if there are
    others."""
    window_s: float = 3600.0

    def __post_init__(self):
        require(self.max_failures_per_host >= 1, f"max_failures_per_host = {self.max_failures_per_host}: expected at least 1")
        require(self.window_s > 0, f"window_s = {self.window_s}: expected more than 0 (seconds)")


@dataclass(frozen=True)
class Quarantine:
    """What to avoid, each with the reason as a sentence."""

    seats: dict[int, str] = field(default_factory=dict)
    """By seat number: those on machines to avoid, and those that failed where they are."""
    nodes: dict[str, str] = field(default_factory=dict)
    """Machines, by node id."""


def quarantined(
    history: Sequence[PastFailure], now_s: float, policy: QuarantinePolicy, places: Mapping[int, str | None]
) -> Quarantine:
    """What to avoid at `now_s`. `places`: every seat that there is, with its node (None: not known yet).

    Never all of the seats: those with the fewest failures are left. Where one machine has all the seats, it is no more at fault
    than they are, and they are judged one by one. What a seat did on another machine than its present one does not count.
    """
    recent = [
        past for past in history if past.kind in HOSTS_FAULT and past.at_s is not None and now_s - past.at_s <= policy.window_s
    ]
    most = policy.max_failures_per_host
    of_node = Counter(past.node_id for past in recent if past.node_id is not None)
    of_seat = Counter(past.seat for past in recent if past.seat is not None and past.node_id in (None, places.get(past.seat)))
    known = {node for node in places.values() if node is not None}
    nodes = {node: n for node, n in of_node.items() if n > most and known - {node}}
    seats = {seat: n for seat in places if (n := of_seat[seat]) > most}
    seats |= {seat: nodes[node] for seat, node in places.items() if node in nodes}
    if set(seats) == set(places):
        fewest = min(seats.values(), default=0)
        seats = {seat: n for seat, n in seats.items() if n > fewest}
        spared = {places[seat] for seat in places if seat not in seats}
        nodes = {node: n for node, n in nodes.items() if node not in spared}
    bad_nodes = {node: f"node {node[:12]} has failed {_often(n, policy)}" for node, n in sorted(nodes.items())}
    reasons = {seat: bad_nodes.get(places[seat] or "", f"it has failed {_often(n, policy)}") for seat, n in sorted(seats.items())}
    return Quarantine({seat: f"seat {seat} is avoided: {reason}" for seat, reason in reasons.items()}, bad_nodes)


def _often(times: int, policy: QuarantinePolicy) -> str:
    return f"{times} times in {policy.window_s:g} s"
