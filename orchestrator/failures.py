"""What happened to a generation: one typed failure out of the post-mortems of all hosts. Pure.

When one host fails, the others fail because of it within 0.1 s: their collectives lose a peer, or the coordination service
aborts their process. Those are *collateral*. The failure is the earliest event that has a cause of its own.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


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


KIND_OF_EXCEPTION = {
    "user": FailureKind.USER_ERROR,
    "data": FailureKind.DATA_ERROR,
    "non_finite": FailureKind.NON_FINITE,
    "out_of_memory": FailureKind.OUT_OF_MEMORY,
    "storage": FailureKind.STORAGE_ERROR,
    "crash": FailureKind.PROCESS_CRASH,
}
"""By the `kind` that the training process gave its own exception; `collateral` is no cause."""


@dataclass(frozen=True, kw_only=True)
class PostMortem:
    """What is known of one host's process after the gang was halted. A process that we killed has no exit of its own."""

    host: int
    exit_code: int | None = None
    signal: int | None = None
    exception: Mapping[str, Any] | None = None
    """The `exception` event of the process: type, message, traceback, step, kind."""
    last_step: int | None = None
    failed_at_s: float | None = None
    """When it failed (its exception, else its exit), on that host's clock."""
    agent_lost: bool = False
    done: bool = False
    """It had said that training was finished: its end with status 0 is no failure."""
    log_tail: Sequence[str] = ()

    @property
    def exited(self) -> bool:
        """By itself, not ended by us, and not because it was done."""
        if self.done and self.exit_code == 0:
            return False
        return self.exit_code is not None or self.signal is not None

    @property
    def failed(self) -> bool:
        return self.exited or self.exception is not None or self.agent_lost


@dataclass(frozen=True, kw_only=True)
class Failure:
    kind: FailureKind
    host: int | None
    """None when no single host is to blame."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """JSON-able: `summary` (a line for people) and, as far as known, `step`, `exit_code`, `signal`, `hint`, `exception`,
    `log_tail`, `also_failed` (other hosts with a cause of their own)."""
    collateral: tuple[int, ...] = ()
    """Hosts that failed because of this one."""

    @property
    def step(self) -> int | None:
        return self.evidence.get("step")

    @property
    def exception(self) -> Mapping[str, Any] | None:
        return self.evidence.get("exception")

    @property
    def summary(self) -> str:
        return self.evidence.get("summary", str(self.kind))


def read_post_mortem(host: int, halted: Mapping[str, Any] | None, done: bool = False) -> PostMortem:
    """From what an agent's `halt()` returned; None stands for an agent that did not answer."""
    if halted is None:
        return PostMortem(host=host, agent_lost=True, done=done)
    exited, exception, heartbeat = (halted.get(key) or {} for key in ("exit", "exception", "last_heartbeat"))
    return PostMortem(
        host=host,
        exit_code=exited.get("code"),
        signal=exited.get("signal"),
        done=done,
        exception=exception or None,
        last_step=exception.get("step", heartbeat.get("step")),
        failed_at_s=exception.get("t", exited.get("t")),
        log_tail=tuple(exited.get("log_tail", ())),
    )


def classify(post_mortems: Sequence[PostMortem], agent_lost: Collection[int] = ()) -> Failure:
    """The failure that the others followed from. `agent_lost`: hosts whose agent is gone, with or without a post-mortem."""
    lost = set(agent_lost) | {dead.host for dead in post_mortems if dead.agent_lost}
    known = {dead.host: dead for dead in post_mortems}
    dead = [known.get(host, PostMortem(host=host, agent_lost=True)) for host in sorted(set(known) | lost)]
    failed = sorted((d for d in dead if d.failed or d.host in lost), key=_when)
    first = next((d for d in failed if has_own_cause(d, lost)), None)
    if first is None:
        return _without_own_cause(failed)
    collateral = tuple(sorted(d.host for d in failed if d is not first and not has_own_cause(d, lost)))
    also = sorted(d.host for d in failed if d is not first and has_own_cause(d, lost))
    evidence = describe(first, first.host in lost) | ({"also_failed": also} if also else {})
    return Failure(kind=_kind(first, lost), host=first.host, evidence=evidence, collateral=collateral)


