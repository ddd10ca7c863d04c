"""The failures of a run so far, as the decision about a restart needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from orchestrator.failures.classify import Failure, FailureKind


@dataclass(frozen=True, kw_only=True)
class PastFailure:
    """What the decision needs of one failure."""

    kind: FailureKind
    step: int | None = None
    """Where it happened."""
    exception: tuple[str, str] | None = None
    """Type and message."""
    deterministic: bool = False
    """The program itself said that trying again is of no use (a wrong setting, a checkpoint of another model)."""
    mistake: bool = False
    """It looks like one of a person (a TypeError, a path that is not there): believed where nothing was trained yet."""
    generation: int | None = None
    """The one that it ended."""
    trained: bool | None = None
    """Whether that generation took a step; None: not known."""
    checkpoint_step: int | None = None
    """The newest complete checkpoint at that time: the mark of progress."""
    slot: int | None = None
    """Of the host that was named; None if none was."""
    node_id: str | None = None
    """The machine that the slot was on."""
    at_s: float | None = None
    """When; on the driver's clock."""

    @property
    def took_steps(self) -> bool:
        return bool(self.step) if self.trained is None else self.trained

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PastFailure:
        """From what `dataclasses.asdict` made of one, through JSON; what an older document lacks is unknown."""
        known = {name: value for name, value in data.items() if name in {f.name for f in fields(cls)}}
        exception = known.get("exception")
        return cls(**{**known, "kind": FailureKind(known["kind"]), "exception": tuple(exception) if exception else None})


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
    """`slot` and `node_id` are those of `failure.host`."""
    exception = failure.exception or {}
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
