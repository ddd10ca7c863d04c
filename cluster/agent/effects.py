"""What an agent has to do, as its state (`state.py`) decides it. The agent around it does it, with threads and processes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.agent.process_record import ProcessRecord
from cluster.agent.watchdog import Alarm


@dataclass(frozen=True)
class Send:
    """Write a line to the process. With a `call`, its answer is whether the line was written."""

    process: ProcessRecord
    message: Mapping[str, Any]
    call: Hashable | None = None


@dataclass(frozen=True)
class Answer:
    """The call of this name gets this value. Its thread first writes the line of `first`, if any: a write may block."""

    call: Hashable
    value: Any = None
    first: Send | None = None


@dataclass(frozen=True)
class Refuse:
    """The call of this name raises this error."""

    call: Hashable
    error: Exception


@dataclass(frozen=True)
class RefuseSlow:
    """The `start` of this name raises TimeoutError: its process was not warm in time, or a former one (`dying`) is still there.
    What the log and the kernel say of the process (None: there is none) explains it."""

    call: Hashable
    generation: int
    process: ProcessRecord | None
    waited_s: float
    dying: bool = False


@dataclass(frozen=True)
class Spawn:
    """Start a process with this preparation: the answer is `inputs.Spawned` or `inputs.SpawnFailed`."""

    preparation: Mapping[str, Any]


@dataclass(frozen=True)
class Kill:
    """Send SIGKILL to the process and its group: `inputs.Exited` follows."""

    process: ProcessRecord


@dataclass(frozen=True)
class ReadStacks:
    """Take the stacks of the process: `inputs.StacksTaken` follows."""

    process: ProcessRecord


@dataclass(frozen=True)
class ReadOverdue:
    """Read the state and the log of the process that is overdue (None: there is none): `inputs.OverdueSeen` follows."""

    alarm: Alarm
    process: ProcessRecord | None


Effect = Answer | Refuse | RefuseSlow | Spawn | Send | Kill | ReadStacks | ReadOverdue
