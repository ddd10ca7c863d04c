"""Incidents: each failure, resize and anomaly of a run, with the seconds that each part of its recovery took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any


class Action(StrEnum):
    """What is done about an incident."""

    RESTART = "restart"
    """The same hosts once more."""
    REPLACE = "replace"
    """A spare in the place of a lost host."""
    SHRINK = "shrink"
    GROW = "grow"
    SKIP = "skip"
    """The update of a batch is not applied; nothing stops."""
    ROLLBACK = "rollback"
    """Back to an older checkpoint inside the processes, without the offending batches."""
    ADOPT = "adopt"
    """A new driver takes the lead of a gang that went on without one."""
    REPORT = "reported"
    """Nothing: it is for people to know."""
    GIVE_UP = "give up"

    @property
    def restarts(self) -> bool:
        """Whether another generation follows."""
        return self in (Action.RESTART, Action.REPLACE, Action.SHRINK, Action.GROW)


@dataclass(kw_only=True)
class Incident:
    """Something that happened to the run, and what was done about it. Recovery is cut into phases that follow one another
    without a gap."""

    kind: str
    """A failure's kind, `driver_lost`, `resize`, or an anomaly's (`non_finite`, `loss_spike`)."""
    host: int | None
    generation: int
    step: int | None
    failed_at_s: float
    """Of a planned resize: when the gang was asked to stop."""
    evidence: dict[str, Any] = field(default_factory=dict)
    action: str = ""
    """One of `Action`; empty until it is decided."""
    detail: str = ""
    """Of the action, as a sentence for people: why it was given up, who is avoided."""
    hosts_before: int | None = None
    hosts_after: int | None = None
    """Of a replacement or a resize."""
    recovery_s: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, in order: they sum to `total_s`."""
    resumed_step: int | None = None
    """Of the generation that followed, or of the checkpoint rolled back to; None while there is none."""

    @property
    def total_s(self) -> float:
        return sum(self.recovery_s.values())

    @property
    def open(self) -> bool:
        """Whether another generation is to follow, and has not taken a step yet."""
        return self.action in tuple(Action) and Action(self.action).restarts and self.resumed_step is None

    def mark(self, phase: str, at_s: float) -> None:
        """The phase ended at `at_s`; it had begun where the one before ended, the first one with the failure."""
        elapsed_s = max(0.0, at_s - self.failed_at_s - self.total_s)
        self.recovery_s[phase] = self.recovery_s.get(phase, 0.0) + elapsed_s

    def recovered(self, first_step_end_s: float, median_step_s: float = 0.0) -> None:
        """Ends the recovery with the next generation's first step, less the step's own work: that is not lost."""
        self.mark("first_step", first_step_end_s)
        self.recovery_s["first_step"] = max(0.0, self.recovery_s["first_step"] - median_step_s)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total_s": self.total_s}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Incident:
        """From what `to_dict` made, through JSON. Documents of before there was `detail` have it in `action`."""
        known = {name: value for name, value in data.items() if name in {f.name for f in fields(cls)}}
        if "detail" not in known:
            action, _, detail = known.get("action", "").partition(": ")
            known |= {"action": action, "detail": detail}
        return cls(**known)


def of_anomaly(event: Mapping[str, Any], generation: int) -> Incident:
    """The incident that an `anomaly` event of the training process tells of. It is over when it is told.

    `loss` and `expected` are None where they were not finite.
    """
    loss, expected = event.get("loss"), event.get("expected")
    measured = f"loss {loss:g}" + (f", expected about {expected:g}" if expected is not None else "") if loss is not None else ""
    names = {"non_finite": "a loss or gradient that is not finite", "loss_spike": "a loss spike"}
    summary = f"{names.get(event['kind'], event['kind'])} in batch {event['batch_index']}" + (
        f" ({measured})" if measured else ""
    )
    skipped = list(event.get("skipped_batches", ()))
    return Incident(
        kind=event["kind"],
        host=None,
        generation=generation,
        step=event["batch_index"],
        failed_at_s=event["t"],
        evidence={"summary": summary, "loss": loss, "expected": expected, "skipped_batches": skipped},
        action=str(Action(event["action"])),
        detail=f"skipped batches: {', '.join(map(str, skipped))}" if skipped else "",
        resumed_step=event["batch_index"] if event.get("restored_step") is None else event["restored_step"],
    )
