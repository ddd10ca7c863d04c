"""The limits of the process of one generation: when its stacks are taken, what counts as overdue, and as silent. Pure."""

from __future__ import annotations

from cluster.agent.inputs import Now
from cluster.agent.process_record import ProcessRecord
from cluster.agent.watchdog import Alarm, Watchdog
from gangway.wire.answers import Findings
from gangway.wire.events import Event, Overdue
from gangway.wire.limits import SILENCE, Limits


class HangMonitor:
    """Monitors one process in one generation."""

    def __init__(self, limits: Limits, now_s: float):
        self.stacks: str | None = None
        """Stacks, taken when the process became suspicious; None again if it made progress after all."""
        self.overdue: Overdue | None = None
        """The first `overdue` event of the generation."""
        self.taking: ProcessRecord | None = None
        """The process whose stacks are being taken."""
        self._watchdog = Watchdog(limits, now_s)
        self._silent_limit_s = limits.silent_s
        self._last_sign_s = now_s
        self._stacks_requested = self._ended = False

    def observe(self, event: Event, now_s: float) -> None:
        """Passes an event of the process, heartbeats included, to the watchdog."""
        self._last_sign_s = now_s
        self._watchdog.observe(event, now_s)
        if not self._worth_keeping(now_s):
            self.stacks = None

    def printed(self, now_s: float) -> None:
        """Records that the process has printed something."""
        self._last_sign_s = now_s

    def silence(self, process: ProcessRecord, now: Now) -> Overdue | None:
        """Returns an `overdue` event if the process has been silent for longer than it may, where nothing else has a limit.

        Not reported: only the driver knows whether the other hosts are silent too.
        """
        waited_s = now.s - self._last_sign_s
        if self._silent_limit_s is None or waited_s < self._silent_limit_s or self._ended or self._watchdog.limited:
            return None
        return {
            "t": now.wall_s,
            "ev": "overdue",
            "phase": SILENCE,
            "limit_s": self._silent_limit_s,
            "waited_s": waited_s,
            "stacks": None,
            "state": None,
            "log_tail": [],
            **process.position(),
        }

    def look(self, now_s: float) -> list[Alarm]:
        """Returns the new alarms of the watchdog; none after the end of the process."""
        return [] if self._ended else self._watchdog.look(now_s)

    def next_look_s(self, now_s: float) -> float:
        """Returns in how many seconds to look again, if nothing happens before; infinite if never."""
        return float("inf") if self._ended else self._watchdog.next_look_s(now_s)

    def request_stacks(self) -> bool:
        """Returns whether stacks have to be taken because another host hangs. They are kept, even if this host is not
        suspicious."""
        self._stacks_requested = True
        return self.stacks is None and not self._ended

    def keep_stacks(self, text: str | None, now_s: float) -> None:
        """Takes the stacks that were read. It may have gone on meanwhile: stacks from then would blame a healthy line."""
        self.taking = None
        if self._worth_keeping(now_s):
            self.stacks = text

    def findings(self) -> Findings:
        return {"stacks": self.stacks, "overdue": self.overdue}

    def end(self) -> None:
        """Stops monitoring: the process is gone."""
        self._ended = True

    def _worth_keeping(self, now_s: float) -> bool:
        """Returns whether stacks show where the process is now: it has made no progress since they were taken."""
        return self._stacks_requested or self.overdue is not None or self._watchdog.suspicious(now_s)
