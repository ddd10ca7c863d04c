"""Passes published numbers to the recorders, each on its own thread: one that stalls or raises neither stalls nor ends
training."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gangway.published import Distribution
from trainers.config.arguments import load_object
from trainers.config.monitoring import BUILT_IN
from trainers.recorders.recorder import About, Recorder

KEPT_PUBLISHES = 1000
"""How many publishes are kept for a slow recorder; of more, the oldest are lost."""
CLOSE_TIMEOUT_S = 10.0

Publish = tuple[int, Mapping[str, float], Mapping[str, Distribution]]
Item = Publish | int
"""What waits for a recorder: a publish, or the step that training has gone back to."""


class Recorders:
    """All recorders of a run. Every method except `close` returns at once; none raises because of a recorder."""

    def __init__(
        self,
        names: Sequence[str],
        about: About,
        note: Callable[[str], None],
        kept_publishes: int = KEPT_PUBLISHES,
        folders: Mapping[str, str] = MappingProxyType({}),
    ):
        """`folders`: where recorders write, by name (`recorder_folders` of the configuration)."""
        self._feeds = [Feed(name, about._replace(output=folders.get(name)), note, kept_publishes) for name in names]

    def record(self, step: int, metrics: Mapping[str, Any], distributions: Mapping[str, Sequence[Any]] | None = None) -> None:
        """Records what was published. It comes from an event: a distribution may have become a list in JSON."""
        # Recorders know numbers alone; other entries of an event are for people.
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        shapes = {name: Distribution(*row) for name, row in (distributions or {}).items()}
        for feed in self._feeds:
            feed.put((step, numbers, shapes))

    def go_back(self, step: int) -> None:
        """Tells that training has gone back to `step`, and that other numbers follow than were recorded of later steps."""
        for feed in self._feeds:
            feed.put(step)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Waits at most `timeout_s` until everything is recorded. Reports what is not."""
        deadline_s = time.monotonic() + timeout_s
        for feed in self._feeds:
            # All are asked before one is waited for: so they end side by side, within one time limit.
            feed.end()
        for feed in self._feeds:
            feed.join(max(0.0, deadline_s - time.monotonic()))


class Feed:
    """One recorder, its thread, and its queue. Its first problem is reported at once, the number of lost publishes at the end."""

    def __init__(self, name: str, about: About, note: Callable[[str], None], kept_publishes: int):
        self.name, self._about, self._note = name, about, note
        self._kept_publishes = kept_publishes
        self._waiting: deque[Item] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._num_recording = 0
        self._warned = False
        self.lost = 0
        """The number of publishes that did not reach it."""
        # A daemon: a recorder that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"recorder-{name}", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        with self._changed:
            full = self._num_publishes() >= self._kept_publishes
            if full:  # the newest are kept: they are what people look at while training goes on
                del self._waiting[next(index for index, waits in enumerate(self._waiting) if not isinstance(waits, int))]
                self.lost += 1
            self._waiting.append(item)
            self._changed.notify()
        # Outside the lock: a note may take long, and `put` must return at once.
        if full:
            self._warn(f"is too slow: of the publishes that wait for it, {self._kept_publishes} are kept, the oldest are lost")

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        with self._changed:
            # Also what is being recorded now: nobody waits for it any longer.
            lost = self.lost + self._num_publishes() + self._num_recording
        if lost:
            self._note(f"recorder {self.name}: {lost} publishes were not recorded")
        elif self._thread.is_alive():
            self._note(f"recorder {self.name} was not closed in time")

    def _run(self) -> None:
        recorder: Recorder | None = None
        while (item := self._next()) is not None:
            try:
                # Built when there is something to record, and again after a failure: what it needs may have come back.
                recorder = recorder or load_object(BUILT_IN.get(self.name, self.name))(self._about)
                if not isinstance(item, int):
                    recorder.record(*item)
                elif (go_back := getattr(recorder, "go_back", None)) is not None:
                    go_back(item)
            except Exception as error:  # a recorder's boundary: whatever it is, training goes on
                self._failed(error, 0 if isinstance(item, int) else 1)
            with self._changed:
                self._num_recording = 0
        try:
            if recorder is not None:
                recorder.close()
        except Exception as error:
            self._failed(error, 0)

    def _num_publishes(self) -> int:
        return sum(not isinstance(item, int) for item in self._waiting)

    def _next(self) -> Item | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            if not self._waiting:
                return None
            item = self._waiting.popleft()
            self._num_recording = 0 if isinstance(item, int) else 1
            return item

    def _failed(self, error: Exception, lost: int) -> None:
        with self._changed:
            self.lost += lost
        self._warn(f"failed: {type(error).__name__}: {error}")

    def _warn(self, what: str) -> None:
        """Reports a problem; only the first one."""
        with self._changed:
            warned, self._warned = self._warned, True
        if not warned:
            self._note(f"recorder {self.name} {what}; training goes on, and what is lost is counted")
