"""Waits for Ray that the caller can interrupt.

Each wait takes `check_stop`. It is called at least once a second, and an exception that it raises ends the wait. So a driver that
waits for machines still obeys a stop request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

CheckStop = Callable[[], None]

CHECK_STOP_INTERVAL_S = 0.5
POLL_INTERVAL_S = 0.01


def do_nothing() -> None:
    """The default `check_stop`: nothing interrupts the wait."""


def wait_until(done: Callable[[], bool], timeout_s: float, check_stop: CheckStop = do_nothing) -> bool:
    """Polls until `done()` is true; returns whether that was in time. For changes that Ray does not announce."""
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


def wait_answers(
    refs: Sequence[Any], deadline_s: float, check_stop: CheckStop = do_nothing, *, count: int | None = None
) -> list[Any]:
    """Waits for `count` of these answers (default: all), at most until `deadline_s` (of `time.monotonic`). Returns the references
    whose answers have come."""
    count = len(refs) if count is None else count
    if not refs:  # `ray.wait` refuses an empty list
        return []
    while True:
        check_stop()
        # In short slices: nothing can interrupt Ray's own wait, and a stop request would have to wait for its end.
        slice_s = min(CHECK_STOP_INTERVAL_S, deadline_s - time.monotonic())
        ready = ray.wait(list(refs), num_returns=count, timeout=max(0.0, slice_s))[0]
        if len(ready) >= count or time.monotonic() >= deadline_s:
            return ready
