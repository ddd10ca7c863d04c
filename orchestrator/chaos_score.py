"""What came of a disturbed run: its strikes and its own incidents set beside each other, and compared with its reference run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.chaos_faults import KINDS
from orchestrator.chaos_strikes import Fault, Strike, detected_at_s
from orchestrator.ledger import check_sum

LEDGER_TOLERANCE = 1e-3
"""Of the wall clock: by so much its categories may miss it."""
UNFINISHED = ("*.tmp", "*.new", "*.saving-*", "*.replaced-*", "*.deleted-*", ".probe-*", "ballast")
"""Names of files and folders that no run may leave."""

Incident = Mapping[str, Any]


@dataclass
class Disturbed:
    """What a run under faults has left."""

    strikes: Sequence[Strike]
    summary: Mapping[str, Any]
    left_behind: Sequence[str]
    not_shipped: str | None
    """Metrics that have not arrived."""
    trouble: str | None
    """Why it was ended before its time."""


@dataclass
class Outcome:
    """A strike, the incidents that followed it up to the next one, and what is wrong with them."""

    strike: Strike
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
    """Incidents before the first strike."""
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
                found.setdefault(outcome.strike.kind, []).append(outcome.recovery_s)
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
    summary, strikes = run.summary, run.strikes
    before, matched = match(strikes, summary["incidents"])
    outcomes = [Outcome(strike, found, what_is_wrong(strike, found)) for strike, found in zip(strikes, matched, strict=True)]
    checks = {
        "finished": summary["status"] == reference["status"] == "finished",
        "final parameters equal to the reference run's, bit for bit": same(summary, reference, "params_digest"),
        "the same samples, each once": same(summary, reference, "samples_digest"),
        f"{len(strikes)} of {len(planned)} faults struck": len(strikes) == len(planned),
        "each was noticed, and named with its host": all(outcome.wrong is None for outcome in outcomes),
        "the ledger's categories sum to the wall clock": not check_sum(summary["goodput"], summary["wall_s"], LEDGER_TOLERANCE),
        f"all metrics have arrived{f': {run.not_shipped}' if run.not_shipped else ''}": run.not_shipped is None,
        "nothing left behind": not run.left_behind,
    }
    if run.trouble:
        checks[run.trouble] = False
    return Score([*planned], outcomes, {**skipped_kinds}, checks, before, [*run.left_behind], kept(summary), kept(reference))


def same(summary: Mapping[str, Any], reference: Mapping[str, Any], digest: str) -> bool:
    return summary.get(digest) is not None and summary[digest] == reference.get(digest)


def match(strikes: Sequence[Strike], incidents: Sequence[Incident]) -> tuple[list[Incident], list[list[Incident]]]:
    """(those that nothing of ours explains, those of each strike): an incident belongs to the last strike before its detection.

    Not before its beginning: a driver's successor knows only when its predecessor last gave a sign of life.
    """
    before: list[Incident] = []
    found: list[list[Incident]] = [[] for _ in strikes]
    for incident in incidents:
        earlier = [number for number, strike in enumerate(strikes) if strike.at_s <= detected_at_s(incident)]
        (found[earlier[-1]] if earlier else before).append(incident)
    return before, found


def what_is_wrong(strike: Strike, incidents: Sequence[Incident]) -> str | None:
    """With how the run took the strike; None if nothing is."""
    kind = KINDS[strike.kind]
    # That a host was slow for a while is true of many a recovery.
    incidents = [incident for incident in incidents if incident["kind"] != "straggler" or "straggler" in kind.named]
    if not incidents:
        return "not noticed" if kind.must_show else None
    first = incidents[0]
    if first["kind"] not in kind.named:
        return f"named {first['kind']}, expected {' or '.join(kind.named) or 'nothing'}"
    if kind.names_host and first["host"] != strike.host:
        return f"named host {first['host']}, struck was host {strike.host}"
    return None


def unfinished_files(run_dir: Path) -> list[str]:
    return sorted(f"file {path.relative_to(run_dir)}" for pattern in UNFINISHED for path in run_dir.rglob(pattern))


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
    table = Table(title="faults", title_justify="left", box=None, pad_edge=False)
    for name in ("fault", "host", "named", "at step", "went on from", "recovery s", "phases s"):
        table.add_column(name, justify="left" if name in ("fault", "named", "phases s") else "right")
    for outcome in score.outcomes:
        table.add_row(*_row(outcome), style="red" if outcome.wrong else None)
    return table


def _row(outcome: Outcome) -> list[str]:
    strike, incidents = outcome.strike, outcome.incidents
    about = [strike.kind, str(strike.host), outcome.wrong or " ".join(incident["kind"] for incident in incidents)]
    if not incidents:
        return [*about, "", "", "", ""]
    phases = " ".join(f"{name} {seconds:.2f}" for name, seconds in incidents[0]["recovery_s"].items())
    return [*about, str(incidents[0]["step"]), str(incidents[-1]["resumed_step"]), f"{outcome.recovery_s:.2f}", phases]
