"""The schemas of the events that the driver sends to the console; mypy checks them where one is made and where one is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

Level = Literal["info", "warning", "error"]

Unit = Literal["tokens", "examples"]


class RunStarted(TypedDict):
    """The size of the run, before it starts."""

    ev: Literal["run"]
    name: str
    hosts: int
    devices: int | None
    parameters: int | None
    tokens_per_step: int | None
    max_steps: int | None
    unit: NotRequired[Unit]
    """What the throughput is counted in; default: tokens."""


class Status(TypedDict):
    ev: Literal["status"]
    state: str
    """A label of `gangway.wire.limits.PHASES`, or a state of the driver."""
    message: NotRequired[str]


class GenerationStarted(TypedDict):
    ev: Literal["generation"]
    generation: int
    hosts: int


class Metrics(TypedDict):
    ev: Literal["metrics"]
    step: int
    metrics: Mapping[str, float]
    kind: str
    """`train` or `eval`."""
    goodput: NotRequired[float]
    """The share of the wall clock that was spent in steps that were not repeated, until now."""


class Evaluating(TypedDict):
    ev: Literal["evaluating"]
    unit: str
    done: int
    """Batches."""
    total: int | None


class Preview(TypedDict):
    ev: Literal["preview"]
    step: int
    previews: Sequence[Mapping[str, str]]


class CheckpointSaved(TypedDict):
    ev: Literal["checkpoint"]
    step: int
    path: str


class CheckpointGone(TypedDict):
    """The newest checkpoint is no longer where it was saved."""

    ev: Literal["checkpoint_gone"]
    step: int


class IncidentHappened(TypedDict):
    """An incident began, or is over (`recovered`). See `Incident.to_dict`."""

    ev: Literal["incident", "recovered"]
    incident: Mapping[str, Any]


class Note(TypedDict):
    ev: Literal["note"]
    message: str
    level: NotRequired[Level]


class Printed(TypedDict):
    """Lines that the process of a host has printed (`driver.console_hosts`)."""

    ev: Literal["printed"]
    host: int
    lines: Sequence[str]
    left_out: int


class Summary(TypedDict):
    """The end of the run. See `orchestrator.run_state.summary.build`."""

    ev: Literal["summary"]
    summary: Mapping[str, Any]


ConsoleEvent = (
    RunStarted
    | Status
    | GenerationStarted
    | Metrics
    | Evaluating
    | Preview
    | CheckpointSaved
    | CheckpointGone
    | IncidentHappened
    | Note
    | Printed
    | Summary
)
