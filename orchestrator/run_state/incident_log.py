"""The incidents of a run as lines of an append-only file: one line per incident, and another one when it changes.

So a run that fails a thousand times writes each failure once. The next driver of a launch reads the end of the file: the incident
that is not over yet, and the past failures that decisions need.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.failures.history import PastFailure
from orchestrator.run_state.incidents import Incident
from trainers.errors import MAX_TRACEBACK, cut

NAME = "incidents.jsonl"
KEPT_INCIDENTS = 200
"""How many of the newest incidents are kept in memory and in the summary. The file has all."""
KEPT_FAILURES = 1000
"""How many of the newest failures are kept for decisions: more than any budget or window needs."""


@dataclass(frozen=True)
class Entry:
    number: int
    """Counts the incidents of a launch."""
    incident: Incident
    past: PastFailure | None
    """The failure, as decisions need it; None if the incident was no failure."""


def line(launch_id: str, entry: Entry) -> str:
    """Returns the line of an incident in its present state."""
    past = dataclasses.asdict(entry.past) if entry.past is not None else None
    document = shortened({"launch_id": launch_id, "number": entry.number, "incident": entry.incident.to_dict(), "past": past})
    return json.dumps(document) + "\n"


def shortened(value: Any) -> Any:
    """Returns JSON data with its texts cut. They are cut where they are made; but a long one that comes another way must not push
    the other incidents out of what the next driver reads."""
    if isinstance(value, Mapping):
        return {name: shortened(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(item) for item in value]
    return cut(value, MAX_TRACEBACK) if isinstance(value, str) else value


def read(lines: Iterable[str], launch_id: str) -> list[Entry]:
    """Returns the incidents of a launch in their last state, oldest first.

    Invalid lines are ignored: a driver may have died while it wrote one.
    """
    return [entry for of_launch, entry in with_launches(lines) if of_launch == launch_id]


def of_all_launches(lines: Iterable[str]) -> list[Entry]:
    """Returns the incidents of all launches of a run in their last state, oldest first."""
    return sorted((entry for _, entry in with_launches(lines)), key=lambda entry: entry.incident.failed_at_s)


def with_launches(lines: Iterable[str]) -> list[tuple[str, Entry]]:
    """Returns (id of the launch, incident) of valid lines, by launch and number."""
    entries: dict[tuple[str, int], Entry] = {}
    for text in lines:
        if (found := _parse(text)) is not None:
            # A later line of the same number is its newer state.
            launch_id, entry = found
            entries[launch_id, entry.number] = entry
    return [(launch_id, entries[launch_id, number]) for launch_id, number in sorted(entries)]


def _parse(text: str) -> tuple[str, Entry] | None:
    try:
        document = json.loads(text)
        past = document["past"]
        incident = Incident.from_dict(document["incident"])
        return document["launch_id"], Entry(int(document["number"]), incident, PastFailure.from_dict(past) if past else None)
    except (ValueError, KeyError, TypeError):
        return None
