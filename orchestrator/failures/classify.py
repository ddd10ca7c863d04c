"""Classifies the failure of a generation: the post-mortems of all hosts become one typed failure. Pure.

When one host fails, the others fail because of it within 0.1 s: their collectives lose a peer, or the coordination service aborts
their process. Such failures are *collateral*. The failure of the generation is the earliest one that is not collateral. If there
is none, but a time limit has passed, the gang hangs: then the stacks of all hosts show which host the others wait for
(`hang_analysis.py`).
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from gangway.errors import HOW_TO_SHIP
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
    """The hosts are out of step: one has skipped or repeated a step."""
    LOSS_SPIKE = "loss_spike"
    DEVICE_ERROR = "device_error"
    """A GPU, a TPU or a link between them failed: the machine's fault."""
    RUNTIME_ERROR = "runtime_error"
    """JAX failed and did not say why: the machine's fault, or a bug."""
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
"""The failure kind by the `kind` that the training process gave its exception."""
NO_CAUSE = ("collateral", "link")
"""Kinds of exceptions that a failure of another host explains. `link`: only if another host has a better explanation."""

AGREED = frozenset({FailureKind.NON_FINITE, FailureKind.LOSS_SPIKE, FailureKind.DESYNC})
"""Kinds that all hosts detect at the same step, since they see the same numbers. The host that reports one need not be its
cause."""
MACHINE = frozenset(
    {
        FailureKind.PROCESS_CRASH,
        FailureKind.HOST_LOST,
        FailureKind.HANG,
        FailureKind.DEVICE_ERROR,
        FailureKind.RUNTIME_ERROR,
    }
)
"""Kinds that become PREEMPTION if the machine had given notice: this is what the loss of a machine looks like."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    kind: FailureKind
    host: int | None
    """The host that caused it; None if no single host did."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """JSON-able: `summary` (a line for people) and, as far as known, `step`, `exit_code`, `signal`, `hint`, `exception`,
    `log_tail`, `also_failed` (other hosts whose failure is not collateral), `notice`. For a hang: `phase`, `limit_s`, `waited_s`,
    `line` (where the host is), `user_line` (that of the user's own code), `why` (it was named), `state`, `groups` (hosts with
    equal stacks)."""
    collateral: tuple[int, ...] = ()
    """Hosts that failed because of this one."""
    failed_at_s: float | None = None
    """When it began, by the driver's clock; None if not known."""

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
    """Returns the failure that caused all others. `agent_lost`: hosts whose agent is gone, with or without a post-mortem."""
    lost = set(agent_lost) | {p.host for p in post_mortems if p.agent_lost}
    by_host = {p.host: p for p in post_mortems}
    for host in lost - by_host.keys():
        by_host[host] = PostMortem(host=host, agent_lost=True)
    all_hosts = [by_host[host] for host in sorted(by_host)]
    failed = sorted((p for p in all_hosts if p.failed or p.host in lost), key=_by_time)
    first = _first_cause(failed, lost)
    if first is not None:
        kind = _kind(first, lost)
        failure = _agreed(kind, failed) if kind in AGREED else _of_one_host(kind, first, failed, lost)
    elif overdue := [p for p in all_hosts if p.hangs]:
        failure = _hang(all_hosts, overdue)
    else:
        failure = _all_collateral(all_hosts, failed)
    # Of collateral failures too: detection counts from the first sign of trouble on any host.
    times = [p.failed_at_s for p in all_hosts if p.failed_at_s is not None and (p.failed or p.hangs)]
    return replace(_preempted(failure, by_host), failed_at_s=min(times, default=None))


def has_own_cause(post_mortem: PostMortem, lost: Collection[int] = ()) -> bool:
    """Returns False for collateral: a lost connection, or an abort by the coordination service."""
    if post_mortem.host in lost or post_mortem.agent_lost:
        return True
    if post_mortem.exception is not None:
        return post_mortem.exception.get("kind") not in NO_CAUSE
    # The coordination service aborts its processes (SIGABRT); so does a runtime whose device has failed.
    return post_mortem.exited and (post_mortem.signal != signal.SIGABRT or post_mortem.broken_device is not None)


def _first_cause(failed: Sequence[PostMortem], lost: Collection[int]) -> PostMortem | None:
    """Returns the earliest of these failures that is not collateral; None if all are."""
    causes = [p for p in failed if has_own_cause(p, lost)]
    for post_mortem in causes:
        # An unexplained error of the runtime may be a consequence of any other failure, and the hosts' clocks differ.
        if _kind(post_mortem, lost) != FailureKind.RUNTIME_ERROR:
            return post_mortem
    return causes[0] if causes else None


