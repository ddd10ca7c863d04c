"""Asks a storage that may hang, in a thread, so that training continues if there is no answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FRESH_S = 60.0
"""A late answer counts for the next question if it is no older than this."""


class StorageCheck:
    """Asks what prevents a save. There is one thread and one question at a time.

    A call into a file system that hangs cannot be ended from outside: its thread waits in the kernel. So an unanswered question
    stays pending, and no save begins before the storage has answered it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._pending: _Question | None = None

    def ask(self, question: Callable[[], str], patience_s: float | None) -> str:
        """Returns what `question` returns (empty if nothing prevents a save). If the storage does not answer within
        `patience_s` (None: no limit), returns that as the problem. Raises what `question` raises."""
        late = self._pending is not None
        pending = self._pending = self._pending or _Question(question, self._clock)
        if not pending.done.wait(patience_s):
            return f"the storage has not answered for {self._clock() - pending.asked_s:.0f} s; the next save waits until it does"
        # Only after an answer: a new question to a storage that hangs would only add a thread that hangs.
        self._pending = None
        if late and self._clock() - pending.answered_s > FRESH_S:
            return self.ask(question, patience_s)
        return pending.answer()


class _Question:
    def __init__(self, question: Callable[[], str], clock: Callable[[], float]):
        self.asked_s = self.answered_s = clock()
        self.done = threading.Event()
        self._question, self._clock = question, clock
        self._answer = ""
        self._error: BaseException | None = None
        # A daemon: a thread that hangs in the kernel must not keep the process from ending.
        threading.Thread(target=self._run, name="storage check", daemon=True).start()

    def answer(self) -> str:
        if self._error is not None:
            raise self._error
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = self._question()
        except BaseException as error:  # a thread's boundary: raised where it was asked
            self._error = error
        # Before `done` is set: whoever waits for it reads the time next.
        self.answered_s = self._clock()
        self.done.set()
