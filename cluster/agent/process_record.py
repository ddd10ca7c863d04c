"""What an agent knows of one training process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cluster.agent import stack_dump
from cluster.agent.child_process import ChildProcess, Exit
from cluster.agent.event_log import Event


class ProcessRecord:
    """One training process, from its time as a standby to its end. Guarded by its agent's lock."""

    def __init__(self, child: ChildProcess):
        self.child = child
        self.early_events: list[Event] = []
        """Until it belongs to a generation."""
        self.generation: int | None = None
        self.warm = False
        self.done = False
        self.halted = False
        """Killed by this agent: its end is no failure."""
        self.phase: str | None = None
        self.exception: Event | None = None
        self.heartbeat: Event | None = None
        self.exit: Event | None = None
        self.state: str | None = None
        """What the kernel said of it when it was about to be killed."""
        self._killed_at_s: float | None = None

    @property
    def alive(self) -> bool:
        return self.exit is None

    @property
    def dying(self) -> bool:
        """Whether it was killed, and is still there: to give very much memory back takes minutes."""
        return self.alive and self._killed_at_s is not None

    def dying_s(self) -> float:
        """How long it has been dying."""
        return time.monotonic() - self._killed_at_s if self._killed_at_s is not None else 0.0

    def describe_dying(self) -> str:
        who = f"process {self.child.pid} of generation {self.generation}"
        return f"{who} is still there {self.dying_s():.0f} s after SIGKILL ({stack_dump.process_state(self.child.pid)})"

    def kill(self, timeout_s: float) -> bool:
        """Kills it, the first time noting what it was at, and waits; whether it is gone. To be called without the lock."""
        if self.alive and self._killed_at_s is None:
            self.state = stack_dump.process_state(self.child.pid)
            self._killed_at_s = time.monotonic()
        self.child.kill()
        return self.child.wait_gone(timeout_s)

    def note(self, event: Event) -> None:
        """Takes from an event what the agent itself goes by."""
        kind = event.get("ev")
        self.warm |= kind == "warm"
        self.done |= kind == "done"
        if kind == "phase":
            self.phase = event.get("phase")
        elif kind == "exception":
            self.exception = event
        elif kind == "heartbeat":
            self.heartbeat = {**event, "generation": self.generation}

    def end(self, how: Exit, log_tail: Sequence[str]) -> None:
        """Takes in how it ended, and the last lines that it printed."""
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
        """A standby that was ready, or was killed, died of something that the next one need not die of."""
        assert self.exit is not None
        return self.exception is None and (self.warm or self.exit["signal"] is not None)

    def position(self) -> dict[str, Any]:
        """How far it has come, by its last heartbeat."""
        return {key: (self.heartbeat or {}).get(key) for key in ("step", "batch_index")}


def note(message: str) -> Event:
    """Something that an agent wants people to read."""
    return {"t": time.time(), "ev": "note", "message": message}


def post_mortem(life: ProcessRecord | None) -> dict[str, Any]:
    """What is known of a process after its end; of none, if there was none. Its `exit` is None if its agent killed it."""
    return {
        "pid": life.child.pid if life else None,
        "exit": life.exit if life and not life.halted else None,
        "exception": life.exception if life else None,
        "last_heartbeat": life.heartbeat if life else None,
        "batch_index": life.position()["batch_index"] if life else None,
        "phase": life.phase if life else None,
        "done": life is not None and life.done,
        "state": life.state if life else None,
    }
