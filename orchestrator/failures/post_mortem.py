"""What is known of one host's process after the gang was halted, and how to say it. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.failures.hang_analysis import HostStacks
from trainers.foreign_errors import broken_device_in


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
    """When it failed (its exception, else its exit; of a hang, when it last got further), on that host's clock."""
    agent_lost: bool = False
    done: bool = False
    """It had said that training was finished: its end with status 0 is no failure."""
    log_tail: Sequence[str] = ()
    stacks: str | None = None
    """Of all its threads, taken while it was alive."""
    state: str | None = None
    """What the kernel said of it before it was killed: `T (stopped)`."""
    overdue: Mapping[str, Any] | None = None
    """The agent's event that a limit has passed: phase, limit_s, waited_s."""
    notice: Mapping[str, Any] | None = None
    """The event that its machine is about to go away."""
    batch_index: int | None = None

    @property
    def exited(self) -> bool:
        """By itself, not ended by us, and not because it was done."""
        if self.done and self.exit_code == 0:
            return False
        return self.exit_code is not None or self.signal is not None

    @property
    def failed(self) -> bool:
        return self.exited or self.exception is not None or self.agent_lost

    @property
    def hangs(self) -> bool:
        return self.overdue is not None and not self.failed and not self.done

    @property
    def broken_device(self) -> str | None:
        """What it printed of a broken device before the runtime aborted it; None if it did not, or was not aborted."""
        return broken_device_in(self.log_tail) if self.exited and self.exception is None else None

    @property
    def seen(self) -> HostStacks:
        return HostStacks(host=self.host, text=self.stacks, state=self.state, batch_index=self.batch_index)


def read_post_mortem(
    host: int,
    halted: Mapping[str, Any] | None,
    asked_at_s: float,
    *,
    done: bool = False,
    notice: Mapping[str, Any] | None = None,
) -> PostMortem:
    """From what an agent's `halt()` returned; None stands for an agent that did not answer. `asked_at_s`: when it was asked, by
    the driver's clock. `notice`: one that the driver got elsewhere (its node is being drained)."""
    if halted is None:
        return PostMortem(host=host, agent_lost=True, done=done, notice=notice)
    exited, exception, heartbeat = (halted.get(key) or {} for key in ("exit", "exception", "last_heartbeat"))
    overdue = halted.get("overdue")
    stuck_at_s = overdue["t"] - overdue["waited_s"] if overdue and "t" in overdue else None
    return PostMortem(
        host=host,
        exit_code=exited.get("code"),
        signal=exited.get("signal"),
        done=done,
        exception=exception or None,
        last_step=exception.get("step", heartbeat.get("step")),
        failed_at_s=_by_the_drivers_clock(exception.get("t", exited.get("t", stuck_at_s)), halted, asked_at_s),
        log_tail=tuple(exited.get("log_tail", ())),
        stacks=halted.get("stacks") or (overdue or {}).get("stacks"),
        state=halted.get("state") or (overdue or {}).get("state"),
        overdue=overdue,
        notice=halted.get("notice") or notice,
        batch_index=halted.get("batch_index", heartbeat.get("batch_index")),
    )


def _by_the_drivers_clock(at_s: float | None, halted: Mapping[str, Any], asked_at_s: float) -> float | None:
    """A time that the host told. Hosts' clocks differ, and the earliest of several failures is the cause."""
    return None if at_s is None else at_s + asked_at_s - halted["clock_s"]


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


def _summary(dead: PostMortem, agent_lost: bool) -> str:
    at = f" at step {dead.last_step}" if dead.last_step is not None else ""
    if dead.exception is not None:
        message = str(dead.exception.get("message", "")).strip().splitlines()
        what = "a device failed" if dead.exception.get("kind") == "device" else dead.exception.get("type", "exception")
        return f"host {dead.host}: {what}{at}" + (f": {message[0]}" if message else "")
    if agent_lost:
        return f"host {dead.host}: its agent is gone{at} (machine, node or agent process lost)"
    if dead.broken_device is not None:
        return f"host {dead.host}: a device failed{at}: {dead.broken_device.strip()}"
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
