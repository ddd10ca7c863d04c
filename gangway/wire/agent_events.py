"""The events of a host: those that its agent sends, and the fields of its process's events that the agent reads.

An agent passes on any JSON event of its process, and reads only the fields that are declared here. The complete schema of a
training process's events is `gangway.wire.events`; a test checks that the two agree.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypedDict, get_args, get_type_hints

from cluster.agent.fields import problem_in

Event = dict[str, Any]
"""As it travels: any JSON object."""


MAX_TEXT = 4000
"""The letters that are kept of a message."""


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """Returns the text, of a long one the beginning and the end. It says how much was left out."""
    if len(text) <= limit:
        return text
    begin, end = limit * 2 // 3, limit // 3
    return f"{text[:begin]} ... [{len(text) - begin - end:,} letters left out] ... {text[-end:]}"


class Envelope(TypedDict):
    t: float
    """When it was sent, in seconds since 1970, by the clock of its machine."""
    n: NotRequired[int]
    """Its number among the events of its host (`EventLog`)."""
    generation: NotRequired[int | None]


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


class MachineTakenAway(TypedDict):
    reason: str
    deadline_s: float | None
    """Seconds until then; None if the source does not tell."""


class MachineNotice(MachineTakenAway, Envelope):
    """The machine is about to be taken away."""

    ev: Literal["notice"]
    node: bool
    """True if the machine gave notice; false if only the process got SIGTERM."""


class Note(Envelope):
    """Something for people to read."""

    ev: Literal["note"]
    message: str


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

# ---------------------------------------------------------------------- events of the process, as the agent reads them


class Warm(Envelope):
    ev: Literal["warm"]


class Joined(Envelope):
    ev: Literal["joined"]


class PhaseEntered(Envelope):
    ev: Literal["phase"]
    phase: str


class FirstStep(Envelope):
    ev: Literal["first_step"]
    step: int


class Heartbeat(Envelope):
    ev: Literal["heartbeat"]
    step: int
    batch_index: int
    evaluated_batches: NotRequired[int]


class Save(Envelope):
    ev: Literal["saving", "saved", "save_failed"]
    step: int


class Profile(Envelope):
    ev: Literal["profile"]
    id: str | None
    problem: str | None
    path: NotRequired[str]


class Raised(Envelope):
    ev: Literal["exception"]
    type: str
    message: str


class Done(Envelope):
    ev: Literal["done"]


ProcessEvent = Warm | Joined | PhaseEntered | FirstStep | Heartbeat | Save | Profile | Raised | Done


def problem_of(event: Any) -> str:
    """Returns why the agent cannot go by an event of its process; "" if it can. It looks at the fields that are declared here, as
    far as they are numbers or text."""
    if not isinstance(event, dict) or not isinstance(event.get("ev"), str):
        return "expected an object with `ev`"
    schema = _schemas().get(event["ev"])
    return problem_in(schema, event) if schema is not None else ""


@functools.cache
def _schemas() -> dict[str, type]:
    """Returns the schema of each kind of event of a process that is declared here."""
    return {kind: schema for schema in get_args(ProcessEvent) for kind in get_args(get_type_hints(schema)["ev"])}
