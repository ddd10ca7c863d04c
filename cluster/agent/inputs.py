"""What happens to an agent, as its state (`state.py`) takes it: a call of the driver, a change of a process, the time.

A call has a name, `call`, which its answer carries (`effects.Answer`, `effects.Refuse`), and the term of its driver.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cluster.agent.process_record import ExitStatus, ProcessRecord
from cluster.agent.watchdog import Alarm
from gangway.wire.events import Event, MachineTakenAway


class Now(NamedTuple):
    """The time of an input, by both clocks of the agent's machine."""

    s: float
    """Monotonic: all waits and limits are counted by it."""
    wall_s: float
    """Seconds since 1970, for the times of events."""


# ---------------------------------------------------------------------- calls of a driver


@dataclass(frozen=True)
class Call:
    """A call that only renews the lease (`HostAgent.keep`, `describe`), and the base of all others. Its answer is None."""

    call: Hashable
    driver_term: int


@dataclass(frozen=True)
class TakeOver(Call):
    """Answer: the part of `TakenOver` that is not of the machine."""


@dataclass(frozen=True)
class Prepare(Call):
    preparation: Mapping[str, Any]


@dataclass(frozen=True)
class Start(Call):
    """Answer: `Started` without `next_port`."""

    orders: Any


@dataclass(frozen=True)
class Order(Call):
    """Answer: whether there is a process that can take the message."""

    message: Any


@dataclass(frozen=True)
class Poll(Call):
    """Answer: `Polled`."""

    cursor: int
    wait_s: float


@dataclass(frozen=True)
class TakeStacks(Call):
    """Answer: None, when the stacks are taken or the time is over."""

    timeout_s: float


@dataclass(frozen=True)
class Halt(Call):
    """Answer: `Halted` without `dying_state`."""

    timeout_s: float
    cursor: int | None


@dataclass(frozen=True)
class Shutdown(Call):
    """Answer: None, at once; the processes may still be dying."""


# ---------------------------------------------------------------------- processes


@dataclass(frozen=True)
class Spawned:
    """A process has been started with this preparation."""

    process: ProcessRecord
    preparation: Mapping[str, Any]


@dataclass(frozen=True)
class SpawnFailed:
    error: Exception


@dataclass(frozen=True)
class Said:
    """A process has sent an event."""

    process: ProcessRecord
    event: Event


@dataclass(frozen=True)
class Exited:
    process: ProcessRecord
    how: ExitStatus
    log_tail: Sequence[str]


@dataclass(frozen=True)
class KernelState:
    """The state of a process in the kernel, read just before it is killed."""

    process: ProcessRecord
    state: str


@dataclass(frozen=True)
class StacksTaken:
    process: ProcessRecord
    text: str | None


@dataclass(frozen=True)
class OverdueSeen:
    """What could be read of a process that is overdue: its state in the kernel, and the end of its log."""

    alarm: Alarm
    state: str | None
    log_tail: Sequence[str]


# ---------------------------------------------------------------------- the rest


@dataclass(frozen=True)
class Reported:
    """An event of the agent itself, about the newest generation."""

    event: Mapping[str, Any]


@dataclass(frozen=True)
class Notice:
    """The machine is about to be taken away. None: that was withdrawn."""

    notice: MachineTakenAway | None


@dataclass(frozen=True)
class Printed:
    """The current process has printed something: it is alive."""


@dataclass(frozen=True)
class TimePassed:
    """Calls whose time is over are answered."""


@dataclass(frozen=True)
class Look:
    """The limits of the current process are looked at."""


@dataclass(frozen=True)
class LeaseEnded:
    """No driver has called for too long: all processes end, and nothing is started any more."""


Input = (
    Call
    | Spawned
    | SpawnFailed
    | Said
    | Exited
    | KernelState
    | StacksTaken
    | OverdueSeen
    | Reported
    | Notice
    | Printed
    | TimePassed
    | Look
    | LeaseEnded
)
