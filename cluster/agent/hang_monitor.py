"""Acts on the alarms of a watchdog: takes stacks shortly before a limit passes, and reports that it has passed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cluster.agent import stack_dump
from cluster.agent.answers import Findings
from cluster.agent.events import AgentEvent, Overdue, Position, ProcessEvent
from cluster.agent.limits import WatchdogConfig
from cluster.agent.phases import SILENCE
from cluster.agent.process_record import ProcessRecord
from cluster.agent.watchdog import Alarm, Watchdog

STACKS_GRACE_S = 0.5
"""How long the `overdue` event waits for stacks that are being taken, and for the end of the log."""


class HangMonitor:
    """Monitors one process in one generation. Callers hold `changed`, the lock of the owner; `report` is called with it held."""

    def __init__(self, config: WatchdogConfig, changed: threading.Condition, report: Callable[[AgentEvent], None]):
        self.stacks: str | None = None
        """Stacks, taken when the process became suspicious; None again if it made progress after all."""
        self.overdue: Overdue | None = None
        """The first `overdue` event of the generation."""
        self._watchdog = Watchdog(config, time.monotonic())
        self._silent_limit_s = config.silent_s
        self._last_sign_s = time.monotonic()
        self._changed, self._report = changed, report
        self._taking = self._stacks_requested = self._ended = False

    def observe(self, event: ProcessEvent) -> None:
        """Passes an event of the process, heartbeats included, to the watchdog."""
        now_s = self._last_sign_s = time.monotonic()
        self._watchdog.observe(event, now_s)
        if not self._worth_keeping(now_s):
            self.stacks = None

    def hear(self) -> None:
        """Records that the process has printed something."""
        self._last_sign_s = time.monotonic()

    def silence(self, process: ProcessRecord) -> Overdue | None:
        """Returns an `overdue` event if the process has been silent for longer than it may, where nothing else has a limit.

        Not reported: only the driver knows whether the other hosts are silent too.
        """
        waited_s = time.monotonic() - self._last_sign_s
        if self._silent_limit_s is None or waited_s < self._silent_limit_s or self._ended or self._watchdog.limited:
            return None
        return {
            "t": time.time(),
            "ev": "overdue",
            "phase": SILENCE,
            "limit_s": self._silent_limit_s,
            "waited_s": waited_s,
            "stacks": None,
            "state": None,
            "log_tail": [],
            **process.position(),
        }

    def act(self, process: ProcessRecord | None) -> float:
        """Handles the alarms for this process (None: it has not been started). Returns in how many seconds to call again."""
        if self._ended:
            return float("inf")
        for alarm in self._watchdog.look(time.monotonic()):
            if not alarm.overdue:
                self._take_stacks(process)
            else:
                self._report_overdue(alarm, process)
        return self._watchdog.next_look_s(time.monotonic())

    def request_stacks(self, process: ProcessRecord | None, timeout_s: float) -> None:
        """Takes stacks because another host hangs, unless they have been taken, even if this host is not suspicious. Waits."""
        # Before the stacks are taken: those of a host that is not suspicious would be dropped.
        self._stacks_requested = True
        if self.stacks is None and not self._ended:
            self._take_stacks(process)
        self._wait_for_stacks(timeout_s)

    def findings(self) -> Findings:
        return {"stacks": self.stacks, "overdue": self.overdue}

    def end(self) -> None:
        """Stops monitoring: the process is gone."""
        self._ended = True

    def _take_stacks(self, process: ProcessRecord | None) -> None:
        if process is not None and not self._taking:
            self._taking = True
            # In a separate thread: reading the stacks may take seconds, and the agent's lock is held here.
            threading.Thread(
                target=self._read_stacks, args=(process,), name=f"stacks of {process.child.pid}", daemon=True
            ).start()

    def _read_stacks(self, process: ProcessRecord) -> None:
        text = stack_dump.stacks(process.child)
        with self._changed:
            self._taking = False
            # It may have gone on meanwhile: stacks from then would blame a healthy line.
            if self._worth_keeping(time.monotonic()):
                self.stacks = text
            self._changed.notify_all()

    def _worth_keeping(self, now_s: float) -> bool:
        """Returns whether stacks show where the process is now: it has made no progress since they were taken."""
        return self._stacks_requested or self.overdue is not None or self._watchdog.suspicious(now_s)

    def _wait_for_stacks(self, timeout_s: float) -> None:
        self._changed.wait_for(lambda: not self._taking, timeout_s)

    def _log_tail(self, process: ProcessRecord | None) -> list[str]:
        """Returns the end of the log if it can be read in time. A separate thread reads it without the lock: a disk may hang."""
        if process is None:
            return []
        tails: list[list[str]] = []

        def read() -> None:
            tails.append(process.child.log_tail())
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=read, name=f"log of {process.child.pid}", daemon=True).start()
        self._changed.wait_for(lambda: bool(tails), STACKS_GRACE_S)
        return tails[0] if tails else ["(its log could not be read in time)"]

    def _report_overdue(self, alarm: Alarm, process: ProcessRecord | None) -> None:
        self._wait_for_stacks(STACKS_GRACE_S)
        log_tail = self._log_tail(process)
        position: Position = process.position() if process else {"step": None, "batch_index": None}
        event: Overdue = {
            "t": time.time(),
            "ev": "overdue",
            "phase": alarm.phase,
            "limit_s": alarm.limit_s,
            "waited_s": alarm.waited_s,
            "stacks": self.stacks,
            "state": stack_dump.process_state(process.child.pid) if process else None,
            "log_tail": log_tail,
            **position,
        }
        self.overdue = self.overdue or event
        self._report(event)
