"""Post-mortems: what is known of one host's process after the gang was halted, and how to describe it. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangway.errors import is_of_user
from gangway.foreign_errors import CRASHED, broken_device_in
from orchestrator.failures.hang_analysis import HostStacks

FRAME = re.compile(r'^ *File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
"""A line of a stack, as faulthandler prints it after `CRASHED`."""


@dataclass(frozen=True, kw_only=True)
class PostMortem:
    """The state of one host's process after the gang was halted. A process that the agent killed has no exit code or signal."""

    host: int
    exit_code: int | None = None
    signal: int | None = None
    exception: Mapping[str, Any] | None = None
    """The `exception` event of the process: type, message, traceback, step, kind."""
    last_step: int | None = None
    failed_at_s: float | None = None
    """When it failed, by the driver's clock: the time of its exception, else of its exit; for a hang, of its last progress."""
    agent_lost: bool = False
    done: bool = False
    """Whether it had reported the end of training: then an exit with status 0 is not a failure."""
    log_tail: Sequence[str] = ()
    stacks: str | None = None
    """The stacks of all its threads, taken while it was alive."""
    state: str | None = None
    """Its state in the kernel before it was killed, such as `T (stopped)`."""
    overdue: Mapping[str, Any] | None = None
    """The agent's `overdue` event: phase, limit_s, waited_s."""
    notice: Mapping[str, Any] | None = None
    """The event that its machine is about to be taken away."""
    batch_index: int | None = None

    @property
    def exited(self) -> bool:
        """Whether it ended by itself: the agent did not kill it, and training was not finished."""
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
        """The line about a broken device that it printed before the runtime aborted it; None if there is none."""
        return broken_device_in(self.log_tail) if self.exited and self.exception is None else None

    @property
    def failed_at(self) -> str | None:
        """The line of the user's code in which it failed, such as `/home/me/model.py, line 12, in __call__`; of a crash that
        called none of that, a library's. None if it is not known."""
        if frame := (self.exception or {}).get("user_frame"):
            return str(frame).partition(": ")[0]
        text = "\n".join(self.log_tail).rpartition(CRASHED)[2] if self.signal is not None else ""
        found = FRAME.findall(text)
        line = next((each for each in found if is_of_user(each[0])), found[0] if found else None)
        return None if line is None else "{}, line {}, in {}".format(*line)

    @property
    def host_stacks(self) -> HostStacks:
        return HostStacks(host=self.host, text=self.stacks, state=self.state, batch_index=self.batch_index)


def read_post_mortem(
    host: int,
    halted: Mapping[str, Any] | None,
    asked_at_s: float,
    *,
    done: bool = False,
    notice: Mapping[str, Any] | None = None,
    overdue: Mapping[str, Any] | None = None,
) -> PostMortem:
    """Makes a post-mortem from an agent's answer to `halt`; None stands for an agent that did not answer.

    `asked_at_s`: when it was asked, by the driver's clock. `notice`: one from another source (Ray drains the node). `overdue`: a
    limit that passed as the driver found (the gang was silent), if the agent itself has found none.
    """
    if halted is None:
        return PostMortem(host=host, agent_lost=True, done=done, notice=notice)
    exited, exception, heartbeat = (halted.get(key) or {} for key in ("exit", "exception", "last_heartbeat"))
    overdue = halted.get("overdue") or overdue
    stuck_at_s = overdue["t"] - overdue["waited_s"] if overdue and "t" in overdue else None
    return PostMortem(
        host=host,
        exit_code=exited.get("code"),
        signal=exited.get("signal"),
        done=done,
        exception=exception or None,
        last_step=exception.get("step", heartbeat.get("step")),
        failed_at_s=_on_drivers_clock(exception.get("t", exited.get("t", stuck_at_s)), halted, asked_at_s),
        log_tail=tuple(exited.get("log_tail", ())),
        stacks=halted.get("stacks") or (overdue or {}).get("stacks"),
        state=halted.get("state") or (overdue or {}).get("state"),
        overdue=overdue,
        notice=halted.get("notice") or notice,
        batch_index=halted.get("batch_index", heartbeat.get("batch_index")),
    )


def _on_drivers_clock(at_s: float | None, halted: Mapping[str, Any], asked_at_s: float) -> float | None:
    """Converts a time of the host's clock. Clocks differ, and the earliest of several failures counts as the cause."""
    return None if at_s is None else at_s + asked_at_s - halted["clock_s"]


def describe(post_mortem: PostMortem, agent_lost: bool) -> dict[str, Any]:
    """Returns the evidence of a post-mortem: only what is known, in the order in which a person wants to read it."""
    facts = {
        "summary": _summary(post_mortem, agent_lost),
        "step": post_mortem.last_step,
        "exit_code": post_mortem.exit_code,
        "signal": _signal_name(post_mortem.signal) if post_mortem.signal is not None else None,
        "line": post_mortem.failed_at,
        "hint": _hint(post_mortem, agent_lost),
        "exception": dict(post_mortem.exception) if post_mortem.exception else None,
        "log_tail": list(post_mortem.log_tail) or None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _summary(post_mortem: PostMortem, agent_lost: bool) -> str:
    at = f" at step {post_mortem.last_step}" if post_mortem.last_step is not None else ""
    where = f", in {post_mortem.failed_at}" if post_mortem.failed_at else ""
    if post_mortem.exception is not None:
        message = str(post_mortem.exception.get("message", "")).strip().splitlines()
        what = (
            "a device failed" if post_mortem.exception.get("kind") == "device" else post_mortem.exception.get("type", "exception")
        )
        return f"host {post_mortem.host}: {what}{at}" + (f": {message[0]}" if message else "") + where
    if agent_lost:
        return f"host {post_mortem.host}: its agent is gone{at} (machine, node or agent process lost)"
    if post_mortem.broken_device is not None:
        return f"host {post_mortem.host}: a device failed{at}: {post_mortem.broken_device.strip()}"
    if post_mortem.signal is not None:
        return f"host {post_mortem.host}: training process ended by {_signal_name(post_mortem.signal)}{at}{where}"
    return f"host {post_mortem.host}: training process ended with status {post_mortem.exit_code}{at}, before training was done"


def _hint(post_mortem: PostMortem, agent_lost: bool) -> str | None:
    if post_mortem.signal == signal.SIGKILL and not agent_lost:
        return "SIGKILL comes from outside the process: possibly the kernel's out-of-memory killer, or a person"
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
