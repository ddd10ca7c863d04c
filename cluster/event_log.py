"""The events of a generation, numbered, for whoever asks from where on."""

from __future__ import annotations

import bisect
from typing import Any

Event = dict[str, Any]

CHATTY = ("metrics", "note")
"""What a run tells again and again: dropped first when there is no room, so that a new driver still learns how it stands."""


class EventLog:
    """Keeps at most `capacity` events; the oldest chatty ones go first, then the oldest of any kind."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.first = self.next = 0
        """Numbers of the generation's first event, and of the one to come: they go on through all generations."""
        self._events: list[tuple[int, Event]] = []

    def append(self, event: Event) -> None:
        self._events.append((self.next, event))
        self.next += 1
        if len(self._events) > self.capacity:
            self._make_room()

    def since(self, number: int) -> list[Event]:
        """The events from this number on that are still there."""
        start = bisect.bisect_left(self._events, number, key=lambda numbered: numbered[0])
        return [event for _, event in self._events[start:]]

    def clear(self) -> None:
        """Forgets everything: a new generation begins."""
        self.first, self._events = self.next, []

    def _make_room(self) -> None:
        excess = len(self._events) - self.capacity * 3 // 4  # some more at a time: this looks at all of them
        chatty = [number for number, event in self._events if event.get("ev") in CHATTY][:excess]
        oldest = [number for number, event in self._events if event.get("ev") not in CHATTY][: excess - len(chatty)]
        gone = {*chatty, *oldest}
        self._events = [numbered for numbered in self._events if numbered[0] not in gone]
