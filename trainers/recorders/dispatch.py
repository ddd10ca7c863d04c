"""Feeds recorders, each on a thread of its own: one that stalls or raises neither stalls nor ends the training."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainers.config.arguments import load_object
from trainers.config.recorders import BUILT_IN
from trainers.recorders.recorder import About, Distribution, Recorder

KEPT_PUBLISHES = 1000
"""That wait for a recorder that is slow; the oldest of more are lost to it."""
CLOSE_TIMEOUT_S = 10.0

Publish = tuple[int, Mapping[str, float], Mapping[str, Distribution]]


class Recorders:
    """All recorders of a run. Every method returns at once, but `close`; none raises because of a recorder."""

    def __init__(self, names: Sequence[str], about: About, note: Callable[[str], None], kept_publishes: int = KEPT_PUBLISHES):
        self._feeds = [Feed(name, about, note, kept_publishes) for name in names]

    def record(self, step: int, metrics: Mapping[str, Any], distributions: Mapping[str, Sequence[Any]] | None = None) -> None:
        """What was published, as it comes from an event: a distribution may have become a list on its way."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        shapes = {name: Distribution(*row) for name, row in (distributions or {}).items()}
        for feed in self._feeds:
            feed.put((step, numbers, shapes))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Waits, for at most so long, until all is recorded. What is not, is told."""
        deadline_s = time.monotonic() + timeout_s
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.join(max(0.0, deadline_s - time.monotonic()))


class Feed:
    """One recorder, its thread, and what waits for it. Its first problem is told when it comes, the sum of all at the end."""

    def __init__(self, name: str, about: About, note: Callable[[str], None], kept_publishes: int):
        self.name, self._about, self._note = name, about, note
        self._kept_publishes = kept_publishes
        self._waiting: deque[Publish] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._in_hand = 0
        self._told = False
        self.lost = 0
        """Publishes that did not reach it."""
        self._thread = threading.Thread(target=self._run, name=f"recorder-{name}", daemon=True)
        self._thread.start()

    def put(self, publish: Publish) -> None:
        with self._changed:
            full = len(self._waiting) >= self._kept_publishes
            if full:
                self._waiting.popleft()
                self.lost += 1
            self._waiting.append(publish)
            self._changed.notify()
        if full:
            self._tell(f"is too slow: of the publishes that wait for it, {self._kept_publishes} are kept, the oldest are lost")

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        with self._changed:
            lost = self.lost + len(self._waiting) + self._in_hand
        if lost:
            self._note(f"recorder {self.name}: {lost} publishes were not recorded")
        elif self._thread.is_alive():
            self._note(f"recorder {self.name} was not closed in time")

    def _run(self) -> None:
        recorder: Recorder | None = None
        while (publish := self._next()) is not None:
            try:
                # Not before there is something to record, and again after a failure: what it needs may have come back.
                recorder = recorder or load_object(BUILT_IN.get(self.name, self.name))(self._about)
                recorder.record(*publish)
            except Exception as error:  # a recorder's boundary: whatever it is, training goes on
                self._failed(error, 1)
            with self._changed:
                self._in_hand = 0
        try:
            if recorder is not None:
                recorder.close()
        except Exception as error:
            self._failed(error, 0)

    def _next(self) -> Publish | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            if not self._waiting:
                return None
            self._in_hand = 1
            return self._waiting.popleft()

    def _failed(self, error: Exception, lost: int) -> None:
        with self._changed:
            self.lost += lost
        self._tell(f"failed: {type(error).__name__}: {error}")

    def _tell(self, what: str) -> None:
        """Once."""
        with self._changed:
            told, self._told = self._told, True
        if not told:
            self._note(f"recorder {self.name} {what}; training goes on, and what is lost is counted")
