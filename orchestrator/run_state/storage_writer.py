"""Writes to the run's storage from a background thread: the driver, which watches the gang, must not wait for storage."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

RETRY_S = 1.0
"""The delay before a failed write is tried again."""
STALL_S = 10.0
"""A write that takes longer is reported as hanging storage."""

Job = Callable[[], None]


class Writer:
    """Runs jobs in the order in which they were put. A new job replaces a waiting job with the same key.

    A job that raises is tried again until it succeeds or is replaced. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._failed: dict[str, str] = {}
        """The problem of each job that is to be tried again, by key."""
        self._under_way: tuple[str, float] | None = None
        """The key of the running job, and since when it runs."""
        self._changed = threading.Condition()
        self._stopped = False
        # A daemon: a write that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="storage", daemon=True)
        self._thread.start()

    def put(self, key: str, job: Job) -> None:
        with self._changed:
            if self._stopped:
                return
            # At the end, not in the place of the old job: it may depend on jobs that were put since.
            self._jobs.pop(key, None)
            self._jobs[key] = job
            self._changed.notify_all()

    def problem(self) -> str | None:
        """Returns why not everything is stored; None if nothing failed or hangs."""
        with self._changed:
            if self._failed:
                return next(iter(self._failed.values()))
            name, began_s = self._under_way or ("", float("inf"))
            stalled = self._clock() - began_s > STALL_S
            return f"the storage has not answered for {STALL_S:.0f} s: {name} is not written" if stalled else None

    def flush(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` until all jobs are done; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and self._under_way is None, timeout_s)

    def stop(self) -> None:
        """Starts and accepts no further job. Does not wait for the running one, which may hang for ever."""
        with self._changed:
            self._stopped = True
            self._jobs.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while (next_job := self._next()) is not None:
            key, job = next_job
            problem = _attempt(key, job)
            with self._changed:
                self._under_way = None
                if problem is None:
                    self._failed.pop(key, None)
                elif not self._stopped:
                    self._failed[key] = problem
                    self._jobs.setdefault(key, job)  # behind the others: they must not wait for it
                self._changed.notify_all()
                # All jobs wait: they go to the same storage, which would refuse them too.
                if problem is not None:
                    self._changed.wait_for(lambda: self._stopped, RETRY_S)

    def _next(self) -> tuple[str, Job] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._stopped)
            if self._stopped:
                return None
            key, job = self._jobs.popitem(last=False)
            self._under_way = key, self._clock()
            return key, job


def _attempt(key: str, job: Job) -> str | None:
    try:
        job()
    except Exception as error:  # a thread's boundary: shown by `problem`, and tried again
        return f"{key} could not be written: {getattr(error, 'strerror', None) or error}"
    return None
