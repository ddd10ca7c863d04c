"""The incidents of a run as lines of an append-only file: one line per incident, and another one when it changes.

So a run that fails a thousand times writes each failure once. The next driver of a launch reads the end of the file: the incident
that is not over yet, and the past failures that decisions need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from gangway.storage.documents import DamagedDocument, DocumentKind
from gangway.text import MAX_TRACEBACK, cut
from orchestrator.failures.history import PastFailure
from orchestrator.run_state.incidents import Incident

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


class _Line(TypedDict):
    launch_id: str
    number: int
    incident: Incident
    past: PastFailure | None


LINE_KIND = DocumentKind(NAME, _Line, "these incidents do not count for the budgets of restarts")


def line(launch_id: str, entry: Entry) -> str:
    """Returns the line of an incident in its present state."""
    past = asdict(entry.past) if entry.past is not None else None
    document = {"launch_id": launch_id, "number": entry.number, "incident": entry.incident.to_dict(), "past": past}
    return LINE_KIND.line(shortened(document))


def shortened(value: Any) -> Any:
    """Returns JSON data with its texts cut. They are cut where they are made; but a long one that comes another way must not push
    the other incidents out of what the next driver reads."""
    if isinstance(value, Mapping):
        return {name: shortened(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(item) for item in value]
    return cut(value, MAX_TRACEBACK) if isinstance(value, str) else value


def of_all_launches(lines: Sequence[str]) -> list[Entry]:
    """Returns the incidents of all launches of a run in their last state, oldest first. Raises NewerDocument."""
    return sorted((entry for _, entry in with_launches(lines)[0]), key=lambda entry: entry.incident.failed_at_s)


def with_launches(lines: Sequence[str]) -> tuple[list[tuple[str, Entry]], str | None]:
    """Returns the incidents of all launches in their last state, each with the id of its launch, by launch and number; and a
    sentence about damaged lines if there are some: a driver may have died while it wrote one. Raises NewerDocument."""
    entries: dict[tuple[str, int], Entry] = {}
    damaged: list[str] = []
    for text in filter(str.strip, lines):
        try:
            document = LINE_KIND.parse(text, NAME)
        except DamagedDocument as error:
            damaged.append(str(error).partition(";")[0])
            continue
        number, past = document["number"], document["past"]
        incident = Incident.from_dict(document["incident"])
        # A later line of the same number is its newer state.
        entry = Entry(number, incident, PastFailure.from_dict(past) if past else None)
        entries[document["launch_id"], number] = entry
    problem = f"{len(damaged)} lines of {NAME} are left out ({damaged[0]}): {LINE_KIND.cost}" if damaged else None
    return [(launch_id, entries[launch_id, number]) for launch_id, number in sorted(entries)], problem