def _by_time(post_mortem: PostMortem) -> tuple[float, int]:
    """Sorts by time. A lost agent reports none and counts as the first: processes that outlive it fail because of it."""
    return (post_mortem.failed_at_s if post_mortem.failed_at_s is not None else 0.0, post_mortem.host)


def _kind(post_mortem: PostMortem, lost: Collection[int]) -> FailureKind:
    # First: what the process itself reported says more than the loss of its agent.
    if post_mortem.exception is not None and post_mortem.exception.get("kind") in KIND_OF_EXCEPTION:
        return KIND_OF_EXCEPTION[post_mortem.exception["kind"]]
    if post_mortem.host in lost or post_mortem.agent_lost:
        return FailureKind.HOST_LOST
    if post_mortem.broken_device is not None:
        return FailureKind.DEVICE_ERROR
    # The training process turns SIGTERM into a save and a clean end. One that dies of it was shut down with its machine.
    return FailureKind.PREEMPTION if post_mortem.signal == signal.SIGTERM else FailureKind.PROCESS_CRASH


def _of_one_host(kind: FailureKind, first: PostMortem, failed: Sequence[PostMortem], lost: Collection[int]) -> Failure:
    collateral = tuple(sorted(p.host for p in failed if p is not first and not has_own_cause(p, lost)))
    also = sorted(p.host for p in failed if p is not first and has_own_cause(p, lost))
    evidence = describe(first, first.host in lost) | ({"also_failed": also} if also else {})
    return Failure(kind=kind, host=first.host, evidence=evidence, collateral=collateral)


def _agreed(kind: FailureKind, failed: Sequence[PostMortem]) -> Failure:
    """The failure that several hosts reported for the same step."""
    reporters = [p for p in failed if p.exception is not None and KIND_OF_EXCEPTION.get(p.exception.get("kind", "")) == kind]
    collateral = tuple(sorted(p.host for p in failed if p not in reporters))
    evidence = describe(reporters[0], False)
    if kind != FailureKind.DESYNC:
        # All hosts see the same numbers: if several report them, none of them is to blame.
        host = reporters[0].host if len(reporters) == 1 else None
        return Failure(kind=kind, host=host, evidence=evidence, collateral=collateral)
    batches = _batches(reporters)
    host = _host_out_of_step(batches)
    who = "one of them" if host is None else f"host {host}"
    shown = ", ".join(f"host {host} at batch {batch}" for host, batch in sorted(batches.items())) or "which, nobody could say"
    evidence["summary"] = f"the hosts are out of step: {who} has skipped or repeated a step ({shown})"
    evidence["step"] = min((p.last_step for p in reporters if p.last_step is not None), default=None)
    return Failure(kind=kind, host=host, evidence=evidence, collateral=collateral)


def _batches(reporters: Sequence[PostMortem]) -> dict[int, int]:
    """Returns the batch index of each host at the step, by host. Each report has the indices of all hosts, so one is enough."""
    for post_mortem in reporters:
        if indices := (post_mortem.exception or {}).get("batch_indices"):
            return dict(enumerate(indices))
    return {}


def _host_out_of_step(batches: Mapping[int, int]) -> int | None:
    """Returns the host whose batch index no other host has. With two hosts nobody can say which of them is wrong: None."""
    count = Counter(batches.values())
    alone = [host for host, batch in batches.items() if count[batch] == 1]
    return alone[0] if len(alone) == 1 and len(batches) > 2 else None


def _hang(all_hosts: Sequence[PostMortem], overdue: Sequence[PostMortem]) -> Failure:
    """The failure of a gang in which a limit has passed. It names the host that the others wait for."""
    first = min(overdue, key=lambda p: (p.overdue or {}).get("t", 0.0))
    # A host that is done holds nobody up.
    blame = hang_analysis.blame([p.host_stacks for p in all_hosts if not p.done], (first.overdue or {})["phase"])
    culprit = next((p for p in all_hosts if p.host == blame.host), first)
    # The blamed host need not be the one whose limit passed: then the limit of the first one is shown.
    limit = culprit.overdue or first.overdue or {}
    facts = {
        "summary": _hang_summary(blame, culprit.state, limit),
        "step": culprit.last_step,
        **{name: limit.get(name) for name in ("phase", "limit_s", "waited_s")},
        "line": blame.line,
        "user_line": blame.user_line,
        "why": blame.why,
        "state": culprit.state,
        "batch_index": culprit.batch_index,
        "groups": blame.groups or None,
    }
    evidence = {name: value for name, value in facts.items() if value is not None}
    waiting = tuple(sorted(p.host for p in all_hosts if p.host != blame.host and not p.done))
    return Failure(kind=FailureKind.HANG, host=blame.host, evidence=evidence, collateral=waiting)


