"""The numbered events (`n`) of a generation. A reader asks for all events from a number on."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

from cluster.agent.events import Event

REPEATED_KINDS = ("metrics", "note", "printed")
"""Kinds that come again and again. They are dropped first when the log is full, so that a new driver still gets the others."""


class EventLog:
    """Keeps at most `capacity` events. The oldest of REPEATED_KINDS are dropped first, then the oldest of the other kinds."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.first = self.next = 0
        """Numbers of the generation's first event and of the next event. Numbers are never used again in a later generation."""
        self._events: list[Event] = []

    def append(self, event: Mapping[str, Any]) -> None:
        self._events.append({**event, "n": self.next})
        self.next += 1
        if len(self._events) > self.capacity:
            self._make_room()

    def since(self, number: int) -> list[Event]:
        """Returns the kept events from this number on. Their `n` may have gaps where events were dropped."""
        return self._events[bisect.bisect_left(self._events, number, key=_number) :]

    def clear(self) -> None:
        """Forgets everything: a new generation begins."""
        self.first, self._events = self.next, []

    def _make_room(self) -> None:
        # A quarter of the capacity is freed at once: each call looks at all events.
        excess = len(self._events) - self.capacity * 3 // 4
        repeated = [event["n"] for event in self._events if event.get("ev") in REPEATED_KINDS][:excess]
        oldest = [event["n"] for event in self._events if event.get("ev") not in REPEATED_KINDS][: excess - len(repeated)]
        dropped = {*repeated, *oldest}
        self._events = [event for event in self._events if event["n"] not in dropped]


def _number(event: Event) -> int:
    return event["n"]
