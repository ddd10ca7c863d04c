"""Waits that a stop request ends.

    with heeding(check_stop):       # what `check_stop` raises ends each wait of this thread
        place.get("row/000001")     # a bucket that does not answer is asked again and again

Whoever waits takes `check_stop`, or calls `pause`, which finds that of its thread. It is called at least once a second, and what
it raises ends the wait: a driver that waits for machines or for its storage still obeys a request to stop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Generic, TypeVar

CheckStop = Callable[[], None]
Result = TypeVar("Result")

CHECK_STOP_INTERVAL_S = 0.5
POLL_INTERVAL_S = 0.01


def do_nothing() -> None:
    """The default `check_stop`: nothing interrupts the wait."""


_check_stop: ContextVar[CheckStop] = ContextVar("check_stop", default=do_nothing)


@contextmanager
def heeding(check_stop: CheckStop) -> Iterator[None]:
    """Has `check_stop` called in each `pause` of this thread."""
    before = _check_stop.set(check_stop)
    try:
        yield
    finally:
        _check_stop.reset(before)


def pause(wait_s: float) -> None:
    """Waits, unless what this thread heeds raises."""
    end_s = time.monotonic() + wait_s
    while (left_s := end_s - time.monotonic()) > 0:
        _check_stop.get()()
        time.sleep(min(left_s, CHECK_STOP_INTERVAL_S))


def wait_until(done: Callable[[], bool], timeout_s: float, check_stop: CheckStop = do_nothing) -> bool:
    """Polls until `done()` is true; returns whether that was in time. For changes that nobody announces."""
    deadline_s, next_check_s = time.monotonic() + timeout_s, 0.0
    while not done():
        now_s = time.monotonic()
        if now_s > deadline_s:
            return False
        # `done` is polled often, `check_stop` rarely: it may ask another process.
        if now_s >= next_check_s:
            check_stop()
            next_check_s = now_s + CHECK_STOP_INTERVAL_S
        time.sleep(POLL_INTERVAL_S)
    return True


class Beside(Generic[Result]):
    """The last answer to a question that may take long: it is asked in a thread of its own."""

    def __init__(self, ask: Callable[[], Result], newest: Result):
        self.newest, self._ask = newest, ask
        self._thread: threading.Thread | None = None

    def look(self) -> Result:
        """Returns the newest answer, and asks again unless the last question is still open. Never waits. What the question raises
        is no answer."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="beside", daemon=True)
            self._thread.start()
        return self.newest

    def _run(self) -> None:
        with suppress(Exception):
            self.newest = self._ask()


def in_time(work: Callable[[], Result], limit_s: Callable[[], float]) -> Result:
    """Returns what `work` returns, which runs in a thread of its own: it may hang for ever. Raises what it raises, and
    TimeoutError when it has taken as long as `limit_s` allows. That is asked again and again: it may become shorter."""
    answer: Future[Result] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # a thread's boundary: raised by whoever waits
            answer.set_exception(error)

    began_s = time.monotonic()
    threading.Thread(target=run, name="in time", daemon=True).start()
    while not answer.done():
        if (left_s := began_s + limit_s() - time.monotonic()) <= 0:
            raise TimeoutError(f"no answer within {time.monotonic() - began_s:.0f} s")
        wait([answer], min(left_s, CHECK_STOP_INTERVAL_S))
    return answer.result()
