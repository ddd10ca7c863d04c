"""All that the files of a run's folder say of it, for a report. What is missing or damaged is named, and left out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gangway.storage.documents import DamagedDocument, StorageError, Where
from gangway.storage.opening import place_of
from gangway.storage.store import Place
from orchestrator.config.job import CONFIG, given_in
from orchestrator.run_state import lines
from orchestrator.run_state.incidents import Incident
from orchestrator.run_state.launch import TIMELINE
from orchestrator.run_state.stored import PREVIEWS_KIND, STATE_KIND, SUMMARY_KIND
from orchestrator.runs import incidents as incidents_of
from orchestrator.runs import overview
from orchestrator.runs.overview import Overview
from orchestrator.tracking.spool import FOLDER, SPOOL, entry

MAX_STACKS_CHARS = 20_000
MAX_SAMPLES = 3

Point = tuple[float, float]


@dataclass(frozen=True)
class Published:
    """The numbers of one publish."""

    at_s: float
    """Unix time."""
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Mark:
    """A line of `timeline.jsonl`."""

    at_s: float
    launch: str
    ev: str
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Resume:
    """A launch or a driver that went on with other settings."""

    at_s: float
    changes: Mapping[str, tuple[str | None, str | None]]
    """(before, after), by the name of the setting."""


@dataclass(frozen=True, kw_only=True)
class Record:
    overview: Overview
    published: list[Published] = field(default_factory=list)
    """In the order of their times; of a step that came again, the newest."""
    marks: list[Mark] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    stacks: Mapping[str, str] = field(default_factory=dict)
    """The text of each file of stacks that an incident names, by its path there."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """As resolved, by dotted name."""
    given: str = ""
    """Those of the newest launch that differ from the defaults, as YAML."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """What the newest launch was made with, of `orchestrator/tracking/tags.py`."""
    resumes: list[Resume] = field(default_factory=list)
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The goodput ledger of the whole run."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    samples: list[tuple[int, str]] = field(default_factory=list)
    """(step, text), the newest first."""
    problems: list[str] = field(default_factory=list)

    @property
    def began_s(self) -> float | None:
        """Unix time of the first thing that is known of the run."""
        times = [self.overview.started_s, *(mark.at_s for mark in self.marks[:1]), *(one.at_s for one in self.published[:1])]
        return min((time for time in times if time is not None), default=None)

    @property
    def ended_s(self) -> float | None:
        times = [self.overview.changed_s, *(mark.at_s for mark in self.marks[-1:]), *(one.at_s for one in self.published[-1:])]
        return max((time for time in times if time is not None), default=None)

    def curve(self, name: str) -> list[Point]:
        """Returns (step, value) of a metric, by step."""
        points = {one.step: one.metrics[name] for one in self.published if name in one.metrics}
        return sorted((float(step), value) for step, value in points.items())


def read(run: Where) -> Record:
    """Reads a run's folder. Never raises for what is missing or damaged: `problems` says it. Raises StorageProblem of a bucket
    that does not answer."""
    files = overview.Files(place_of(run))
    folder, problems = files.folder, files.problems
    about = overview.read(folder)
    published, settings, resumes, tags = _tracked(folder, problems)
    incidents = _incidents(folder, problems)
    state, summary = (files.document(kind) for kind in (STATE_KIND, SUMMARY_KIND))
    ended = summary if summary.get("launch_id") == about.launch_id else {}
    if ended and about.kind != overview.ENDED:
        # The driver makes this page before it writes the outcome, which comes last.
        status, reason, error = str(ended.get("status")), ended.get("stop_reason"), ended.get("error")
        about = replace(about, kind=overview.ENDED, state=status, stop_reason=reason, error=error)
    return Record(
        overview=about,
        published=published,
        marks=_marks(folder, problems),
        incidents=incidents,
        stacks=_stacks(folder, incidents),
        settings=settings,
        given=_given(folder, problems),
        tags=tags,
        resumes=resumes,
        seconds=ended.get("goodput") or overview.seconds_of(state),
        summary=ended,
        samples=_samples(folder, problems),
        problems=[*about.problems, *dict.fromkeys(problems)],
    )


def _given(folder: Place, problems: list[str]) -> str:
    try:
        return given_in(((folder / CONFIG).get() or b"").decode(errors="replace"))
    except OSError as error:
        problems.append(f"{CONFIG} cannot be read: {error.strerror or error}")
        return ""


def _lines(name: str, found: Callable[[], Iterator[bytes]], problems: list[str]) -> Iterator[bytes]:
    try:
        yield from found()
    except FileNotFoundError:
        problems.append(f"{name} is not there")
    except OSError as error:
        problems.append(f"{name} cannot be read: {error.strerror or error}")


def _tracked(folder: Place, problems: list[str]) -> tuple[list[Published], dict[str, str], list[Resume], dict[str, str]]:
    """Returns what was published, the newest settings, how they changed, and the newest tags."""
    published: dict[int, list[Published]] = {}
    settings: dict[str, str] = {}
    resumes: list[Resume] = []
    tags: dict[str, str] = {}
    damaged = 0
    for line in _lines(SPOOL, lambda: lines.metrics(folder), problems):
        try:
            found = entry(line)
        except DamagedDocument:
            damaged += 1
            continue
        if "metrics" in found:
            metrics = {name: math.nan if value is None else value for name, value in found["metrics"].items()}
            # Training, evaluations and the end publish at one step. A step that comes again has names that were there.
            others = [one for one in published.get(found["step"], ()) if not one.metrics.keys() & metrics.keys()]
            published[found["step"]] = [*others, Published(found["t"], found["step"], metrics)]
        elif "go_back" in found:
            published = {step: some for step, some in published.items() if step <= found["go_back"]}
        elif "tags" in found:
            tags = found["tags"]
        elif "params" in found:
            new = found["params"]
            changed = {name: (settings.get(name), new.get(name)) for name in {**settings, **new}}
            if settings and (changes := {name: pair for name, pair in changed.items() if pair[0] != pair[1]}):
                resumes.append(Resume(found["t"], changes))
            settings = new
    if damaged:
        problems.append(f"{damaged} damaged lines of {FOLDER}/{SPOOL} are left out")
    return sorted((one for some in published.values() for one in some), key=lambda one: one.at_s), settings, resumes, tags


def _marks(folder: Place, problems: list[str]) -> list[Mark]:
    found, damaged = [], 0
    for line in _lines(TIMELINE, lambda: lines.of(folder / TIMELINE), problems):
        try:
            document = json.loads(line)
            found.append(Mark(float(document["t"]), str(document["launch"]), str(document["ev"]), document))
        except (ValueError, KeyError, TypeError):
            damaged += 1
    if damaged:
        problems.append(f"{damaged} damaged lines of {TIMELINE} are left out")
    return sorted(found, key=lambda mark: mark.at_s)


def _incidents(folder: Place, problems: list[str]) -> list[Incident]:
    try:
        return incidents_of.of_run(folder)
    except (StorageError, OSError) as error:
        problems.append(f"the incidents cannot be read: {error}")
        return []


def _stacks(folder: Place, incidents: list[Incident]) -> dict[str, str]:
    """Returns the stacks of the incidents that have some: the newest ones are kept in the run's folder."""
    texts = {}
    for incident in incidents:
        place = incident.evidence.get("stacks")
        # The run may lie elsewhere now: the folder of an incident has the same name there.
        stacks = folder / "incidents" / name if (name := str(place or "").rstrip("/").rpartition("/")[2]) else None
        for file in stacks.list() if stacks else []:
            assert stacks is not None
            if file.name.endswith(".txt"):
                text = (stacks / file.name).get() or b""
                texts[f"{place}/{file.name}"] = text.decode(errors="replace")[:MAX_STACKS_CHARS]
    return texts


def _samples(folder: Place, problems: list[str]) -> list[tuple[int, str]]:
    found = []
    names = [entry.name.removesuffix(".json") for entry in (folder / "previews").list() if entry.name.endswith(".json")]
    for name in sorted(names, key=lambda name: int(name) if name.isdecimal() else -1)[: -MAX_SAMPLES - 1 : -1]:
        try:
            document = PREVIEWS_KIND.read(folder / "previews" / f"{name}.json") or {}
        except (StorageError, OSError) as error:
            problems.append(f"previews/{name}.json cannot be read: {error}")
            continue
        for preview in document.get("previews", [])[:2]:
            found.append((document["step"], f"{preview.get('prompt', '')}{preview.get('text', '')}"))
    return found
