"""Waits for what Ray does in its own time, which whoever waits can end.

Each takes `check_stop`: it is called at least once a second, and what it raises ends the wait. So a driver that waits for
machines still stops when a person asks it to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

CheckStop = Callable[[], None]

ATTEND_INTERVAL_S = 0.5
LOOK_INTERVAL_S = 0.01


def do_nothing() -> None:
    """Attends to nothing."""


def wait_until(done: Callable[[], bool], timeout_s: float, check_stop: CheckStop = do_nothing) -> bool:
    """Returns whether `done` came true in time. For what Ray gives no notice of."""
    deadline_s, attend_s = time.monotonic() + timeout_s, 0.0
    while not done():
        now_s = time.monotonic()
        if now_s > deadline_s:
            return False
        if now_s >= attend_s:
            check_stop()
            attend_s = now_s + ATTEND_INTERVAL_S
        time.sleep(LOOK_INTERVAL_S)
    return True


def wait_answers(
    refs: Sequence[Any], deadline_s: float, check_stop: CheckStop = do_nothing, *, count: int | None = None
) -> list[Any]:
    """Returns those references whose answers have come: as soon as `count` of them have (default: all), at the latest at
    `deadline_s` (of `time.monotonic`)."""
    count = len(refs) if count is None else count
    if not refs:
        return []
    while True:
        check_stop()
        slice_s = min(ATTEND_INTERVAL_S, deadline_s - time.monotonic())
        ready = ray.wait(list(refs), num_returns=count, timeout=max(0.0, slice_s))[0]
        if len(ready) >= count or time.monotonic() >= deadline_s:
            return ready
