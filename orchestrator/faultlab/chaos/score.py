"""What came of a disturbed run: its injections and its own incidents side by side, compared with its reference run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from gangway.storage.store import Place
from orchestrator.faultlab.chaos.faults import KINDS
from orchestrator.faultlab.chaos.injectors import Fault, Injection
from orchestrator.run_state.goodput import check_sum
from orchestrator.run_state.stored import CHECKPOINTS
from trainers.checkpoint import layout

LEDGER_TOLERANCE = 1e-3
"""Of the wall clock: by so much its categories may miss it."""
CLOCK_TOLERANCE_S = 60.0
"""By so much what a run tells of times may miss this process's clock: a jump is much longer."""
UNFINISHED = ("*.tmp", "*.new", "*.saving-*", "*.replaced-*", "*.deleted-*", ".probe-*", "ballast")
"""Names of files and folders that no run may leave."""
OF_ITSELF = ("straggler", "resize")
"""Kinds of incident that need no fault: a host is slow for a while after many a recovery, and a gang that may grow grows."""

Incident = Mapping[str, Any]


@dataclass
class Disturbed:
    """What a run under faults has left."""

    injections: Sequence[Injection]
    summary: Mapping[str, Any]
    left_behind: Sequence[str]
    not_shipped: str | None
    """Metrics that have not arrived."""
    trouble: str | None
    """Why it was ended before its time."""
    began_s: float
    ended_s: float
    """By a clock that no fault has set."""
    exit_status: int = 0
    """Of the command that finished it."""


@dataclass
class Outcome:
    """An injection, the incidents that followed it up to the next one, and what is wrong with them."""

    injection: Injection
    incidents: list[Incident]
    wrong: str | None

    @property
    def recovery_s(self) -> float | None:
        """Of all that it brought about; None if it cost no recovery."""
        return sum(incident["total_s"] for incident in self.incidents) if self.incidents else None


