"""The events of a generation, numbered (`n`), for whoever asks from where on."""

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
        self._events: list[Event] = []

    def append(self, event: Event) -> None:
        self._events.append({**event, "n": self.next})
        self.next += 1
        if len(self._events) > self.capacity:
            self._make_room()

    def since(self, number: int) -> list[Event]:
        """The events from this number on that are still there: `n` says which, for some between them may be gone."""
        return self._events[bisect.bisect_left(self._events, number, key=_number) :]

    def clear(self) -> None:
        """Forgets everything: a new generation begins."""
        self.first, self._events = self.next, []

    def _make_room(self) -> None:
        excess = len(self._events) - self.capacity * 3 // 4  # some more at a time: this looks at all of them
        chatty = [event["n"] for event in self._events if event.get("ev") in CHATTY][:excess]
        oldest = [event["n"] for event in self._events if event.get("ev") not in CHATTY][: excess - len(chatty)]
        gone = {*chatty, *oldest}
        self._events = [event for event in self._events if event["n"] not in gone]


def _number(event: Event) -> int:
    return event["n"]
