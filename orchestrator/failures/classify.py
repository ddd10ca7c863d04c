"""What happened to a generation: one typed failure out of the post-mortems of all hosts. Pure.

When one host fails, the others fail because of it within 0.1 s: their collectives lose a peer, or the coordination service
aborts their process. Those are *collateral*. The failure is the earliest event that has a cause of its own. Only where there is
none, but a limit has passed, the gang hangs: then the stacks of all hosts tell for which one the others wait (`stacks.py`).
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from orchestrator.failures import hang_analysis
from orchestrator.failures.post_mortem import PostMortem, describe, read_post_mortem

__all__ = ["Failure", "FailureKind", "PostMortem", "classify", "has_own_cause", "read_post_mortem"]


class FailureKind(StrEnum):
    USER_ERROR = "user_error"
    DATA_ERROR = "data_error"
    NON_FINITE = "non_finite"
    OUT_OF_MEMORY = "out_of_memory"
    PROCESS_CRASH = "process_crash"
    HOST_LOST = "host_lost"
    HANG = "hang"
    PREEMPTION = "preemption"
    COORDINATOR_LOST = "coordinator_lost"
    STORAGE_ERROR = "storage_error"
    DESYNC = "desync"
    """Hosts out of step: one has skipped or repeated a step."""
    LOSS_SPIKE = "loss_spike"
    DEVICE_ERROR = "device_error"
    """A GPU, a TPU or the links between them: the machine's fault."""
    RUNTIME_ERROR = "runtime_error"
    """JAX failed by itself and did not say why: the machine's fault, or a bug."""
    TRANSIENT_ERROR = "transient_error"
    """Something outside the program did not answer: a data server, a network, a file system."""


KIND_OF_EXCEPTION = {
    "user": FailureKind.USER_ERROR,
    "data": FailureKind.DATA_ERROR,
    "non_finite": FailureKind.NON_FINITE,
    "out_of_memory": FailureKind.OUT_OF_MEMORY,
    "storage": FailureKind.STORAGE_ERROR,
    "crash": FailureKind.PROCESS_CRASH,
    "desync": FailureKind.DESYNC,
    "loss_spike": FailureKind.LOSS_SPIKE,
    "device": FailureKind.DEVICE_ERROR,
    "runtime": FailureKind.RUNTIME_ERROR,
    "transient": FailureKind.TRANSIENT_ERROR,
}
"""By the `kind` that the training process gave its own exception."""
NO_CAUSE = ("collateral", "link")
"""Those of an exception that another host's failure explains. `link`: unless no other host says more."""

AGREED = frozenset({FailureKind.NON_FINITE, FailureKind.LOSS_SPIKE, FailureKind.DESYNC})
"""Kinds that all hosts find at one step, since they see the same numbers: that a host says it does not make it guilty."""
MACHINE = frozenset(
    {
        FailureKind.PROCESS_CRASH,
        FailureKind.HOST_LOST,
        FailureKind.HANG,
        FailureKind.DEVICE_ERROR,
        FailureKind.RUNTIME_ERROR,
    }
)
"""Kinds that a machine's going away looks like, where it had given notice."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    kind: FailureKind
    host: int | None
    """None when no single host is to blame."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """JSON-able: `summary` (a line for people) and, as far as known, `step`, `exit_code`, `signal`, `hint`, `exception`,
    `log_tail`, `also_failed` (other hosts with a cause of their own), `notice`. Of a hang: `phase`, `limit_s`, `waited_s`,
    `line` (where the host stands), `why` (it was named), `state`, `groups` (hosts with equal stacks)."""
    collateral: tuple[int, ...] = ()
    """Hosts that failed because of this one."""
    failed_at_s: float | None = None
    """When it began, as the hosts' clocks have it; None if nobody knows."""

    @property
    def step(self) -> int | None:
        return self.evidence.get("step")

    @property
    def exception(self) -> Mapping[str, Any] | None:
        return self.evidence.get("exception")

    @property
    def summary(self) -> str:
        return self.evidence.get("summary", str(self.kind))


