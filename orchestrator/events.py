"""What the command and the driver share: events one way, the wish to stop the other way.

In Ray Train's local mode both live in one process and share a `Board`; else the board is an actor of the command's, and the
driver, wherever it runs, holds a `RemoteBoard` with the same methods.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

Event = dict[str, Any]
KEPT_EVENTS = 20_000
"""Enough for any reader that is alive; one that is not must not cost memory."""


FIRST_ANSWER_S = 5.0


class BoardLike(Protocol):
    def post(self, event: Event) -> None:
        """Never waits and never fails because of the reader."""
        ...

    def take(self, cursor: int, timeout_s: float) -> tuple[int, list[Event]]:
        """The events after `cursor` (0 at first), waiting up to `timeout_s` for one; and the cursor for the next call."""
        ...

    def request_stop(self, reason: str) -> None:
        """The first reason stays."""
        ...

    def stop_requested(self) -> str | None: ...


class Board:
    """Thread-safe; any number of readers, each with its own cursor."""

    def __init__(self, kept_events: int = KEPT_EVENTS):
        self._events: deque[Event] = deque(maxlen=kept_events)
        self._num_posted = 0
        self._stop_reason: str | None = None
        self._changed = threading.Condition()

    def post(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._num_posted += 1
            self._changed.notify_all()

    def take(self, cursor: int, timeout_s: float) -> tuple[int, list[Event]]:
        with self._changed:
            # A cursor beyond the end comes from the board's earlier life (an actor that was restarted).
            cursor = min(cursor, self._num_posted)
            self._changed.wait_for(lambda: self._num_posted > cursor, timeout=timeout_s)
            num_new = min(self._num_posted - cursor, len(self._events))
            return self._num_posted, [self._events[i] for i in range(len(self._events) - num_new, len(self._events))]

    def request_stop(self, reason: str) -> None:
        with self._changed:
            self._stop_reason = self._stop_reason or reason

    def stop_requested(self) -> str | None:
        with self._changed:
            return self._stop_reason


class RemoteBoard:
    """A board that is an actor. Goes to other processes by pickling."""

    def __init__(self, actor: Any):
        self._actor = actor
        self._asked: Any = None
        """A question for a stop request that is still open."""
        self._has_asked = False
        self._stop_reason: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteBoard, (self._actor,)

    def post(self, event: Event) -> None:
        self._actor.post.remote(event)

    def take(self, cursor: int, timeout_s: float) -> tuple[int, list[Event]]:
        return _answer(self._actor.take.remote(cursor, timeout_s), timeout_s + 10.0) or (cursor, [])

    def request_stop(self, reason: str) -> None:
        _answer(self._actor.request_stop.remote(reason), 10.0)

    def stop_requested(self) -> str | None:
        """As it was when the board last answered. Waits the first time alone: the command's machine may be cut off, and the
        driver has a gang to watch."""
        import ray

        if self._stop_reason is not None:
            return self._stop_reason
        first, self._has_asked = not self._has_asked, True
        if self._asked is None:
            self._asked = self._actor.stop_requested.remote()
        if ray.wait([self._asked], timeout=FIRST_ANSWER_S if first else 0)[0]:
            self._stop_reason, self._asked = _answer(self._asked, 0.0), None
        return self._stop_reason


def _answer(call: Any, timeout_s: float) -> Any:
    """None from a board that is gone: training does not depend on being watched."""
    import ray

    try:
        return ray.get(call, timeout=timeout_s)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None


def start_remote_board() -> RemoteBoard:
    """A board in an actor that ends with the calling process. Needs Ray to be initialized."""
    import ray

    remote: Any = ray.remote
    # Several threads: readers wait inside `take`.
    return RemoteBoard(remote(num_cpus=0, max_concurrency=8, max_restarts=-1)(Board).remote())
