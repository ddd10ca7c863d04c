"""Whether to start another generation, and when: a pure function of what happened so far."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from orchestrator.failures import Failure, FailureKind
from trainers.checks import Section, require

REPEATS_ITSELF = frozenset(
    {
        FailureKind.USER_ERROR,
        FailureKind.DATA_ERROR,
        FailureKind.NON_FINITE,
        FailureKind.LOSS_SPIKE,
        FailureKind.OUT_OF_MEMORY,
        FailureKind.DESYNC,
    }
)
"""Kinds that come from the program and its input: seen twice at one step, they will be seen for ever. A hang is none of them:
a machine that stalls, stalls where it stalls."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy(Section):
    """Budgets are counted since the last new checkpoint: a run that makes progress may fail any number of times."""

    max_failures: int = 10
    max_preemptions: int = 100
    """Preemptions are nobody's fault: they do not count as failures."""
    backoff_initial_s: float = 1.0
    """Waited before the second restart without progress (the first is immediate); doubles from there."""
    backoff_max_s: float = 60.0

    def __post_init__(self):
        for name in ("max_failures", "max_preemptions"):
            require(getattr(self, name) >= 0, f"{name} = {getattr(self, name)}: expected 0 or more")
        require(
            0 <= self.backoff_initial_s <= self.backoff_max_s,
            f"backoff_initial_s = {self.backoff_initial_s}, backoff_max_s = {self.backoff_max_s}: "
            "expected 0 <= backoff_initial_s <= backoff_max_s",
        )


@dataclass(frozen=True, kw_only=True)
class PastFailure:
    """What the decision needs of one failure."""

    kind: FailureKind
    step: int | None = None
    """Where it happened."""
    exception: tuple[str, str] | None = None
    """Type and message."""
    deterministic: bool = False
    """The program itself said that trying again is of no use (a wrong setting, a missing file)."""
    checkpoint_step: int | None = None
    """The newest complete checkpoint at that time: the mark of progress."""
    seat: int | None = None
    """Of the host that was named; None if none was."""
    node_id: str | None = None
    """The machine that the seat was on."""
    at_s: float | None = None
    """When; on the driver's clock."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PastFailure:
        """From what `dataclasses.asdict` made of one, through JSON; what an older document lacks is unknown."""
        known = {name: value for name, value in data.items() if name in {f.name for f in fields(cls)}}
        exception = known.get("exception")
        return cls(**{**known, "kind": FailureKind(known["kind"]), "exception": tuple(exception) if exception else None})


@dataclass(frozen=True)
class Restart:
    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    reason: str


def past_failure(
    failure: Failure,
    checkpoint_step: int | None,
    *,
    seat: int | None = None,
    node_id: str | None = None,
    at_s: float | None = None,
) -> PastFailure:
    """`seat` and `node_id` are those of `failure.host`."""
    exception = failure.exception or {}
    return PastFailure(
        kind=failure.kind,
        step=failure.step,
        exception=(str(exception.get("type", "")), str(exception.get("message", ""))) if exception else None,
        deterministic=bool(exception.get("deterministic", False)),
        checkpoint_step=checkpoint_step,
        seat=seat,
        node_id=node_id,
        at_s=at_s,
    )


def decide(history: Sequence[PastFailure], policy: RestartPolicy) -> Restart | GiveUp:
    """What to do about the last failure of `history` (all failures of the run, oldest first; at least one)."""
    last = history[-1]
    if last.deterministic:
        return GiveUp("the program says that this error cannot go away by itself")
    if len(history) > 1 and _same_again(history[-2], last):
        where = f"step {last.step}" if last.step is not None else "the same place"
        return GiveUp(f"the same {last.kind} at {where} twice in a row: it would happen for ever")
    return _within_budget(history, policy)


def _within_budget(history: Sequence[PastFailure], policy: RestartPolicy) -> Restart | GiveUp:
    preempted = history[-1].kind == FailureKind.PREEMPTION
    recent = [past for past in since_progress(history) if (past.kind == FailureKind.PREEMPTION) == preempted]
    name = "max_preemptions" if preempted else "max_failures"
    allowed = policy.max_preemptions if preempted else policy.max_failures
    if len(recent) > allowed:
        what = "preemptions" if preempted else "failures"
        return GiveUp(f"{len(recent)} {what} without a new checkpoint in between (driver.restart.{name} = {allowed})")
    return Restart(backoff_s(len(recent), policy))


def since_progress(history: Sequence[PastFailure]) -> Sequence[PastFailure]:
    """The failures at the end of `history` that happened after the newest checkpoint had been written."""
    best, start = -1, 0
    for index, past in enumerate(history):
        if past.checkpoint_step is not None and past.checkpoint_step > best:
            best, start = past.checkpoint_step, index
    return history[start:]


def backoff_s(failures: int, policy: RestartPolicy) -> float:
    """Before the restart that follows the n-th failure without progress: 0, then doubling up to the limit."""
    if failures <= 1:
        return 0.0
    doublings = min(failures - 2, 64)  # 2.0**1024 would overflow; the limit is reached long before.
    return min(policy.backoff_max_s, policy.backoff_initial_s * 2.0**doublings)


def _same_again(earlier: PastFailure, last: PastFailure) -> bool:
    if last.kind not in REPEATS_ITSELF or earlier.kind != last.kind or earlier.step != last.step:
        return False
    if last.kind == FailureKind.DESYNC:
        return True  # its message names whichever host it was this time
    if last.exception is None or earlier.exception is None:
        return False
    return _signature(earlier.exception) == _signature(last.exception)


def _signature(exception: tuple[str, str]) -> tuple[str, str]:
    """Addresses of objects differ from process to process, and say nothing."""
    return exception[0], re.sub(r"0x[0-9a-fA-F]+", "0x", exception[1])
