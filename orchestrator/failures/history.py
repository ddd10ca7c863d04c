"""The past failures of a run, as the restart decision needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from orchestrator.failures.classify import Failure, FailureKind
from orchestrator.failures.hang_analysis import IN_SYSTEM_CALL, STOPPED


@dataclass(frozen=True, kw_only=True)
class PastFailure:
    """One past failure, as the restart decision and the quarantine need it."""

    kind: FailureKind
    step: int | None = None
    """The step at which it happened."""
    exception: tuple[str, str] | None = None
    """Type and message; of a hang the line of the user's own code that it stood at."""
    deterministic: bool = False
    """Whether the program itself reported that a retry is useless (a wrong setting, a checkpoint of another model)."""
    mistake: bool = False
    """Whether it looks like a mistake of a person (a TypeError, a missing path). This counts only if nothing was trained yet."""
    generation: int | None = None
    """The generation that it ended."""
    trained: bool | None = None
    """Whether that generation completed a step; None: not known."""
    checkpoint_step: int | None = None
    """The newest complete checkpoint at that time. A newer one at the next failure means progress."""
    slot: int | None = None
    """The slot of the host that caused it; None if no host was identified."""
    node_id: str | None = None
    """The machine that the slot was on."""
    at_s: float | None = None
    """The time of the failure, by the driver's clock."""

    @property
    def took_steps(self) -> bool:
        return bool(self.step) if self.trained is None else self.trained

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PastFailure:
        """Restores what `dataclasses.asdict` made, through JSON. Unknown keys are ignored; fields of an older document may be
        missing."""
        values = {name: value for name, value in data.items() if name in {f.name for f in fields(cls)}}
        exception = values.get("exception")
        return cls(**{**values, "kind": FailureKind(values["kind"]), "exception": tuple(exception) if exception else None})


def past_failure(
    failure: Failure,
    checkpoint_step: int | None,
    *,
    generation: int | None = None,
    trained: bool | None = None,
    slot: int | None = None,
    node_id: str | None = None,
    at_s: float | None = None,
) -> PastFailure:
    """Makes the record of a failure. `slot` and `node_id` are those of `failure.host`."""
    exception = failure.exception or {}
    # A machine that is stuck, as in a disk, can stand at any line.
    if failure.kind == FailureKind.HANG and str(failure.evidence.get("state"))[0] not in (*STOPPED, IN_SYSTEM_CALL):
        exception = {"type": "hang", "message": line} if (line := failure.evidence.get("user_line")) else {}
    return PastFailure(
        kind=failure.kind,
        step=failure.step,
        exception=(str(exception.get("type", "")), str(exception.get("message", ""))) if exception else None,
        deterministic=bool(exception.get("deterministic", False)),
        mistake=bool(exception.get("mistake", False)),
        generation=generation,
        trained=trained,
        checkpoint_step=checkpoint_step,
        slot=slot,
        node_id=node_id,
        at_s=at_s,
    )