def _hang_summary(blame: hang_analysis.Blame, state: str | None, limit: Mapping[str, Any]) -> str:
    times = f"(waited {limit['waited_s']:.1f} s, limit {limit['limit_s']:g} s)"
    if blame.host is not None:
        frozen = f", frozen in state {state}" if state and state[0] in hang_analysis.STOPPED else ""
        line = blame.line or "where, its stacks do not tell"
        return f"host {blame.host} hangs in {limit['phase']}: {line}{frozen} {times}"
    groups = "; ".join(f"hosts {', '.join(map(str, group['hosts']))} at {group['line']}" for group in blame.groups)
    gang = f"the hosts hang in {limit['phase']} and no single host could be identified"
    return f"{gang}: {groups or 'their stacks do not tell where'} {times}"


def _preempted(failure: Failure, by_host: Mapping[int, PostMortem]) -> Failure:
    """Turns the failure into a preemption if the machine of its host had given notice, whatever the failure looked like."""
    post_mortem = None if failure.host is None else by_host.get(failure.host)
    # A notice does not excuse an error of the program.
    if post_mortem is None or post_mortem.notice is None or failure.kind not in MACHINE:
        return failure
    notice = post_mortem.notice
    summary = f"host {failure.host} was preempted, as announced ({notice.get('reason', 'notice')}); {failure.summary}"
    evidence = {**failure.evidence, "summary": summary, "notice": dict(notice)}
    return replace(failure, kind=FailureKind.PREEMPTION, evidence=evidence)


def _all_collateral(all_hosts: Sequence[PostMortem], failed: Sequence[PostMortem]) -> Failure:
    """The failure of a gang in which every single failure looks like collateral. Tries the likely causes in order."""
    alive = [p for p in all_hosts if p not in failed and not p.done]
    frozen = [p for p in alive if p.state and p.state[0] in hang_analysis.STOPPED]
    if len(frozen) == 1 and failed:  # the runtime of the others gave it up before a limit had passed
        return _no_answer(frozen[0], failed)
    links = [p for p in failed if (p.exception or {}).get("kind") == "link"]
    # With several of them nobody can say at which end a link broke.
    if len(links) == 1:
        return _single_cause(FailureKind.DEVICE_ERROR, links[0], failed)
    aborted = [p for p in failed if p.exception is None]
    if len(aborted) == 1:  # it explains the lost connections of the others, and nothing explains the abort
        return _single_cause(FailureKind.PROCESS_CRASH, aborted[0], failed)
    if len(alive) == 1 and failed and all(_is_coordinator_error(p) for p in failed):
        return _no_answer(alive[0], failed)
    facts = describe(failed[0], False) if failed else {}
    who = ", ".join(str(p.host) for p in failed) or "none"
    facts["summary"] = f"the hosts lost their connection to each other (hosts {who} said so), and none had failed by itself"
    return Failure(kind=FailureKind.COORDINATOR_LOST, host=None, evidence=facts, collateral=tuple(sorted(p.host for p in failed)))


def _single_cause(kind: FailureKind, cause: PostMortem, failed: Sequence[PostMortem]) -> Failure:
    collateral = tuple(p.host for p in failed if p is not cause)
    return Failure(kind=kind, host=cause.host, evidence=describe(cause, False), collateral=collateral)


def _is_coordinator_error(post_mortem: PostMortem) -> bool:
    return post_mortem.exception is not None and post_mortem.exception.get("type") == "CoordinatorError"


def _no_answer(alive: PostMortem, failed: Sequence[PostMortem]) -> Failure:
    """The hang of the only host that is left: the others gave up waiting for it before a limit had passed."""
    blame = hang_analysis.blame([alive.host_stacks], "")
    reason = str((failed[0].exception or {}).get("message", "")).splitlines()
    where = f" at {blame.line}" if blame.line else ""
    facts = {
        "summary": f"host {alive.host} hangs{where}: " + (reason[0] if reason else "it did not answer the others"),
        "step": alive.last_step,
        "line": blame.line,
        "state": alive.state,
        "groups": blame.groups or None,
    }
    evidence = {name: value for name, value in facts.items() if value is not None}
    collateral = tuple(sorted(p.host for p in failed))
    return Failure(kind=FailureKind.HANG, host=alive.host, evidence=evidence, collateral=collateral)


NO_MODULE = re.compile(r"ModuleNotFoundError\W+No module named \W*([\w.]+)")
ADDRESS = re.compile(r"\bip=([\w.:]+)")


def explain_missing_code(text: str) -> str | None:
    """Returns which module is missing on which machine, and what to do; None if the text tells of something else."""
    missing = NO_MODULE.search(text)
    if missing is None:
        return None
    machine = ADDRESS.search(text)
    where = f"on the machine {machine[1]}" if machine else "on one of the machines of the cluster"
    return f"no module named {missing[1]!r} {where}: {HOW_TO_SHIP}"