@dataclass
class Score:
    planned: list[Fault]
    outcomes: list[Outcome]
    skipped_kinds: dict[str, str]
    """Kinds that could not be tried here, and why."""
    checks: dict[str, bool]
    unprovoked: list[Incident]
    """Incidents before the first injection."""
    left_behind: list[str]
    summary: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(self.checks.values())

    def recovery_by_kind(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for outcome in self.outcomes:
            if outcome.recovery_s is not None:
                found.setdefault(outcome.injection.kind, []).append(outcome.recovery_s)
        return found

    def to_dict(self) -> dict[str, Any]:
        recoveries = self.recovery_by_kind()
        return {
            "passed": self.passed,
            **asdict(self),
            "recovery_s": recoveries,
            "median_recovery_s": {kind: statistics.median(times) for kind, times in recoveries.items()},
        }


def score(planned: Sequence[Fault], skipped_kinds: Mapping[str, str], run: Disturbed, reference: Mapping[str, Any]) -> Score:
    summary, injections = run.summary, run.injections
    before, matched = match(injections, summary["incidents"])
    outcomes = [
        Outcome(injection, found, what_is_wrong(injection, found)) for injection, found in zip(injections, matched, strict=True)
    ]
    checks = {
        "finished": summary["status"] == reference["status"] == "finished",
        f"the exit status is {run.exit_status}, and the run {summary['status']}": (
            (run.exit_status == 0) == (summary["status"] == "finished")
        ),
        "final parameters equal to the reference run's, bit for bit": same(summary, reference, "params_digest"),
        "the same samples, each once": same(summary, reference, "samples_digest"),
        f"{len(injections)} of {len(planned)} faults injected": len(injections) == len(planned),
        "each was noticed, and named with its host": all(outcome.wrong is None for outcome in outcomes),
        "the ledger's categories sum to the wall clock": not check_sum(summary["goodput"], summary["wall_s"], LEDGER_TOLERANCE),
        "no time is recorded that is not within the run": not times_outside(run),
        f"all metrics have arrived{f': {run.not_shipped}' if run.not_shipped else ''}": run.not_shipped is None,
        "nothing left behind": not run.left_behind,
    }
    if run.trouble:
        checks[run.trouble] = False
    return Score([*planned], outcomes, {**skipped_kinds}, checks, before, [*run.left_behind], kept(summary), kept(reference))


def times_outside(run: Disturbed) -> list[str]:
    """What the run tells that cannot be: it lasted longer than it did, or something happened before it or after."""
    earliest_s, latest_s = run.began_s - CLOCK_TOLERANCE_S, run.ended_s + CLOCK_TOLERANCE_S
    wrong = [] if run.summary["wall_s"] <= latest_s - run.began_s else [f"it lasted {run.summary['wall_s']:.0f} s"]
    for number, incident in enumerate(run.summary["incidents"]):
        failed_s, seconds = incident["failed_at_s"], incident["recovery_s"].values()
        if not (earliest_s <= failed_s <= failed_s + incident["total_s"] <= latest_s and all(s >= 0 for s in seconds)):
            wrong.append(f"incident {number}: {failed_s - run.began_s:.0f} s after the start, for {incident['total_s']:.0f} s")
    return wrong


def same(summary: Mapping[str, Any], reference: Mapping[str, Any], digest: str) -> bool:
    return summary.get(digest) is not None and summary[digest] == reference.get(digest)


def match(injections: Sequence[Injection], incidents: Sequence[Incident]) -> tuple[list[Incident], list[list[Incident]]]:
    """(those that no injection explains, those of each injection): an incident belongs to the last injection before it."""
    bounds = [*(injection.incidents_before for injection in injections), len(incidents)]
    return [*incidents[: bounds[0]]], [[*incidents[start:end]] for start, end in pairwise(bounds)]


def what_is_wrong(injection: Injection, incidents: Sequence[Incident]) -> str | None:
    """With how the run took the injection; None if nothing is wrong."""
    named = KINDS[injection.kind].named
    of_it = [incident for incident in incidents if incident["kind"] not in OF_ITSELF or incident["kind"] in named]
    return next(_problems(injection, of_it), None)


def _problems(injection: Injection, incidents: Sequence[Incident]) -> Iterator[str]:
    kind = KINDS[injection.kind]
    if injection.problem:
        yield injection.problem
    if not incidents:
        if kind.must_show:
            yield "not noticed"
        return
    first, kinds_after = incidents[0], {incident["kind"] for incident in incidents[1:]}
    if first["kind"] not in kind.named:
        yield f"named {first['kind']}, expected {' or '.join(kind.named) or 'nothing'}"
    if kind.names_host and first["host"] != injection.host:
        yield f"named host {first['host']}, the fault was on host {injection.host}"
    if kind.then and (not kinds_after or not kinds_after <= {*kind.then}):
        yield f"followed by {', '.join(sorted(kinds_after)) or 'nothing'}, expected {' or '.join(kind.then)}"
    if wrongly := sorted(kinds_after & {*kind.never}):
        yield f"followed by {', '.join(wrongly)}, which is not what happened"
    for incident in incidents:
        if incident["resumed_step"] is not None and incident["resumed_step"] < injection.oldest_checkpoint:
            yield f"went on from step {incident['resumed_step']}, with a checkpoint of step {injection.oldest_checkpoint}"


def unfinished_files(run: Place) -> list[str]:
    # A store lists objects alone: files that are being written are none.
    on_disk = (f"{path.relative_to(run.path)}" for path in run.path.rglob("*")) if run.store.is_local else ()
    names = sorted({*(entry.name for entry in run.list()), *on_disk})
    left = [name for name in names if any(fnmatch(part, pattern) for part in name.split("/") for pattern in UNFINISHED)]
    committed = {kept.folder for kept in layout.committed_in(run / CHECKPOINTS).values()}
    # By their objects: some stores list a folder for a while after all that was in it is deleted.
    nobodys = {parts[1] for name in names if (parts := name.split("/"))[0] == CHECKPOINTS and len(parts) > 2} - committed
    return sorted([*(f"file {name}" for name in left), *(f"a checkpoint that no record names: {name}" for name in nobodys)])


def kept(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What of a summary is worth repeating."""
    names = (
        "status",
        "error",
        "steps",
        "params_digest",
        "samples_digest",
        "lineage",
        "skipped_batches",
        "goodput",
        "wall_s",
        "generations",
        "drivers",
    )
    return {name: summary.get(name) for name in names}


# ---------------------------------------------------------------------- the table


def show(score: Score, console: Console) -> None:
    console.print(_table(score))
    for kind, times in score.recovery_by_kind().items():
        if len(times) > 1:
            console.print(f"  {kind}: median recovery {statistics.median(times):.2f} s of {len(times)}")
    for incident in score.unprovoked:
        console.print(f"  unprovoked: {incident['kind']} at step {incident['step']}", style="yellow")
    for kind, why in score.skipped_kinds.items():
        console.print(f"  - {kind} was not tried: {why}", style="yellow")
    for name, good in score.checks.items():
        console.print(f"  {'✓' if good else '✗'} {name}", style="green" if good else "red")
    for left in score.left_behind:
        console.print(f"    {left}", style="red")


def _table(score: Score) -> Table:
    columns = (
        Column(name, justify="left" if name in ("fault", "named", "phases s") else "right")
        for name in ("fault", "host", "named", "at step", "went on from", "recovery s", "phases s")
    )
    table = Table(*columns, title="faults", title_justify="left", box=None, pad_edge=False)
    for outcome in score.outcomes:
        table.add_row(*_row(outcome), style="red" if outcome.wrong else None)
    return table


def _row(outcome: Outcome) -> list[str]:
    injection, incidents = outcome.injection, outcome.incidents
    about = [injection.kind, str(injection.host), outcome.wrong or " ".join(incident["kind"] for incident in incidents)]
    if not incidents:
        return [*about, "", "", "", ""]
    phases = " ".join(f"{name} {seconds:.2f}" for name, seconds in incidents[0]["recovery_s"].items())
    return [*about, str(incidents[0]["step"]), str(incidents[-1]["resumed_step"]), f"{outcome.recovery_s:.2f}", phases]
