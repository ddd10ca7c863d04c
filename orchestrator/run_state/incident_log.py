"""The incidents of a run as lines of an append-only file: one for each, and another when more is known of it.

So a run that fails a thousand times writes each failure once. The next driver of a launch reads from the end what it needs: the
incident that is not over yet, and the failures that decisions are made by.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.failures.history import PastFailure
from orchestrator.run_state.incidents import Incident

NAME = "incidents.jsonl"
KEPT_INCIDENTS = 200
"""The newest ones, in memory and in the summary. The file has all."""
KEPT_FAILURES = 1000
"""The newest ones, for decisions: more than any budget or window needs."""


@dataclass(frozen=True)
class Entry:
    number: int
    """Counts the incidents of a launch."""
    incident: Incident
    past: PastFailure | None
    """What decisions need of it; None of one that was no failure."""


def line(launch_id: str, entry: Entry) -> str:
    """Of an incident as it is now."""
    past = dataclasses.asdict(entry.past) if entry.past is not None else None
    document = {"launch_id": launch_id, "number": entry.number, "incident": entry.incident.to_dict(), "past": past}
    return json.dumps(document) + "\n"


def read(lines: Iterable[str], launch_id: str) -> list[Entry]:
    """The incidents of a launch, as they were last, oldest first.

    Lines that make no sense are left out: a driver may have died while it wrote one.
    """
    entries: dict[int, Entry] = {}
    for text in lines:
        entry = _parse(text, launch_id)
        if entry is not None:
            entries[entry.number] = entry
    return [entries[number] for number in sorted(entries)]


def _parse(text: str, launch_id: str) -> Entry | None:
    try:
        document = json.loads(text)
        if document["launch_id"] != launch_id:
            return None
        past = document["past"]
        incident = Incident.from_dict(document["incident"])
        return Entry(int(document["number"]), incident, PastFailure.from_dict(past) if past else None)
    except (ValueError, KeyError, TypeError):
        return None
