"""What an agent knows of the newest generation on its host, whatever its log of events has dropped: the phase, the first step,
the last save, the end. A driver that takes over a gang after days learns from this how far it is.

A *fact* is the event that says it. Of each kind there is a fixed number, so facts need no limit, and none is ever dropped.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from gangway.wire.events import AnyEvent

FIRST = ("joined", "first_step", "overdue", "exception")
"""Kinds of which the first event is the fact."""
NEWEST = ("restored", "saving", "saved", "save_failed", "done", "exit")
"""Kinds of which the newest event is the fact."""

MAX_PHASES = 32
"""Of how many phases the first event is kept. A start has a handful; a process may report any names."""


class Facts:
    """The facts of one generation. Not thread-safe."""

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