def classify(post_mortems: Sequence[PostMortem], agent_lost: Collection[int] = ()) -> Failure:
    """The failure that the others followed from. `agent_lost`: hosts whose agent is gone, with or without a post-mortem."""
    lost = set(agent_lost) | {dead.host for dead in post_mortems if dead.agent_lost}
    known = {dead.host: dead for dead in post_mortems}
    dead = [known.get(host, PostMortem(host=host, agent_lost=True)) for host in sorted(set(known) | lost)]
    failed = sorted((d for d in dead if d.failed or d.host in lost), key=_when)
    caused = [d for d in failed if has_own_cause(d, lost)]
    # An error of the runtime that does not say why may be the consequence of any other, and clocks differ.
    first = next((d for d in caused if _kind(d, lost) != FailureKind.RUNTIME_ERROR), next(iter(caused), None))
    if first is None:
        hung = [d for d in dead if d.hangs]
        failure = _hang(dead, hung) if hung else _without_own_cause(dead, failed)
    elif (kind := _kind(first, lost)) in AGREED:
        failure = _agreed(kind, failed)
    else:
        failure = _of_one_host(kind, first, failed, lost)
    times = [d.failed_at_s for d in dead if d.failed_at_s is not None and (d.failed or d.hangs)]
    return replace(_preempted(failure, known), failed_at_s=min(times, default=None))


def has_own_cause(dead: PostMortem, lost: Collection[int] = ()) -> bool:
    """False for what a failure of another host explains: a lost connection, or an abort by the coordination service."""
    if dead.host in lost or dead.agent_lost:
        return True
    if dead.exception is not None:
        return dead.exception.get("kind") not in NO_CAUSE
    return dead.exited and (dead.signal != signal.SIGABRT or dead.broken_device is not None)


def _when(dead: PostMortem) -> tuple[float, int]:
    """Sorts by time; a lost agent tells none: it counts as the first, since processes that outlive it are its victims."""
    return (dead.failed_at_s if dead.failed_at_s is not None else 0.0, dead.host)


def _kind(dead: PostMortem, lost: Collection[int]) -> FailureKind:
    if dead.exception is not None and dead.exception.get("kind") in KIND_OF_EXCEPTION:
        return KIND_OF_EXCEPTION[dead.exception["kind"]]
    if dead.host in lost or dead.agent_lost:
        return FailureKind.HOST_LOST
    if dead.broken_device is not None:
        return FailureKind.DEVICE_ERROR
    # The training process turns SIGTERM into a save and a clean end: one that dies of it was taken down with its machine.
    return FailureKind.PREEMPTION if dead.signal == signal.SIGTERM else FailureKind.PROCESS_CRASH


def _of_one_host(kind: FailureKind, first: PostMortem, failed: Sequence[PostMortem], lost: Collection[int]) -> Failure:
    collateral = tuple(sorted(d.host for d in failed if d is not first and not has_own_cause(d, lost)))
    also = sorted(d.host for d in failed if d is not first and has_own_cause(d, lost))
    evidence = describe(first, first.host in lost) | ({"also_failed": also} if also else {})
    return Failure(kind=kind, host=first.host, evidence=evidence, collateral=collateral)


def _agreed(kind: FailureKind, failed: Sequence[PostMortem]) -> Failure:
    """What several hosts found at one step. The guilty one is known only if the hosts' places differ, and one place is lonely."""
    finders = [d for d in failed if d.exception is not None and KIND_OF_EXCEPTION.get(d.exception.get("kind", "")) == kind]
    collateral = tuple(sorted(d.host for d in failed if d not in finders))
    evidence = describe(finders[0], False)
    if kind != FailureKind.DESYNC:
        host = finders[0].host if len(finders) == 1 else None
        return Failure(kind=kind, host=host, evidence=evidence, collateral=collateral)
    batches = _batches(finders)
    count = Counter(batches.values())
    odd = [host for host, batch in batches.items() if count[batch] == 1]
    host = odd[0] if len(odd) == 1 and len(batches) > 2 else None
    who = "one of them" if host is None else f"host {host}"
    shown = ", ".join(f"host {host} at batch {batch}" for host, batch in sorted(batches.items())) or "which, nobody could say"
    evidence["summary"] = f"the hosts are out of step: {who} has skipped or repeated a step ({shown})"
    evidence["step"] = min((d.last_step for d in finders if d.last_step is not None), default=None)
    return Failure(kind=kind, host=host, evidence=evidence, collateral=collateral)


def _batches(finders: Sequence[PostMortem]) -> dict[int, int]:
    """The batch that each host took the step with, as one of them heard it of all: not all live to tell theirs."""
    heard = ((d.exception or {}).get("batch_indices") for d in finders)
    return dict(enumerate(next((indices for indices in heard if indices), ())))


