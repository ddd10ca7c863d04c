"""The numbered events (`n`) of a generation. A reader asks for all events from a number on."""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Mapping
from typing import Any

from gangway.wire.answers import Told
from gangway.wire.events import AnyEvent

FIRST = ("joined", "first_step", "overdue", "exception")
"""Kinds of which the first event is the fact."""
NEWEST = ("restored", "saving", "saved", "save_failed", "done", "exit")
"""Kinds of which the newest event is the fact."""

MAX_PHASES = 32
"""Of how many phases the first event is kept. A start has a handful; a process may report any names."""


class Facts:
    """What an agent knows of the newest generation on its host, whatever its log of events has dropped: the phase, the first
    step, the last save, the end. A driver that takes over a gang after days learns from this how far it is.

    A *fact* is the event that says it. Of each kind there is a fixed number, so facts need no limit, and none is ever dropped.
    Not thread-safe."""

    def __init__(self) -> None:
        self._facts: dict[Hashable, AnyEvent] = {}
        self._phases: dict[Hashable, AnyEvent] = {}
        """The event with which each phase was entered first."""

    def observe(self, event: AnyEvent) -> None:
        """Takes an event with its number `n`."""
        kind = event.get("ev")
        if kind in FIRST:
            self._facts.setdefault(kind, event)
        elif kind in NEWEST:
            self._facts[kind] = event
        elif kind == "phase":
            # When each was entered first, for the phases of a recovery; and the one that it is in.
            if len(self._phases) < MAX_PHASES or event.get("phase") in self._phases:
                self._phases.setdefault(event.get("phase"), event)
            self._facts[kind] = event
        elif kind == "notice":
            self._facts.setdefault((kind, bool(event.get("node"))), event)
        elif kind == "anomaly" and _went_back(event):
            self._facts[kind] = event

    def in_order(self) -> list[AnyEvent]:
        """Returns the facts in the order in which they came."""
        facts = (*self._facts.values(), *self._phases.values())
        # By number: one event may be two facts.
        return [event for _, event in sorted({event["n"]: event for event in facts}.items())]


def _went_back(event: Mapping[str, object]) -> bool:
    return event.get("restored_step") is not None


DROPPED_FIRST = ("evaluating", "printed"), ("note", "metrics", "preview", "profile")
"""Kinds that come again and again, in the order in which they are dropped when the log is full."""


class EventLog:
    """Keeps at most `capacity` events. The oldest of DROPPED_FIRST are dropped first, then the oldest of the other kinds. What
    the dropped ones said of the process is in `Facts`."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.first = self.next = 0
        """Numbers of the generation's first event and of the next event. Numbers are never used again in a later generation."""
        self._events: list[AnyEvent] = []
        self._facts = Facts()

    def append(self, event: Mapping[str, Any]) -> None:
        numbered = {**event, "n": self.next}
        self._events.append(numbered)
        self._facts.observe(numbered)
        self.next += 1
        if len(self._events) > self.capacity:
            self._make_room()

    def since(self, number: int) -> list[AnyEvent]:
        """Returns the kept events from this number on. Their `n` may have gaps where events were dropped."""
        return self._events[bisect.bisect_left(self._events, number, key=_number) :]

    def answer(self, number: int) -> Told:
        """Returns the `events` from this number on, and the `cursor` for the next question. If some of them were dropped: how
        many (`missed`), and the `facts` of the generation, of which some may be among the events too."""
        events = self.since(number)
        answer: Told = {"cursor": self.next, "events": events}
        missed = self.next - max(number, self.first) - len(events)
        return {**answer, "missed": missed, "facts": self._facts.in_order()} if missed > 0 else answer

    def clear(self) -> None:
        """Forgets everything: a new generation begins."""
        self.first, self._events, self._facts = self.next, [], Facts()

    def _make_room(self) -> None:
        # A quarter of the capacity is freed at once: each call looks at all events.
        excess = len(self._events) - self.capacity * 3 // 4
        ranked = sorted(self._events, key=_rank)  # stable: the oldest of each rank come first
        dropped = {event["n"] for event in ranked[:excess]}
        self._events = [event for event in self._events if event["n"] not in dropped]


def _rank(event: AnyEvent) -> int:
    kind = event.get("ev")
    return next((rank for rank, kinds in enumerate(DROPPED_FIRST) if kind in kinds), len(DROPPED_FIRST))


def _number(event: AnyEvent) -> int:
    return event["n"]
