"""The events of a host, of its training process and of its agent: a schema for each, which mypy checks where one is made and
where one is read.

They travel as JSON lines, so they are dicts. `Runtime.emit` sends one:

    runtime.current().emit({"ev": "saved", "step": 100, "path": "runs/a/checkpoints/100"})

and a reader that asks for `event["ev"]` knows the other fields:

    match event["ev"]:
        case "saved":
            print(event["path"])

Those of an agent come last. An agent passes on any JSON object of its process, and goes by a few fields of it: READ_BY_AGENT.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict, get_args, get_type_hints

from gangway.storage import shapes


class Envelope(TypedDict):
    """The fields that are added to an event on its way."""

    t: NotRequired[float]
    """When it was sent, in seconds since 1970, by the clock of its machine. `emit` adds it."""
    n: NotRequired[int]
    """Its number among the events of its host. The agent adds it; a heartbeat has none."""
    generation: NotRequired[int | None]
    """The agent adds it."""


class Warm(Envelope):
    """A standby has done all that needs no device."""

    ev: Literal["warm"]


class PhaseEntered(Envelope):
    ev: Literal["phase"]
    phase: str
    """A name from `gangway.wire.limits.PHASES`."""


class Joined(Envelope):
    """The process is a member of its `jax.distributed` job."""

    ev: Literal["joined"]
    pid: NotRequired[int]
    machine: NotRequired[str]
    """Where the process runs, by the name that the machine gives itself."""


class FirstStep(Envelope):
    """The first step of this process is complete, on its devices too."""

    ev: Literal["first_step"]
    step: int
    resumed_step: NotRequired[int]
    """The step that it resumed from; default: the one before `step`."""


class Heartbeat(Envelope):
    """The progress of the loop. A thread of its own sends it, and only when there is progress."""

    ev: Literal["heartbeat"]
    step: int
    """The steps completed on the devices."""
    batch_index: int
    """The batches dispatched."""
    evaluated_batches: NotRequired[int]
    """The batches of all evaluations of this process so far."""
    busy_s: NotRequired[float]
    """Seconds since the loop began in which the host did something other than wait for its devices."""
    usage: NotRequired[Mapping[str, float]]
    """How much of its machine the host used at its last publish (`trainers.metrics.host_usage`)."""


class Evaluating(Envelope):
    """How far an evaluation is. Host 0 alone sends it, at most once a second."""

    ev: Literal["evaluating"]
    unit: str
    done: int
    """The batches that were given to the devices."""
    total: int | None
    """None: not known."""


class Saving(Envelope):
    """A checkpoint was begun. `saved` or `save_failed` follows, while the training goes on."""

    ev: Literal["saving"]
    step: int


class Saved(Envelope):
    """A checkpoint is complete."""

    ev: Literal["saved"]
    step: int
    path: str


class SaveFailed(Envelope):
    """A checkpoint could not be written; the next save tries again."""

    ev: Literal["save_failed"]
    step: int
    error: str


class RequestsFailed(Envelope):
    """Requests of this process to a bucket have failed since the last such event."""

    ev: Literal["requests_failed"]
    number: int
    why: str
    """Of the last of them."""


class RequestsMade(Envelope):
    """What this process has asked of buckets since the last such event: requests and bytes by kind (`storage.usage`)."""

    ev: Literal["requests_made"]
    counts: dict[str, int]


class RefusedCheckpoint(TypedDict):
    step: int
    why: str


class Restored(Envelope):
    ev: Literal["restored"]
    step: int
    skipped: Sequence[RefusedCheckpoint]
    """Newer checkpoints that were not used."""
    source: NotRequired[Literal["memory", "storage"]]
    """Where the state came from. Absent: there are no snapshots, and it came from storage."""


class Snapshots(Envelope):
    """The gang goes on from a snapshot of this generation, or has one of its own that is whole on every host: none of an older
    generation is needed any more."""

    ev: Literal["snapshots"]
    since: int


class Metrics(Envelope):
    """Published numbers. Host 0 alone sends them."""

    ev: Literal["metrics"]
    step: int
    metrics: dict[str, float]
    seconds: NotRequired[Mapping[str, float]]
    """How the host spent its time since the last publish, in seconds: `checkpoint`, `evaluation`, `preview`; and `data_wait`, of
    the host that waited longest for each batch."""
    kind: NotRequired[Literal["train", "eval"]]
    distributions: NotRequired[Mapping[str, Any]]
    """Histograms by the name of their array."""


class Preview(Envelope):
    ev: Literal["preview"]
    step: int
    previews: Sequence[Mapping[str, str]]
    """`prompt` and `text` of each."""


class AnomalyFields(TypedDict):
    """The decision about a loss that is not finite, or is a spike."""

    kind: str
    """`non_finite`, `loss_spike` or `broken_state` (`trainers.loop.anomalies.KINDS`)."""
    batch_index: int
    loss: float | None
    expected: float | None
    """JSON has no NaN: None stands for a number that is not finite."""
    action: str
    """`skip` or `rollback`."""
    skipped_batches: Sequence[int]
    origin: NotRequired[str]
    """Where the first value that is not finite was made, as far as it was looked for."""


class AnomalyTreated(AnomalyFields, Envelope):
    """The hosts have dealt with an anomaly by themselves. Host 0 alone sends it."""

    ev: Literal["anomaly"]
    restored_step: int | None
    """The step of the checkpoint that was rolled back to."""


def course_left_at(anomaly: AnomalyTreated) -> int | None:
    """Returns the last step of which the numbers are still true after a rollback, which trains on without some batches. None:
    training has not gone back, or leaves nothing out."""
    if anomaly["restored_step"] is None or not anomaly["skipped_batches"]:
        return None
    # Up to the first batch that is left out, everything comes again as it was. The numbers of step n are of batches before n.
    return max(anomaly["restored_step"], min(anomaly["skipped_batches"]))


class Note(Envelope):
    """Something for people to read."""

    ev: Literal["note"]
    message: str


class Profile(Envelope):
    """A profile was written, or could not be."""

    ev: Literal["profile"]
    id: str | None
    """The id of the request; None: it was on schedule."""
    problem: str | None
    """None: it is written."""
    path: NotRequired[str]
    first_step: NotRequired[int]
    last_step: NotRequired[int]


class MachineTakenAway(TypedDict):
    reason: str
    deadline_s: float | None
    """The seconds that are left, if known."""


class Notice(MachineTakenAway, Envelope):
    """The machine is about to go away."""

    ev: Literal["notice"]


class FailureKind(TypedDict):
    """What an error says about trying again."""

    kind: str
    """user, data, non_finite, loss_spike, desync, out_of_memory, storage, transient, device (of this host), runtime (JAX's own,
    of unknown cause), collateral (another host's failure), link (this host's or another one's)."""
    deterministic: bool
    mistake: NotRequired[bool]
    """Whether it looks like a mistake."""
    batch_indices: NotRequired[Sequence[int] | None]
    """The batch index of each host, if they are out of step."""


class ExceptionRaised(FailureKind, Envelope):
    """The process is about to end with an exception."""

    ev: Literal["exception"]
    type: str
    message: str
    traceback: str
    user_frame: str | None
    """Where it arose in the user's own code (`gangway.errors.user_frame`)."""
    user_traceback: str
    """`gangway.errors.user_traceback`."""
    step: int


class Result(TypedDict):
    stop_reason: str
    """One of `gangway.stop_reason.StopReason`."""
    result: Mapping[str, Any]
    """The final metrics, and the path of the last checkpoint."""


class Done(Envelope):
    """Training is over, on all hosts. A precompilation has no result."""

    ev: Literal["done"]
    step: int
    stop_reason: NotRequired[str]
    result: NotRequired[Mapping[str, Any]]


Event = (
    Warm
    | PhaseEntered
    | Joined
    | FirstStep
    | Heartbeat
    | Evaluating
    | Saving
    | Saved
    | SaveFailed
    | RequestsFailed
    | RequestsMade
    | Restored
    | Snapshots
    | Metrics
    | Preview
    | AnomalyTreated
    | Note
    | Profile
    | Notice
    | ExceptionRaised
    | Done
)


# ---------------------------------------------------------------------- events of the agent


class Exit(Envelope):
    """The process has ended, and the agent did not kill it."""

    ev: Literal["exit"]
    code: int | None
    signal: int | None
    log_tail: Sequence[str]
    pid: int


class Position(TypedDict):
    """How far a process has come, by its last heartbeat; None before the first."""

    step: int | None
    batch_index: int | None


class Overdue(Position, Envelope):
    """The process has made no progress for longer than it may."""

    ev: Literal["overdue"]
    phase: str
    limit_s: float
    waited_s: float
    stacks: str | None
    state: str | None
    """The state of the process in the kernel."""
    log_tail: Sequence[str]


class MachineNotice(MachineTakenAway, Envelope):
    """The machine is about to be taken away."""

    ev: Literal["notice"]
    node: bool
    """True if the machine gave notice; false if only the process got SIGTERM."""


class StartFailed(Envelope):
    """No process could be started for the generation."""

    ev: Literal["exception"]
    type: str
    message: str
    kind: str
    traceback: str
    step: None


class Printed(Envelope):
    """Lines that the process has printed. Only of hosts whose orders ask for it."""

    ev: Literal["printed"]
    lines: Sequence[str]
    left_out: int
    """How many lines before these were left out: its log has them."""


AgentEvent = Exit | Overdue | MachineNotice | Note | StartFailed | Printed

HostEvent = Event | AgentEvent
"""An event of a host: of its training process, or of its agent."""

AnyEvent = dict[str, Any]
"""An event as it travels: any JSON object."""
READ_BY_AGENT: Mapping[str, frozenset[str]] = {
    kind: frozenset(fields)
    for kind, fields in {
        "phase": ("phase",),
        "first_step": ("step",),
        "heartbeat": ("step", "batch_index", "evaluated_batches"),
        "saving": ("step",),
        "saved": ("step",),
        "save_failed": ("step",),
        "profile": ("path",),
        "snapshots": ("since",),
        "exception": ("type", "message"),
    }.items()
}
"""The fields of a process's events by which its agent goes."""


def problem_of(event: Mapping[str, Any]) -> str:
    """Returns what is wrong with an event of a process, as a sentence; "" if it is one of Event."""
    return problem_in(Event, event)


def problem_in(schemas: Any, event: Any) -> str:
    """Returns what is wrong with an event that has to be one of a union of TypedDicts; "" if it is one."""
    if not isinstance(event, Mapping) or not isinstance(event.get("ev"), str):
        return "not an event: expected an object with `ev`"
    checks = _checks(schemas).get(event["ev"])
    if checks is None:
        return f"there is no event {event['ev'][:50]!r}"
    problems = [check(event, "") for check in checks]
    return "" if "" in problems else problems[0]


@functools.cache
def _checks(schemas: Any) -> dict[str, list[shapes.Check]]:
    found: dict[str, list[shapes.Check]] = {}
    for schema in get_args(schemas):
        for name in get_args(get_type_hints(schema)["ev"]):
            found.setdefault(name, []).append(shapes.check_of(schema))
    return found


def problem_for_driver(event: Any) -> str:
    """Returns what is wrong with an event that an agent passed on, as a sentence; "" if it is one of HostEvent. What a training
    process sends is checked there, too; but the user's code is in that process."""
    if problem := problem_in(HostEvent, event):
        return problem
    at_s = event.get("t")
    return "" if at_s is not None and math.isfinite(at_s) else f"t = {at_s}: expected a time"


def problem_for_agent(event: Any) -> str:
    """Returns why an agent cannot go by an event of its process; "" if it can."""
    if not isinstance(event, dict) or not isinstance(event.get("ev"), str):
        return "expected an object with `ev`"
    fields = READ_BY_AGENT.get(event["ev"])
    return "" if fields is None else shapes.problem(_schemas()[event["ev"]], event, only=fields)


@functools.cache
def _schemas() -> dict[str, type]:
    """Returns the schema of each kind of event of a training process."""
    return {kind: schema for schema in get_args(Event) for kind in get_args(get_type_hints(schema)["ev"])}
