"""Acts on what a watchdog finds in one generation: takes stacks early, and tells that a limit has passed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from cluster.agent import stack_dump
from cluster.agent.event_log import Event
from cluster.agent.process_record import ProcessRecord
from cluster.agent.watchdog import Alarm, Watchdog, WatchdogConfig

STACKS_GRACE_S = 0.5
"""How long the news of a passed limit waits for stacks that are being taken, and for the end of the log."""


class Watch:
    """One process in one generation. Whoever calls holds `changed`, its owner's lock; `tell` is called with it held too."""

    def __init__(self, config: WatchdogConfig, changed: threading.Condition, tell: Callable[[Event], None]):
        self.stacks: str | None = None
        """Taken when it became suspicious; None again when it went on after all."""
        self.overdue: Event | None = None
        """The first one."""
        self._watchdog = Watchdog(config, time.monotonic())
        self._changed, self._tell = changed, tell
        self._taking = self._wanted = self._ended = False

    def note(self, event: Event) -> None:
        """Takes in an event of the process; heartbeats too."""
        now_s = time.monotonic()
        self._watchdog.note(event, now_s)
        if not self._worth_keeping(now_s):
            self.stacks = None

    def act(self, life: ProcessRecord | None) -> float:
        """Does what is due for this process (None: it has not been started). Returns when to look again, in seconds from now."""
        if self._ended:
            return float("inf")
        for alarm in self._watchdog.look(time.monotonic()):
            if not alarm.overdue:
                self._take_stacks(life)
            else:
                self._tell_overdue(alarm, life)
        return self._watchdog.next_look_s(time.monotonic())

    def want_stacks(self, life: ProcessRecord | None, timeout_s: float) -> None:
        """Another host hangs: takes them, if that has not been done, though here nothing may be suspicious. Waits for them."""
        self._wanted = True
        if self.stacks is None and not self._ended:
            self._take_stacks(life)
        self._wait_for_stacks(timeout_s)

    def findings(self) -> dict[str, Any]:
        return {"stacks": self.stacks, "overdue": self.overdue}

    def end(self) -> None:
        """The process is gone."""
        self._ended = True

    def _take_stacks(self, life: ProcessRecord | None) -> None:
        if life is not None and not self._taking:
            self._taking = True
            # On a thread of its own: reading a process may take seconds, and nothing must wait for that.
            threading.Thread(target=self._read_stacks, args=(life,), name=f"stacks of {life.child.pid}", daemon=True).start()

    def _read_stacks(self, life: ProcessRecord) -> None:
        text = stack_dump.stacks(life.child)
        with self._changed:
            self._taking = False
            if self._worth_keeping(time.monotonic()):
                self.stacks = text
            self._changed.notify_all()

    def _worth_keeping(self, now_s: float) -> bool:
        """Whether stacks say where it is, and not where it was before it went on."""
        return self._wanted or self.overdue is not None or self._watchdog.suspicious(now_s)

    def _wait_for_stacks(self, timeout_s: float) -> None:
        self._changed.wait_for(lambda: not self._taking, timeout_s)

    def _log_tail(self, life: ProcessRecord | None) -> list[str]:
        """The end of its log, if it can be read in time: the lock is not held meanwhile, for a disk may hang."""
        if life is None:
            return []
        found: list[list[str]] = []

        def read() -> None:
            found.append(life.child.log_tail())
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=read, name=f"log of {life.child.pid}", daemon=True).start()
        self._changed.wait_for(lambda: bool(found), STACKS_GRACE_S)
        return found[0] if found else ["(its log could not be read in time)"]

    def _tell_overdue(self, alarm: Alarm, life: ProcessRecord | None) -> None:
        self._wait_for_stacks(STACKS_GRACE_S)
        log_tail = self._log_tail(life)
        event = {
            "t": time.time(),
            "ev": "overdue",
            "phase": alarm.phase,
            "limit_s": alarm.limit_s,
            "waited_s": alarm.waited_s,
            "stacks": self.stacks,
            "state": stack_dump.process_state(life.child.pid) if life else None,
            "log_tail": log_tail,
            **(life.position() if life else {"step": None, "batch_index": None}),
        }
        self.overdue = self.overdue or event
        self._tell(event)
