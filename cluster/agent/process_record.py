"""The agent's record of one training process, and the post-mortem that it makes of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.agent import stack_dump
from cluster.agent.answers import PostMortem
from cluster.agent.child_process import ChildProcess, ExitStatus
from cluster.agent.events import Exit, Heartbeat, Note, Position, ProcessEvent, Raised, cut


class ProcessRecord:
    """One training process, from its start as a standby to its end. Guarded by the agent's lock."""

    def __init__(self, child: ChildProcess):
        self.child = child
        self.early_events: list[Mapping[str, Any]] = []
        """Events from the time before it belonged to a generation."""
        self.generation: int | None = None
        self.warm = False
        self.done = False
        self.halted = False
        """Whether this agent killed it: then its end is not a failure."""
        self.phase: str | None = None
        self.exception: Raised | None = None
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

    def dying_s(self) -> float:
        """Returns the seconds since it was killed."""
        return time.monotonic() - self._killed_at_s if self._killed_at_s is not None else 0.0

    def describe_dying(self) -> str:
        name = f"process {self.child.pid} of generation {self.generation}"
        return f"{name} is still there {self.dying_s():.0f} s after SIGKILL ({stack_dump.process_state(self.child.pid)})"

    def kill(self, timeout_s: float) -> bool:
        """Kills the process and waits; returns whether it is gone. To be called without the lock."""
        if self.alive and self._killed_at_s is None:  # before the kill: the state shows what it was doing
            self.state = stack_dump.process_state(self.child.pid)
            self._killed_at_s = time.monotonic()
        self.child.kill()
        return self.child.wait_gone(timeout_s)

    def observe(self, event: ProcessEvent) -> None:
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

    def end(self, how: ExitStatus, log_tail: Sequence[str]) -> None:
        """Records how the process ended, and the last lines that it printed."""
        self.halted = how.by_parent
        self.exit = {
            "t": how.at_s,
            "ev": "exit",
            "code": how.code,
            "signal": how.signal,
            "log_tail": list(log_tail),
            "pid": self.child.pid,
        }

    def excusable(self) -> bool:
        """Returns whether a standby died of a cause that need not hit the next one: it was warm already, or was killed."""
        assert self.exit is not None
        return self.exception is None and (self.warm or self.exit["signal"] is not None)

    def position(self) -> Position:
        """Returns how far it is, by its last heartbeat."""
        heartbeat = self.heartbeat
        return {"step": heartbeat and heartbeat["step"], "batch_index": heartbeat and heartbeat["batch_index"]}


def note(message: str) -> Note:
    """Returns a `note` event: a message of the agent for people."""
    return {"t": time.time(), "ev": "note", "message": cut(message)}


def post_mortem(process: ProcessRecord | None) -> PostMortem:
    """Returns what is known of a process after its end."""
    return {
        "pid": process.child.pid if process else None,
        "exit": process.exit if process and not process.halted else None,
        "exception": process.exception if process else None,
        "last_heartbeat": process.heartbeat if process else None,
        "batch_index": process.position()["batch_index"] if process else None,
        "phase": process.phase if process else None,
        "done": process is not None and process.done,
        "state": process.state if process else None,
    }
