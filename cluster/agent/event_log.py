"""The numbered events (`n`) of a generation. A reader asks for all events from a number on."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

from cluster.agent.facts import Facts
from gangway.wire.answers import Told
from gangway.wire.events import AnyEvent

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
