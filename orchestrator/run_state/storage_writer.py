"""Writes to the run's storage, from a thread of its own: the driver, which watches the gang, never waits for storage."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

RETRY_S = 1.0
"""After a write that failed."""
STALL_S = 10.0
"""A write that takes longer is told: the storage hangs."""

Job = Callable[[], None]


class Writer:
    """Does jobs in the order in which they were put. Of two waiting jobs of one key the later one takes the place of both.

    A job that raises is tried again until it succeeds or a later one of its key takes its place. Any thread may call.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._failed: dict[str, str] = {}
        """Why, by key: those that are to be tried again."""
        self._under_way: tuple[str, float] | None = None
        """The key of the job that is being done, and since when."""
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="storage", daemon=True)
        self._thread.start()

    def put(self, key: str, job: Job) -> None:
        with self._changed:
            if self._stopped:
                return
            # At the end: what it says may build on jobs that were put since.
            self._jobs.pop(key, None)
            self._jobs[key] = job
            self._changed.notify_all()

    def problem(self) -> str | None:
        """Why what was put is not in the storage; None while all is well."""
        with self._changed:
            if self._failed:
                return next(iter(self._failed.values()))
            name, began_s = self._under_way or ("", float("inf"))
            stalled = self._clock() - began_s > STALL_S
            return f"the storage has not answered for {STALL_S:.0f} s: {name} is not written" if stalled else None

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was put is written, at most so long; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and self._under_way is None, timeout_s)

    def stop(self) -> None:
        """Begins no further job, and takes none. Does not wait for the one under way: it may hang for ever."""
        with self._changed:
            self._stopped = True
            self._jobs.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            key, job = found
            problem = _attempt(key, job)
            with self._changed:
                self._under_way = None
                if problem is None:
                    self._failed.pop(key, None)
                elif not self._stopped:
                    self._failed[key] = problem
                    self._jobs.setdefault(key, job)  # behind the others: what can be written must not wait for it
                self._changed.notify_all()
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
    except Exception as error:  # a thread's boundary: told by `problem`, and tried again
        return f"{key} could not be written: {getattr(error, 'strerror', None) or error}"
    return None