def _hang(dead: Sequence[PostMortem], hung: Sequence[PostMortem]) -> Failure:
    """A limit has passed on some host; the one to name is the one that the others wait for."""
    first = min(hung, key=lambda d: (d.overdue or {}).get("t", 0.0))
    blamed = hang_analysis.blame([d.seen for d in dead if not d.done], (first.overdue or {})["phase"])
    culprit = next((d for d in dead if d.host == blamed.host), first)
    overdue = culprit.overdue or first.overdue or {}
    facts = {
        "summary": _hang_summary(blamed, culprit.state, overdue),
        "step": culprit.last_step,
        **{name: overdue.get(name) for name in ("phase", "limit_s", "waited_s")},
        "line": blamed.line,
        "why": blamed.why,
        "state": culprit.state,
        "batch_index": culprit.batch_index,
        "groups": blamed.groups or None,
    }
    evidence = {name: value for name, value in facts.items() if value is not None}
    waiting = tuple(sorted(d.host for d in dead if d.host != blamed.host and not d.done))
    return Failure(kind=FailureKind.HANG, host=blamed.host, evidence=evidence, collateral=waiting)


def _hang_summary(blamed: hang_analysis.Blame, state: str | None, overdue: Mapping[str, Any]) -> str:
    times = f"(waited {overdue['waited_s']:.1f} s, limit {overdue['limit_s']:g} s)"
    if blamed.host is not None:
        frozen = f", frozen in state {state}" if state and state[0] in hang_analysis.STOPPED else ""
        line = blamed.line or "where, its stacks do not tell"
        return f"host {blamed.host} hangs in {overdue['phase']}: {line}{frozen} {times}"
    places = "; ".join(f"hosts {', '.join(map(str, group['hosts']))} at {group['line']}" for group in blamed.groups)
    where = f"the hosts hang in {overdue['phase']} and no single host could be identified"
    return f"{where}: {places or 'their stacks do not tell where'} {times}"


def _preempted(failure: Failure, known: Mapping[int, PostMortem]) -> Failure:
    """A machine that had given notice was taken away, whatever that looked like."""
    dead = None if failure.host is None else known.get(failure.host)
    if dead is None or dead.notice is None or failure.kind not in MACHINE:
        return failure
    notice = dead.notice
    summary = f"host {failure.host} was preempted, as announced ({notice.get('reason', 'notice')}); {failure.summary}"
    evidence = {**failure.evidence, "summary": summary, "notice": dict(notice)}
    return replace(failure, kind=FailureKind.PREEMPTION, evidence=evidence)


def _without_own_cause(dead: Sequence[PostMortem], failed: Sequence[PostMortem]) -> Failure:
    """Every failure looks like the consequence of another one."""
    alive = [d for d in dead if d not in failed and not d.done]
    frozen = [d for d in alive if d.state and d.state[0] in hang_analysis.STOPPED]
    if len(frozen) == 1 and failed:  # the others' runtime gave it up before a limit had passed
        return _no_answer(frozen[0], failed)
    links = [d for d in failed if (d.exception or {}).get("kind") == "link"]
    if len(links) == 1:
        others = tuple(d.host for d in failed if d is not links[0])
        return Failure(kind=FailureKind.DEVICE_ERROR, host=links[0].host, evidence=describe(links[0], False), collateral=others)
    aborted = [d for d in failed if d.exception is None]
    if len(aborted) == 1:
        # One abort explains the lost connections of the others; nothing explains the abort.
        others = tuple(d.host for d in failed if d is not aborted[0])
        return Failure(
            kind=FailureKind.PROCESS_CRASH, host=aborted[0].host, evidence=describe(aborted[0], False), collateral=others
        )
    if len(alive) == 1 and failed and all(_says_no_answer(d) for d in failed):
        return _no_answer(alive[0], failed)
    facts = describe(failed[0], False) if failed else {}
    who = ", ".join(str(d.host) for d in failed) or "none"
    facts["summary"] = f"the hosts lost their connection to each other (hosts {who} said so), and none had failed by itself"
    return Failure(kind=FailureKind.COORDINATOR_LOST, host=None, evidence=facts, collateral=tuple(sorted(d.host for d in failed)))


def _says_no_answer(dead: PostMortem) -> bool:
    return dead.exception is not None and dead.exception.get("type") == "CoordinatorError"


def _no_answer(alive: PostMortem, failed: Sequence[PostMortem]) -> Failure:
    """The others gave up waiting before a limit had passed: the one host that is left is the one that did not come."""
    seen = hang_analysis.blame([alive.seen], "")
    reason = str((failed[0].exception or {}).get("message", "")).splitlines()
    where = f" at {seen.line}" if seen.line else ""
    facts = {
        "summary": f"host {alive.host} hangs{where}: " + (reason[0] if reason else "it did not answer the others"),
        "step": alive.last_step,
        "line": seen.line,
        "state": alive.state,
        "groups": seen.groups or None,
    }
    evidence = {name: value for name, value in facts.items() if value is not None}
    collateral = tuple(sorted(d.host for d in failed))
    return Failure(kind=FailureKind.HANG, host=alive.host, evidence=evidence, collateral=collateral)
