"""The warm standby: a process that has done everything that needs no device, and waits for its orders. Pure: which one there is,
and when another one has to be started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.agent.process_record import ProcessRecord

MAX_DEATHS = 3
"""How many standbys in a row may be killed from outside and replaced. The next such death is a failure of the generation."""


class Standby:
    """At most one standby; `request` asks for a new one, and `next_preparation` says when one is to be started."""

    def __init__(self, module: str):
        self.module = module
        self.process: ProcessRecord | None = None
        self.preparation: Mapping[str, Any] | None = None
        self.spawn_error: Exception | None = None
        self._requested = self._spawning = self._closed = False
        self._deaths = 0

    def prepare(self, preparation: Mapping[str, Any]) -> ProcessRecord | None:
        """Asks for a standby with this preparation. Returns the old one if it had another preparation or is dead: the caller has
        to kill it."""
        there = self._spawning if self.process is None else self.process.alive
        if there and preparation == self.preparation:
            return None
        old, self.process = self.process, None
        self.preparation = preparation
        self.request()
        return old

    def request(self) -> None:
        """Asks for a standby as soon as there is a preparation, unless there is one."""
        # A request comes for a new reason: earlier deaths do not count against it.
        self._requested, self._deaths, self.spawn_error = True, 0, None

    def next_preparation(self) -> Mapping[str, Any] | None:
        """Returns the preparation of the process that is to be started now; None if none is. `spawned` or `failed` follows."""
        wanted = self._requested and self.process is None and self.preparation is not None
        if not wanted or self._spawning or self._closed:
            return None
        self._spawning = True
        return self.preparation

    def spawned(self, process: ProcessRecord, preparation: Mapping[str, Any]) -> bool:
        """Takes the process that was started. Returns False if it is of no use: meanwhile another preparation has come, or
        nothing is started any more."""
        self._spawning = False
        if self._closed or preparation is not self.preparation:
            return False
        self.process, self._requested = process, False
        return True

    def failed(self, error: Exception) -> None:
        """Takes the news that no process could be started: `take` raises it."""
        self._spawning = self._requested = False
        self.spawn_error = error

    def settled(self) -> bool:
        """Returns whether `take` can be called: the standby is warm or dead, or none could be started."""
        return self.spawn_error is not None or (self.process is not None and (self.process.warm or not self.process.alive))

    def take(self) -> ProcessRecord | None:
        """Hands the standby over as it is, warm or not. Raises RuntimeError if none can be started."""
        if self.spawn_error is not None:
            raise RuntimeError(f"cannot start `{self.module}`: {self.spawn_error}") from self.spawn_error
        process, self.process, self._deaths = self.process, None, 0
        return process

    def ended(self, process: ProcessRecord) -> None:
        """Handles the end of the standby: another one is asked for, unless it would end in the same way."""
        assert process.exit is not None
        if process.excusable() and self._deaths < MAX_DEATHS:
            self.process, self._requested = None, True
            self._deaths += 1
        else:
            # Kept for the generation that takes this process: the next standby would end in the same way.
            process.early_events.append(process.exit)

    def close(self) -> ProcessRecord | None:
        """Asks for no standby any more. Returns the last one."""
        self._closed = True
        process, self.process = self.process, None
        return process

    def state(self) -> str:
        if self.process is None:
            return "none"
        if not self.process.alive:
            return "failed"
        return "warm" if self.process.warm else "starting"


def describe_slow(prepared: bool, process: ProcessRecord | None, log_tail: Sequence[str], waited_s: float) -> str:
    """Explains why no standby was warm after this time. `process` is the one that was taken, `log_tail` the end of its log."""
    if not prepared:
        return f"no preparation has come within {waited_s:g} s; call prepare"
    if process is None:
        return f"no standby could be started within {waited_s:g} s"
    tail = "\n".join(log_tail) or "(nothing)"
    phase = f" (phase {process.phase})" if process.phase else ""
    return f"the standby, process {process.pid}{phase}, is not ready after {waited_s:g} s; it printed:\n{tail}"
