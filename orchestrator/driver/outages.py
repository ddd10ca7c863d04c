"""Requests to a bucket: counted, and a time in which they fail is reported once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gangway.storage import failed_requests, usage
from orchestrator.events import Level
from orchestrator.run_state.progress import Progress

QUIET_S = 30.0
"""After so long without a failure the storage is there again. A request without an answer fails after 20 s, and is made again."""


class Outages:
    """Counts the requests of the hosts and of this process, and notes when they fail. Only the driver's thread may call it."""

    def __init__(self, progress: Progress, note: Callable[[str, Level], None], clock: Callable[[], float]):
        self._progress, self._note, self._clock = progress, note, clock
        self._number = 0
        """Of those that failed since the storage was last there."""
        self._began_s = self._last_s = 0.0
        self._why = ""

    def failed(self, number: int, why: str, who: str) -> None:
        """`why` is that of the last one."""
        if self._number == 0:
            self._began_s = self._clock()
            line = f"requests to the storage fail (the first of {who}): {why}; training goes on, and they are tried again"
            self._note(line, "warning")
        self._number, self._last_s, self._why = self._number + number, self._clock(), why
        self._progress.failed_requests += number

    def look(self) -> None:
        """Called often: counts those of this process, and says when it is over."""
        self.made(usage.HERE.take())
        number, why = failed_requests.HERE.take()
        if number:
            self.failed(number, why, "the driver")
        if self._number and self._clock() - self._last_s > QUIET_S:
            self._note(f"the storage answers again; until then {self._so_far()}", "info")
            self._number = 0

    def made(self, counts: Mapping[str, int]) -> None:
        """Counts requests and bytes, by kind."""
        for kind, number in counts.items():
            self._progress.requests[kind] = self._progress.requests.get(kind, 0) + number

    def evidence(self) -> dict[str, str]:
        """Returns what an incident that happens now should tell; empty if the storage is there."""
        return {"storage": f"{self._so_far()}: {self._why}"} if self._number else {}

    def _so_far(self) -> str:
        return f"{self._number} requests to it failed in {self._last_s - self._began_s:.0f} s"
