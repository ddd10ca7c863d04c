"""Whether to start another generation, and when: a pure function of what happened so far."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.failures.classify import FailureKind
from orchestrator.failures.history import PastFailure
from trainers.config.section import Section, require

REPEATS_ITSELF = frozenset(
    {
        FailureKind.USER_ERROR,
        FailureKind.NON_FINITE,
        FailureKind.LOSS_SPIKE,
        FailureKind.OUT_OF_MEMORY,
        FailureKind.DESYNC,
    }
)
"""Kinds that come from the program and its input: seen twice in a row at one step, they will be seen for ever. A hang is none of
them: a machine that stalls, stalls where it stalls."""
SUSPECTS_THE_MACHINE = frozenset({FailureKind.DEVICE_ERROR, FailureKind.RUNTIME_ERROR})
"""Kinds that come from the program only if another machine has the same at the same step: a kernel that reads where it must not
looks like a broken device."""
PASSES = frozenset({FailureKind.TRANSIENT_ERROR, FailureKind.STORAGE_ERROR, FailureKind.DATA_ERROR})
"""Kinds that go away when whatever did not answer is back. (Data that were read and do not fit call themselves deterministic.)"""
PASSES_BEFORE_THE_FIRST_STEP = PASSES | {
    FailureKind.USER_ERROR,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.DEVICE_ERROR,
    FailureKind.RUNTIME_ERROR,
    FailureKind.PROCESS_CRASH,
    FailureKind.COORDINATOR_LOST,
}
"""Kinds that may do so where no step was reached: what a start needs (data, network, storage) fails in any way it likes."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy(Section):
    """Numbers are counted since the last new checkpoint: a run that makes progress may fail any number of times."""

    max_failures: int = 10
    """Of those that took steps first, beside preemptions; a start that fails has a time (`retry_for_s`)."""
    max_preemptions: int = 100
    """Preemptions are nobody's fault: they do not count as failures."""
    retry_for_s: float = 1800.0
    """How long is tried again what may go away by itself: data, a network or a storage that does not answer, and most of what
    happens before the first step. Since the first of an unbroken series of such failures. 0: it is not tried again."""
    backoff_initial_s: float = 1.0
    """Waited before the second restart without progress (the first is immediate); doubles from there."""
    backoff_max_s: float = 60.0

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
    """How long it will be tried again if it goes on like this; None: it is not the time that counts."""


@dataclass(frozen=True)
class GiveUp:
    reason: str


def decide(history: Sequence[PastFailure], policy: RestartPolicy) -> Restart | GiveUp:
    """What to do about the last failure of `history` (all failures of the launch, oldest first; at least one)."""
    last = history[-1]
    if last.deterministic:
        return GiveUp("the program says that this error cannot go away by itself")
    if len(history) > 1 and _will_repeat(history):
        where = f"step {last.step}" if last.step else "the start"
        why = "it would happen for ever" if last.kind in REPEATS_ITSELF | SUSPECTS_THE_MACHINE else "it looks like a mistake"
        return GiveUp(f"the same {last.kind} at {where} twice in a row: {why}")
    in_time = _within_time(history, policy)
    if _may_pass(last):
        return in_time
    in_number = _within_budget(history, policy)
    # What is away at every try after some steps: both its time and its number must be over.
    return in_time if last.kind in PASSES and isinstance(in_number, GiveUp) and isinstance(in_time, Restart) else in_number


# ---------------------------------------------------------------------- a failure that would happen for ever


def _will_repeat(history: Sequence[PastFailure]) -> bool:
    """Whether the last failure is the one before again, in other processes, and nothing speaks for its going away."""
    earlier, last = history[-2:]
    if not _same(earlier, last) or _went_well_between(earlier, last):
        return False
    if last.kind in SUSPECTS_THE_MACHINE:
        return _on_another_machine(earlier, last)
    if last.mistake and not _has_trained(history):
        return True
    if last.kind == FailureKind.USER_ERROR and not (earlier.took_steps or last.took_steps):
        return False  # not even one step was reached: what a start needs may be away
    return last.kind in REPEATS_ITSELF


