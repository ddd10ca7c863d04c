"""Incidents: each failure, resize and anomaly of a run, with the seconds that each part of its recovery took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from gangway.wire.events import AnomalyTreated


class Action(StrEnum):
    """The action after an incident."""

    RESTART = "restart"
    """The same hosts start again."""
    REPLACE = "replace"
    """A spare replaces a lost host."""
    SHRINK = "shrink"
    GROW = "grow"
    SKIP = "skip"
    """The update of a batch is not applied; nothing stops."""
    ROLLBACK = "rollback"
    """Back to an older checkpoint inside the processes, without the offending batches."""
    ADOPT = "adopt"
    """A new driver adopts a gang that went on without one."""
    REPORT = "reported"
    """Nothing: the incident is only shown."""
    GIVE_UP = "give up"

    @property
    def restarts(self) -> bool:
        """Whether another generation follows."""
        return self in (Action.RESTART, Action.REPLACE, Action.SHRINK, Action.GROW)


@dataclass(kw_only=True)
class Incident:
    """A failure, resize or anomaly, and what was done about it. The phases of the recovery follow each other without a gap."""

    kind: str
    """A failure's kind, `driver_lost`, `resize`, or an anomaly's (`non_finite`, `loss_spike`, `broken_state`)."""
    host: int | None
    generation: int
    step: int | None
    failed_at_s: float
    """When it happened; for a planned resize, when the gang was asked to stop."""
    evidence: dict[str, Any] = field(default_factory=dict)
    action: str = ""
    """One of `Action`; empty until it is decided."""
    detail: str = ""
    """The action as a sentence for people: why the run was given up, which slots are avoided."""
    hosts_before: int | None = None
    hosts_after: int | None = None
    """The number of hosts after a replacement or a resize."""
    recovery_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, in order: they sum to `total_s`."""
    resumed_step: int | None = None
    """The step from which the next generation or the rollback went on; None before that."""
    source: str = ""
    """Where the state came from, `memory` or `storage`; empty without snapshots."""
    step_s: float = 0.0
    """The median seconds of a step of the generation that follows; 0: not known."""

    @property
    def total_s(self) -> float:
        return sum(self.recovery_s.values())

    def takes(self, other: Incident) -> bool:
        """Makes a batch that is skipped, as `other` says, a part of this incident, if it is one of the same kind, and not long
        after it. Returns whether it is."""
        batches, more = (one.evidence.get("skipped_batches", []) for one in (self, other))
        skips = self.action == other.action == Action.SKIP and self.kind == other.kind and self.generation == other.generation
        if not (skips and batches and more and 0 < more[0] - batches[-1] <= NEAR):
            return False
        batches += more
        origin = self.evidence["origin"] = self.evidence.get("origin") or other.evidence.get("origin")
        self.evidence["summary"] = _about(self.kind, f"{len(batches)} batches, {batches[0]} to {batches[-1]}", origin)
        self.detail = f"skipped batches: {len(batches)}, from {batches[0]} to {batches[-1]}"
        self.resumed_step = other.resumed_step
        return True

    @property
    def open(self) -> bool:
        """Whether another generation is to follow, and has not taken a step yet."""
        return self.action in tuple(Action) and Action(self.action).restarts and self.resumed_step is None

    @property
    def replayed_steps(self) -> int:
        """The steps that were trained before it, and have to be trained again."""
        return 0 if self.step is None or self.resumed_step is None else max(0, self.step - self.resumed_step)

    def mark(self, phase: str, at_s: float) -> None:
        """Ends a phase at `at_s`. It began at the end of the phase before; the first one began with the failure."""
        # The times come from the clocks of several machines: no phase may be negative.
        elapsed_s = max(0.0, at_s - self.failed_at_s - self.total_s)
        self.recovery_s[phase] = self.recovery_s.get(phase, 0.0) + elapsed_s

    def recovered(self, first_step_end_s: float, median_step_s: float = 0.0) -> None:
        """Ends the recovery with the next generation's first step, less the step's own work: that is not lost."""
        self.step_s = median_step_s
        self.mark("first_step", first_step_end_s)
        self.recovery_s["first_step"] = max(0.0, self.recovery_s["first_step"] - median_step_s)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total_s": self.total_s, "replayed_steps": self.replayed_steps}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Incident:
        """Restores what `to_dict` made, through JSON."""
        return cls(**{name: value for name, value in data.items() if name in {f.name for f in fields(cls)}})


ANOMALIES = {
    "non_finite": "a loss or gradient that is not finite",
    "loss_spike": "a loss spike",
    "broken_state": "an update that made the state infinite or NaN",
}
NEAR = 100
"""Batches. A batch that is skipped so soon after another, for the same reason, belongs to the same incident."""


def of_anomaly(event: AnomalyTreated, generation: int) -> Incident:
    """Returns the incident of an `anomaly` event of the training process. It is over when it is reported.

    `loss` and `expected` are None where they were not finite.
    """
    loss, expected = event["loss"], event["expected"]
    where, origin = f"batch {event['batch_index']}", event.get("origin")
    if loss is not None:
        expectation = f", expected about {expected:g}" if expected is not None else ""
        where += f" (loss {loss:g}{expectation})"
    summary = _about(event["kind"], where, origin)
    skipped = list(event["skipped_batches"])
    return Incident(
        kind=event["kind"],
        host=None,
        generation=generation,
        step=event["batch_index"],
        failed_at_s=event["t"],
        evidence={"summary": summary, "origin": origin, "loss": loss, "expected": expected, "skipped_batches": skipped},
        action=str(Action(event["action"])),
        detail=f"skipped batches: {', '.join(map(str, skipped))}" if skipped else "",
        resumed_step=event["batch_index"] if event["restored_step"] is None else event["restored_step"],
    )


def _about(kind: str, where: str, origin: str | None) -> str:
    return f"{ANOMALIES.get(kind, kind)} in {where}" + (f": {origin}" if origin else "")