def has_own_cause(dead: PostMortem, lost: Collection[int] = ()) -> bool:
    """False for what a failure of another host explains: a lost connection, or an abort by the coordination service."""
    if dead.host in lost or dead.agent_lost:
        return True
    if dead.exception is not None:
        return dead.exception.get("kind") != "collateral"
    return dead.exited and dead.signal != signal.SIGABRT


def describe(dead: PostMortem, agent_lost: bool) -> dict[str, Any]:
    """Evidence: only what is known, in the order in which a person wants to read it."""
    facts = {
        "summary": _summary(dead, agent_lost),
        "step": dead.last_step,
        "exit_code": dead.exit_code,
        "signal": _signal_name(dead.signal) if dead.signal is not None else None,
        "hint": _hint(dead, agent_lost),
        "exception": dict(dead.exception) if dead.exception else None,
        "log_tail": list(dead.log_tail) or None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _when(dead: PostMortem) -> tuple[float, int]:
    """Sorts by time; a lost agent tells none: it counts as the first, since processes that outlive it are its victims."""
    return (dead.failed_at_s if dead.failed_at_s is not None else 0.0, dead.host)


def _kind(dead: PostMortem, lost: Collection[int]) -> FailureKind:
    if dead.exception is not None and dead.exception.get("kind") in KIND_OF_EXCEPTION:
        return KIND_OF_EXCEPTION[dead.exception["kind"]]
    if dead.host in lost or dead.agent_lost:
        return FailureKind.HOST_LOST
    # The training process turns SIGTERM into a save and a clean end: one that dies of it was taken down with its machine.
    return FailureKind.PREEMPTION if dead.signal == signal.SIGTERM else FailureKind.PROCESS_CRASH


def _without_own_cause(failed: Sequence[PostMortem]) -> Failure:
    """Every failure looks like the consequence of another one."""
    aborted = [dead for dead in failed if dead.exception is None]
    if len(aborted) == 1:
        # One abort explains the lost connections of the others; nothing explains the abort.
        others = tuple(dead.host for dead in failed if dead is not aborted[0])
        return Failure(
            kind=FailureKind.PROCESS_CRASH, host=aborted[0].host, evidence=describe(aborted[0], False), collateral=others
        )
    facts = describe(failed[0], False) if failed else {}
    who = ", ".join(str(dead.host) for dead in failed) or "none"
    facts["summary"] = f"the hosts lost their connection to each other (hosts {who} said so), and none had failed by itself"
    return Failure(
        kind=FailureKind.COORDINATOR_LOST, host=None, evidence=facts, collateral=tuple(sorted(dead.host for dead in failed))
    )


def _summary(dead: PostMortem, agent_lost: bool) -> str:
    at = f" at step {dead.last_step}" if dead.last_step is not None else ""
    if dead.exception is not None:
        message = str(dead.exception.get("message", "")).strip().splitlines()
        return f"host {dead.host}: {dead.exception.get('type', 'exception')}{at}" + (f": {message[0]}" if message else "")
    if agent_lost:
        return f"host {dead.host}: its agent is gone{at} (machine, node or agent process lost)"
    if dead.signal is not None:
        return f"host {dead.host}: training process ended by {_signal_name(dead.signal)}{at}"
    return f"host {dead.host}: training process ended with status {dead.exit_code}{at}, before training was done"


def _hint(dead: PostMortem, agent_lost: bool) -> str | None:
    if dead.signal == signal.SIGKILL and not agent_lost:
        return "SIGKILL comes from outside the process: possibly the kernel's out-of-memory killer, or a person"
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