def _same(earlier: PastFailure, last: PastFailure) -> bool:
    if (earlier.kind, earlier.step) != (last.kind, last.step):
        return False
    if last.kind == FailureKind.DESYNC:
        return True  # its message names whichever host it was this time
    if last.exception is None or earlier.exception is None:
        return False
    return _signature(earlier.exception) == _signature(last.exception)


def _went_well_between(earlier: PastFailure, last: PastFailure) -> bool:
    """Whether there was a new checkpoint, or a generation that did not fail."""
    if None not in (earlier.generation, last.generation) and last.generation - earlier.generation > 1:  # type: ignore[operator]
        return True
    return _saved(last) > _saved(earlier)


def _has_trained(history: Sequence[PastFailure]) -> bool:
    """Whether any generation of the launch took a step: one that failed, or one that did not and so is missing here."""
    failed = {past.generation for past in history}
    last = history[-1].generation
    return any(past.took_steps for past in history) or (last is not None and None not in failed and len(failed) <= last)


def _on_another_machine(earlier: PastFailure, last: PastFailure) -> bool:
    places = [(past.slot, past.node_id) for past in (earlier, last)]
    return places[0] != places[1] and (None, None) not in places


def _signature(exception: tuple[str, str]) -> tuple[str, str]:
    """Addresses of objects differ from process to process, and say nothing."""
    return exception[0], re.sub(r"0x[0-9a-fA-F]+", "0x", exception[1])


# ---------------------------------------------------------------------- times and numbers


def _may_pass(past: PastFailure) -> bool:
    """Whether a failure is a matter of time alone: its generation took no step, and it may go away by itself.

    One that took steps first is a matter of numbers: it costs these steps each time.
    """
    if past.trained is None:  # not known: a kind that needs no step to happen
        return past.kind in PASSES_BEFORE_THE_FIRST_STEP and past.exception is not None and not past.took_steps
    return past.kind in PASSES_BEFORE_THE_FIRST_STEP and not past.trained


def _within_time(history: Sequence[PastFailure], policy: RestartPolicy) -> Restart | GiveUp:
    """Counts from the first of those that failed one after the other because something was away."""
    series = [history[-1]]
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
"""The share of `retry_for_s` that the time between two starts can count for: what is longer was spent waiting for machines, or a
clock was set."""


def _elapsed_s(times_s: Sequence[float], longest_s: float) -> float:
    return sum(min(max(0.0, after - before), longest_s) for before, after in itertools.pairwise(times_s))


def _within_budget(history: Sequence[PastFailure], policy: RestartPolicy) -> Restart | GiveUp:
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
    """For a run that trained each time, and each time lost what it had trained."""
    if len(recent) < 2 or not all(past.took_steps and (past.step or 0) > _saved(past) for past in recent):
        return ""
    furthest, saved = max(past.step or 0 for past in recent), max(_saved(past) for past in recent)
    kept = f"the newest checkpoint is of step {saved}" if saved >= 0 else "there is no checkpoint"
    return f"; it got as far as step {furthest} and {kept}: save more often (checkpoint.save_steps)"


def since_progress(history: Sequence[PastFailure]) -> Sequence[PastFailure]:
    """The failures at the end of `history` that happened after the newest checkpoint had been written."""
    best, start = -1, 0
    for index, past in enumerate(history):
        if _saved(past) > best:
            best, start = _saved(past), index
    return history[start:]


def _saved(past: PastFailure) -> int:
    return -1 if past.checkpoint_step is None else past.checkpoint_step


def backoff_s(failures: int, policy: RestartPolicy) -> float:
    """Before the restart that follows the n-th failure without progress: 0, then doubling up to the limit."""
    if failures <= 1:
        return 0.0
    doublings = min(failures - 2, 64)  # 2.0**1024 would overflow; the limit is reached long before.
    return min(policy.backoff_max_s, policy.backoff_initial_s * 2.0**doublings)
