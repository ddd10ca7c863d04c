"""What the run and each of its hosts did when, out of the marks of the time line. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.report.record import Mark, Record
from orchestrator.runs.overview import LIVE

MAX_BARS = 1500
"""With more, the hosts have no rows: nobody could tell them apart."""
RUN = "run"
KINDS = {
    "training": "training",
    "importing": "starting",
    "starting": "starting",
    "joining": "starting",
    "restoring": "starting",
    "compiling": "starting",
    "saving": "saving, evaluating",
    "evaluating": "saving, evaluating",
    "generating previews": "saving, evaluating",
    "finishing": "saving, evaluating",
    "diagnosing": "failed, recovering",
    "recovering": "failed, recovering",
    "reserving": "waiting",
    "waiting for room": "waiting",
}
"""What a state of the driver is in the picture."""


@dataclass(frozen=True)
class Bar:
    row: str
    from_s: float
    to_s: float
    kind: str


@dataclass(frozen=True)
class Timeline:
    """Times are seconds since the beginning of the part that is shown."""

    length_s: float
    about: str
    bars: list[Bar]
    incidents: list[tuple[float, str]] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)

    @property
    def rows(self) -> list[str]:
        hosts = sorted({bar.row for bar in self.bars} - {RUN}, key=lambda row: int(row.rpartition(" ")[2]))
        return [RUN, *hosts]


def of(record: Record) -> Timeline | None:
    """Returns the time line of the newest launch; None if nothing is known of it."""
    launches = list(dict.fromkeys(mark.launch for mark in record.marks))
    if not launches:
        return None
    marks = [mark for mark in record.marks if mark.launch == launches[-1]]
    # The first launch begins with the command, as the goodput does: its driver comes seconds later.
    began_s = marks[0].at_s if len(launches) > 1 or record.began_s is None else record.began_s
    last_s = max([marks[-1].at_s, *(one.at_s for one in record.published[-1:])])
    if record.overview.kind == LIVE:
        last_s = max(last_s, record.overview.changed_s or last_s)
    length_s = max(last_s - began_s, 1e-3)
    states = [mark for mark in marks if mark.ev == "state"]
    run = [_bar(RUN, mark, end_s, began_s) for mark, end_s in _until_next(states, last_s)]
    if marks[0].at_s > began_s:
        run.insert(0, Bar(RUN, 0.0, marks[0].at_s - began_s, "starting"))
    hosts = _of_hosts(marks, states, began_s, last_s)
    incidents = [
        (incident.failed_at_s - began_s, incident.kind.replace("_", " "))
        for incident in record.incidents
        if began_s <= incident.failed_at_s <= last_s
    ]
    saves = [mark.at_s - began_s for mark in marks if mark.ev == "saved"]
    about = f"the newest of {len(launches)} launches" if len(launches) > 1 else "ticks: checkpoints; lines: incidents"
    bars = [*run, *hosts] if len(run) + len(hosts) <= MAX_BARS else run
    return Timeline(length_s, about, bars[:MAX_BARS], incidents[:200], saves[:500])


def _until_next(marks: Sequence[Mark], last_s: float) -> list[tuple[Mark, float]]:
    ends = [mark.at_s for mark in marks[1:]] + [last_s]
    return list(zip(marks, ends, strict=True))


def _bar(row: str, mark: Mark, end_s: float, began_s: float) -> Bar:
    label = str(mark.about.get("state", ""))
    return Bar(row, mark.at_s - began_s, max(mark.at_s, end_s) - began_s, KINDS.get(label, "starting"))


def _of_hosts(marks: Sequence[Mark], states: Sequence[Mark], began_s: float, last_s: float) -> list[Bar]:
    """A host starts in the phases that it has reported. It trains when the run does, and until the run does something else."""
    bars = []
    changes = [mark for mark in states if KINDS.get(str(mark.about.get("state"))) not in ("starting", None)]
    by_host: dict[int, list[Mark]] = {}
    for mark in marks:
        if mark.ev == "phase" and "host" in mark.about:
            by_host.setdefault(mark.about["host"], []).append(mark)
    for host, own in sorted(by_host.items()):
        row = f"host {host}"
        for mark, until_s in _until_next(own, last_s):
            end_s = min([until_s, *(change.at_s for change in changes if change.at_s > mark.at_s)])
            bars.append(Bar(row, mark.at_s - began_s, end_s - began_s, "starting"))
        first_s = own[0].at_s
        for mark, end_s in _until_next(states, last_s):
            kind = KINDS.get(str(mark.about.get("state")), "starting")
            if kind != "starting" and mark.at_s >= first_s:
                bars.append(Bar(row, mark.at_s - began_s, end_s - began_s, kind))
    return bars
