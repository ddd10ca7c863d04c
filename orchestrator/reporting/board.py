"""The board: the channel between command and driver. Events go one way, the stop request goes the other way.

In Ray Train's local mode both run in one process and share a `Board`. Otherwise the board is an actor that the command has
started, and the driver uses a `RemoteBoard` with the same methods.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

from gangway.wire.console import ConsoleEvent

KEPT_EVENTS = 20_000
"""Enough for any reader that is alive. A dead reader must not cost memory."""
FIRST_ANSWER_S = 5.0
"""How long the first `RemoteBoard.stop_requested` waits for its answer."""


class BoardLike(Protocol):
    def post(self, event: ConsoleEvent) -> None:
        """Posts an event. Never waits and never fails because of the reader."""
        ...

    def read(self, cursor: int, timeout_s: float) -> tuple[int, list[ConsoleEvent]]:
        """Returns the cursor for the next call, and the events after `cursor` (0 at first). Waits up to `timeout_s` for one."""
        ...

    def request_stop(self, reason: str, *, wait: bool = True) -> None:
        """Requests that the run saves and stops. The first reason is kept. `wait`: until the board has it, where it is a remote
        one; the driver, which reads it, need not wait."""
        ...

    def stop_requested(self) -> str | None: ...

    def conclude(self, outcome: dict[str, Any]) -> None:
        """Tells how the launch has ended, also where the storage cannot take it."""
        ...

    def outcome(self) -> dict[str, Any] | None:
        """Returns what `conclude` was given; None before that."""
        ...


class Board:
    """Thread-safe; any number of readers, each with its own cursor."""

    def __init__(self, kept_events: int = KEPT_EVENTS):
        self._events: deque[ConsoleEvent] = deque(maxlen=kept_events)
        self._num_posted = 0
        self._stop_reason: str | None = None
        self._outcome: dict[str, Any] | None = None
        self._changed = threading.Condition()

    def post(self, event: ConsoleEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._num_posted += 1
            self._changed.notify_all()

    def read(self, cursor: int, timeout_s: float) -> tuple[int, list[ConsoleEvent]]:
        with self._changed:
            # A cursor beyond the end is from before the actor was restarted.
            cursor = min(cursor, self._num_posted)
            self._changed.wait_for(lambda: self._num_posted > cursor, timeout=timeout_s)
            num_new = min(self._num_posted - cursor, len(self._events))
            return self._num_posted, [self._events[i] for i in range(len(self._events) - num_new, len(self._events))]

    def request_stop(self, reason: str, *, wait: bool = True) -> None:
        with self._changed:
            self._stop_reason = self._stop_reason or reason

    def stop_requested(self) -> str | None:
        with self._changed:
            return self._stop_reason

    def conclude(self, outcome: dict[str, Any]) -> None:
        self._outcome = outcome

    def outcome(self) -> dict[str, Any] | None:
        return self._outcome


class RemoteBoard:
    """A board in an actor. It can be pickled to other processes."""

    def __init__(self, actor: Any):
        self._actor = actor
        self._asked: Any = None
        """The open call to the actor's `stop_requested`."""
        self._has_asked = False
        self._stop_reason: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteBoard, (self._actor,)

    def post(self, event: ConsoleEvent) -> None:
        from cluster.gang.calls import unheard

        # Not awaited: the machine of the command may be cut off.
        unheard(self._actor.post.remote(event))

    def read(self, cursor: int, timeout_s: float) -> tuple[int, list[ConsoleEvent]]:
        return _answer(self._actor.read.remote(cursor, timeout_s), timeout_s + 10.0) or (cursor, [])

    def request_stop(self, reason: str, *, wait: bool = True) -> None:
        call = self._actor.request_stop.remote(reason)
        if wait:
            _answer(call, 10.0)
        else:
            # Known here at once: the command's machine, and the board with it, may be cut off.
            self._stop_reason = self._stop_reason or reason

    def stop_requested(self) -> str | None:
        """Returns the reason, as of the board's last answer. Only the first call waits: the command's machine may be cut off,
        and the driver must go on watching the gang."""
        import ray

        if self._stop_reason is not None:
            return self._stop_reason
        first, self._has_asked = not self._has_asked, True
        # Another thread may ask meanwhile, and have the answer first.
        asked = self._asked = self._asked or self._actor.stop_requested.remote()
        if ray.wait([asked], timeout=FIRST_ANSWER_S if first else 0)[0]:
            self._stop_reason, self._asked = self._stop_reason or _answer(asked, 0.0), None
        return self._stop_reason

    def conclude(self, outcome: dict[str, Any]) -> None:
        # Awaited: this process ends soon.
        _answer(self._actor.conclude.remote(outcome), 10.0)

    def outcome(self) -> dict[str, Any] | None:
        return _answer(self._actor.outcome.remote(), 10.0)


def _answer(call: Any, timeout_s: float) -> Any:
    """Returns the answer; None if the board is gone: training does not depend on it."""
    import ray

    try:
        return ray.get(call, timeout=timeout_s)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None


def start_remote_board() -> RemoteBoard:
    """Starts a board in an actor that ends with the calling process. Ray must be initialized."""
    import ray

    remote: Any = ray.remote
    # Several threads: a reader blocks one of them inside `read`.
    return RemoteBoard(remote(num_cpus=0, max_concurrency=8, max_restarts=-1)(Board).remote())
