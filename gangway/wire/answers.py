"""The answers of an agent to its driver: a schema for each method of `HostAgent` that returns an object.

`NotRequired` fields are absent where the docstring says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired, TypedDict

from gangway.wire.events import AnyEvent, ExceptionRaised, Exit, Heartbeat, MachineNotice, Overdue
from gangway.wire.orders import Start


class RayNode(TypedDict):
    host_ip: str
    node_id: str | None
    """None without Ray."""
    labels: Mapping[str, str]


class Description(RayNode):
    """Where an agent runs."""

    hostname: str
    pid: int
    log_dir: str
    log_copies: str
    next_port: int
    """Free now: for the coordinator of the next generation."""


class TakenOver(Description):
    """The state of an agent, for a driver that takes it over."""

    generation: int | None
    """That of the newest `start`; None before the first."""
    orders: Start | None
    alive: bool
    """It has a process, or waits for one."""
    done: bool
    first_event: int
    next_event: int


class LogPaths(TypedDict):
    log_path: str | None
    log_copy: str | None


class Started(LogPaths):
    pid: int
    next_port: int


class Told(TypedDict):
    """Events since a cursor."""

    cursor: int
    """For the next question."""
    events: list[AnyEvent]
    missed: NotRequired[int]
    """How many events were dropped before they were read. Absent: none."""
    facts: NotRequired[list[AnyEvent]]
    """What is known of the generation. Only where events were missed."""


class HostState(LogPaths):
    t: float
    pid: int | None
    generation: int | None
    alive: bool
    silence: Overdue | None
    standby: str
    """`none`, `starting`, `warm` or `failed`."""
    standby_pid: int | None
    notice: MachineNotice | None


class Polled(Told):
    heartbeat: Heartbeat | None
    host_state: HostState


class PostMortem(TypedDict):
    """What is known of a process after its end; all None if there was none."""

    pid: int | None
    exit: Exit | None
    """None if the agent killed it."""
    exception: ExceptionRaised | None
    last_heartbeat: Heartbeat | None
    batch_index: int | None
    phase: str | None
    done: bool
    state: str | None
    """Its state in the kernel just before it was killed."""


class Findings(TypedDict):
    stacks: str | None
    overdue: Overdue | None


class Halted(PostMortem, LogPaths, Findings):
    generation: int | None
    notice: MachineNotice | None
    gone: bool
    clock_s: float
    """This machine's wall clock at the call."""
    dying_s: NotRequired[float]
    """The seconds since the first halt. Absent once the process is gone."""
    dying_state: NotRequired[str]
    """The state of the process in the kernel now. Absent once it is gone."""
    cursor: NotRequired[int]
    """As in `Told`, and so the next three. Absent if the caller gave no cursor."""
    events: NotRequired[list[AnyEvent]]
    missed: NotRequired[int]
    facts: NotRequired[list[AnyEvent]]


class Profiled(TypedDict):
    host: int | None
    """None: it is none of those that were asked for, or does not train now."""
    path: str | None
    problem: str | None
    """None: the profile is written."""
