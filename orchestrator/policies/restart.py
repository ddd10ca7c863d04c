"""The restart policy: whether to start another generation, and when. A pure function of the past failures."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gangway.config.section import Section, require
from gangway.wire.limits import RETRY_FOR_S
from orchestrator.failures.classify import FailureKind
from orchestrator.failures.history import PastFailure

REPEATS_ITSELF = frozenset(
    {
        FailureKind.USER_ERROR,
        FailureKind.NON_FINITE,
        FailureKind.LOSS_SPIKE,
        FailureKind.OUT_OF_MEMORY,
        FailureKind.DESYNC,
        FailureKind.HANG,
    }
)
"""Kinds that come from the program and its input: after two in a row at one step, the next try would fail in the same way. Of
hangs only those at one line of the user's own code: else the machine may have stalled at the same step again."""
SUSPECTS_THE_MACHINE = frozenset({FailureKind.DEVICE_ERROR, FailureKind.RUNTIME_ERROR})
"""Kinds that come from the program only if another machine fails in the same way at the same step: a kernel that reads an invalid
address looks like a broken device."""
PASSES = frozenset({FailureKind.TRANSIENT_ERROR, FailureKind.STORAGE_ERROR, FailureKind.DATA_ERROR})
"""Kinds that pass when what did not answer is back. (Data that were read and are invalid are reported as deterministic.)"""
PASSES_BEFORE_THE_FIRST_STEP = PASSES | {
    FailureKind.USER_ERROR,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.DEVICE_ERROR,
    FailureKind.RUNTIME_ERROR,
    FailureKind.PROCESS_CRASH,
    FailureKind.COORDINATOR_LOST,
}
"""Kinds that may pass if no step was completed: when data, network or storage are missing at a start, any of these may result."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy(Section):
    """Numbers are counted since the last new checkpoint: a run that makes progress may fail any number of times."""

    max_failures: int = 10
    """The limit for failures of generations that completed steps, without preemptions. Failed starts have a time limit instead
    (`retry_for_s`)."""
    max_preemptions: int = 100
    """The limit for preemptions, which do not count as failures."""
    retry_for_s: float = RETRY_FOR_S
    """For how long failures that may pass by themselves are retried: data, network or storage that does not answer, and most
    failures before the first step. Counted from the first of an unbroken series of such failures. So long, too, a state that is
    complete is held while the storage does not take it, and a start waits for room for a checkpoint; `gangway train` goes by it
    as well. 0: no retry."""
    backoff_initial_s: float = 1.0
    """The back-off before the second restart without progress (the first restart is immediate). It doubles each time."""
    backoff_max_s: float = 60.0
    """The longest back-off."""

    def __post_init__(self):
        for name in ("max_failures", "max_preemptions", "retry_for_s"):
            require(getattr(self, name) >= 0, f"{name} = {getattr(self, name)}: expected 0 or more")
        require(
            0 <= self.backoff_initial_s <= self.backoff_max_s,
            f"backoff_initial_s = {self.backoff_initial_s}, backoff_max_s = {self.backoff_max_s}: "
            "expected 0 <= backoff_initial_s <= backoff_max_s",
        )


@dataclass(frozen=True)
class Restart:
    delay_s: float
    left_s: float | None = None
    """How long such failures will still be retried; None if there is no time limit."""


@dataclass(frozen=True)
class GiveUp:
    reason: str


def decide(history: Sequence[PastFailure], policy: RestartPolicy) -> Restart | GiveUp:
    """Decides about the last failure of `history` (all failures of the launch, oldest first; at least one)."""
    last = history[-1]
    if last.deterministic and last.kind == FailureKind.STORAGE_ERROR:
        return GiveUp("the storage did not take the state: nothing is trained again because of that")
    if last.deterministic:
        return GiveUp("the program says that this error cannot go away by itself")
    if len(history) > 1 and _will_repeat(history):
        where = f"step {last.step}" if last.step else "the start"
        why = "it would happen for ever" if last.kind in REPEATS_ITSELF | SUSPECTS_THE_MACHINE else "it looks like a mistake"
        slow = " (if it is only slow there, give it longer: driver.watchdog)" if last.kind == FailureKind.HANG else ""
        return GiveUp(f"the same {last.kind} at {where} twice in a row: {why}{slow}")
    by_time = _within_time(history, policy)
    if _may_pass(last):
        return by_time
    by_number = _within_budget(history, policy)
    # A kind that may pass, but after some steps: the run gives up only when both limits are exceeded.
    if last.kind in PASSES and isinstance(by_number, GiveUp) and isinstance(by_time, Restart):
        return by_time
    return by_number


# ---------------------------------------------------------------------- failures that would repeat for ever


def _will_repeat(history: Sequence[PastFailure]) -> bool:
    """Returns whether the last failure repeats the one before, and nothing suggests that it will pass."""
    earlier, last = history[-2:]
    if not _same(earlier, last) or _went_well_between(earlier, last):
        return False
    if last.mistake and not _has_trained(history):  # an error of the compiler too, which looks like one of the machine
        return True
    if last.kind in SUSPECTS_THE_MACHINE:
        return _on_another_machine(earlier, last)
    if last.kind == FailureKind.USER_ERROR and not (earlier.took_steps or last.took_steps):
        return False  # no step was completed: something that a start needs may be missing just now
    return last.kind in REPEATS_ITSELF


def _same(earlier: PastFailure, last: PastFailure) -> bool:
    if (earlier.kind, earlier.step) != (last.kind, last.step):
        return False
    if last.kind == FailureKind.DESYNC:
        return True  # its message names a host, which may differ each time
    if last.exception is None or earlier.exception is None:
        return False
    return _signature(earlier.exception) == _signature(last.exception)


def _went_well_between(earlier: PastFailure, last: PastFailure) -> bool:
    """Returns whether there was a new checkpoint, or a generation that did not fail, between these failures."""
    if None not in (earlier.generation, last.generation) and last.generation - earlier.generation > 1:  # type: ignore[operator]
        return True
    return _saved(last) > _saved(earlier)


def _has_trained(history: Sequence[PastFailure]) -> bool:
    """Returns whether any generation of the launch completed a step."""
    if any(past.took_steps for past in history):
        return True
    failed = {past.generation for past in history}
    last = history[-1].generation
    # Generations count from 0: if fewer have failed than there were, one ended well, and that one has trained.
    return last is not None and None not in failed and len(failed) <= last


def _on_another_machine(earlier: PastFailure, last: PastFailure) -> bool:
    locations = [(past.slot, past.node_id) for past in (earlier, last)]
    return locations[0] != locations[1] and (None, None) not in locations


def _signature(exception: tuple[str, str]) -> tuple[str, str]:
    """Returns type and message without addresses of objects, which differ from process to process."""
    return exception[0], re.sub(r"0x[0-9a-fA-F]+", "0x", exception[1])


# ---------------------------------------------------------------------- limits of time and number


def _may_pass(past: PastFailure) -> bool:
    """Returns whether only the time limit applies: the generation completed no step, and the failure may pass by itself.

    For a generation that completed steps the number is limited too: each such failure costs these steps.
    """
    if past.trained is None:  # not known: it must not have reported any step
        return past.kind in PASSES_BEFORE_THE_FIRST_STEP and past.exception is not None and not past.took_steps
    return past.kind in PASSES_BEFORE_THE_FIRST_STEP and not past.trained


def _within_time(history: Sequence[PastFailure], policy: RestartPolicy) -> Restart | GiveUp:
    """Applies the time limit to the unbroken series of failures that may pass, up to the last one."""
    series = [history[-1]]  # oldest first
    for past in reversed(history[:-1]):
        if not (_may_pass(past) or past.kind in PASSES) or _went_well_between(past, series[0]):
            break
        series.insert(0, past)
    elapsed_s = _elapsed_s([past.at_s for past in series if past.at_s is not None], policy.retry_for_s * LONGEST_GAP)
    left_s = policy.retry_for_s - elapsed_s
    if left_s > 0:
        return Restart(backoff_s(len(series), policy), left_s)
    often = f"{len(series)} times in {elapsed_s:.0f} s" if len(series) > 1 else "once"
    return GiveUp(f"it failed {often} (driver.restart.retry_for_s = {policy.retry_for_s:g})")


LONGEST_GAP = 1 / 3
"""The largest share of `retry_for_s` that the time between two failures may count for. A longer gap was a wait for machines, or a
clock was set."""


def _elapsed_s(times_s: Sequence[float], longest_s: float) -> float:
    return sum(min(max(0.0, after - before), longest_s) for before, after in itertools.pairwise(times_s))


def _within_budget(history: Sequence[PastFailure], policy: RestartPolicy) -> Restart | GiveUp:
    """Applies the limits of number: failures, or preemptions, since the newest checkpoint."""
    preempted = history[-1].kind == FailureKind.PREEMPTION
    recent = [
        past for past in since_progress(history) if (past.kind == FailureKind.PREEMPTION) == preempted and not _may_pass(past)
    ]
    name = "max_preemptions" if preempted else "max_failures"
    allowed = policy.max_preemptions if preempted else policy.max_failures
    if len(recent) > allowed:
        what = "preemptions" if preempted else "failures"
        return GiveUp(
            f"{len(recent)} {what} without a new checkpoint in between (driver.restart.{name} = {allowed}){_advice(recent)}"
        )
    return Restart(backoff_s(len(recent), policy))


def _advice(recent: Sequence[PastFailure]) -> str:
    """Returns advice for a run that trained in each generation, and lost these steps each time."""
    if len(recent) < 2 or not all(past.took_steps and (past.step or 0) > _saved(past) for past in recent):
        return ""
    furthest, saved = max(past.step or 0 for past in recent), max(_saved(past) for past in recent)
    kept = f"the newest checkpoint is of step {saved}" if saved >= 0 else "there is no checkpoint"
    return f"; it got as far as step {furthest} and {kept}: save more often (checkpoint.save_steps)"


def since_progress(history: Sequence[PastFailure]) -> Sequence[PastFailure]:
    """Returns the failures at the end of `history` since the newest checkpoint was written."""
    best, start = -1, 0
    for index, past in enumerate(history):
        # Strictly newer: to fail with the same checkpoint again is no progress.
        if _saved(past) > best:
            best, start = _saved(past), index
    return history[start:]


def _saved(past: PastFailure) -> int:
    return -1 if past.checkpoint_step is None else past.checkpoint_step


def backoff_s(failures: int, policy: RestartPolicy) -> float:
    """Returns the back-off after the n-th failure without progress: 0 for the first, then doubling up to the limit."""
    if failures <= 1:
        return 0.0
    doublings = min(failures - 2, 64)  # 2.0**1024 would overflow; the limit is reached long before.
    return min(policy.backoff_max_s, policy.backoff_initial_s * 2.0**doublings)
