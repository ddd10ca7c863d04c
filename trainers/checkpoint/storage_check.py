"""Questions to a storage that may hang. They are asked in a thread, so that training goes on where there is no answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FRESH_S = 60.0
"""An answer that came too late counts for the next question, if it is no older."""


class StorageCheck:
    """Asks what prevents a save. One thread asks, one question at a time.

    A call into a file system that hangs cannot be ended from outside: its thread waits in the kernel. So an unanswered question
    stays the one that is asked, and no save begins before the storage has answered it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._pending: _Question | None = None

    def ask(self, question: Callable[[], str], patience_s: float | None) -> str:
        """Returns what `question` returns, empty if nothing prevents a save, or after `patience_s` (None: no limit) that the
        storage does not answer. Raises what `question` raises."""
        late = self._pending is not None
        asked = self._pending = self._pending or _Question(question, self._clock)
        if not asked.done.wait(patience_s):
            return f"the storage has not answered for {self._clock() - asked.asked_s:.0f} s; the next save waits until it does"
        self._pending = None
        if late and self._clock() - asked.answered_s > FRESH_S:
            return self.ask(question, patience_s)
        return asked.answer()


class _Question:
    def __init__(self, question: Callable[[], str], clock: Callable[[], float]):
        self.asked_s = self.answered_s = clock()
        self.done = threading.Event()
        self._question, self._clock = question, clock
        self._answer = ""
        self._error: BaseException | None = None
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
        self.answered_s = self._clock()
        self.done.set()
