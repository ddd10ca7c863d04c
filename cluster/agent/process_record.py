"""What an agent knows of one training process, and the post-mortem that it makes of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangway.text import cut
from gangway.wire.answers import PostMortem
from gangway.wire.events import Event, ExceptionRaised, Exit, Heartbeat, Note, Position


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended."""

    code: int | None
    """None if a signal ended it."""
    signal: int | None
    at_s: float
    by_parent: bool
    """It was alive until its agent killed it: its end is not a failure."""


class ProcessRecord:
    """One training process, from its start as a standby to its end."""

    def __init__(self, pid: int, log_path: str, log_copy: str | None = None):
        self.pid = pid
        self.log_path, self.log_copy = log_path, log_copy
        """The paths of its log: on its machine, and of its copy."""
        self.early_events: list[Mapping[str, Any]] = []
        """Events from the time before it belonged to a generation."""
        self.generation: int | None = None
        self.warm = False
        self.done = False
        self.halted = False
        """Whether this agent killed it: then its end is not a failure."""
        self.phase: str | None = None
        self.exception: ExceptionRaised | None = None
        self.heartbeat: Heartbeat | None = None
        self.exit: Exit | None = None
        self.state: str | None = None
        """Its state in the kernel just before it was killed."""
        self._killed_at_s: float | None = None

    @property
    def alive(self) -> bool:
        return self.exit is None

    @property
    def dying(self) -> bool:
        """Whether it was killed and still exists: freeing very much memory takes minutes."""
        return self.alive and self._killed_at_s is not None

    def dying_s(self, now_s: float) -> float:
        """Returns the seconds since it was killed."""
        return now_s - self._killed_at_s if self._killed_at_s is not None else 0.0

    def kill(self, now_s: float) -> None:
        """Records that it is killed now, the first time."""
        if self._killed_at_s is None:
            self._killed_at_s = now_s

    def observe(self, event: Event) -> None:
        """Records the part of an event that the agent itself needs."""
        match event["ev"]:
            case "warm":
                self.warm = True
            case "done":
                self.done = True
            case "phase":
                self.phase = event["phase"]
            case "exception":
                self.exception = event
            case "heartbeat":
                self.heartbeat = {**event, "generation": self.generation}

    def observe_kernel_state(self, state: str | None) -> None:
        """Records its state in the kernel, the first time that it is known."""
        self.state = self.state or state

    def end(self, how: ExitStatus, log_tail: Sequence[str]) -> None:
        """Records how the process ended, and the last lines that it printed."""
        self.halted = how.by_parent
        self.exit = {
            "t": how.at_s,
            "ev": "exit",
            "code": how.code,
            "signal": how.signal,
            "log_tail": list(log_tail),
            "pid": self.pid,
        }

    def excusable(self) -> bool:
        """Returns whether a standby died of a cause that need not hit the next one: it was warm already, or was killed."""
        assert self.exit is not None
        return self.exception is None and (self.warm or self.exit["signal"] is not None)

    def position(self) -> Position:
        """Returns how far it is, by its last heartbeat."""
        heartbeat = self.heartbeat
        return {"step": heartbeat and heartbeat["step"], "batch_index": heartbeat and heartbeat["batch_index"]}


def note(message: str, at_s: float) -> Note:
    """Returns a `note` event: a message of the agent for people. `at_s`: seconds since 1970."""
    return {"t": at_s, "ev": "note", "message": cut(message)}


def post_mortem(process: ProcessRecord | None) -> PostMortem:
    """Returns what is known of a process after its end."""
    return {
        "pid": process.pid if process else None,
        "exit": process.exit if process and not process.halted else None,
        "exception": process.exception if process else None,
        "last_heartbeat": process.heartbeat if process else None,
        "batch_index": process.position()["batch_index"] if process else None,
        "phase": process.phase if process else None,
        "done": process is not None and process.done,
        "state": process.state if process else None,
    }
