"""Calls to agents and their answers, independent of Ray's types. All agents are asked at once, and none is waited for in turn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import ray

from gangway.text import cut

ROUND_S = 0.2
UNREACHABLE_RETRY_S = 1.0
"""How long to wait before an agent that Ray could not reach is asked again."""
MAX_ROUND_S = 1.0
"""A longer round of a loop means that this process stalled. The excess does not count against the agents."""


class AgentGone(Exception):
    """The agent's process has ended, or will never start: its host is lost."""


class NoAnswer(Exception):
    """The agent has not answered in time, or could not be reached just now. It may answer when it is asked again."""


GONE_ERRORS = (
    ray.exceptions.RayActorError,
    ray.exceptions.ActorPlacementGroupRemoved,
    ray.exceptions.ActorUnschedulableError,
)
"""What Ray raises for an agent that is dead or will never start. ActorUnavailableError is a RayActorError too, but such an agent
may come back: it has to be excluded first."""


def unheard(call: Any) -> None:
    """For a call whose answer nobody waits for: what it raises is told by the agent's events. Ray would print it as an unhandled
    error, on the console of the run."""
    call.future().add_done_callback(lambda done: done.exception())


@dataclass(frozen=True)
class Answer:
    tag: Any
    """The name that the caller gave to the call."""
    value: Any = None
    error: Exception | None = None
    """AgentGone, NoAnswer, or what the agent's method raised."""


class MailboxLike(Protocol):
    """What whoever makes calls needs of a mailbox. See `Mailbox`."""

    def expect(self, tag: Any, call: Any) -> None: ...

    def collect(self, timeout_s: float) -> list[Answer]: ...


class Mailbox:
    """Collects the answers to calls in the order in which they arrive. Only one thread may collect them."""

    def __init__(self) -> None:
        # A SimpleQueue: callbacks run in a thread of Ray, and its `put` never blocks.
        self._answers: SimpleQueue[Answer] = SimpleQueue()

    def expect(self, tag: Any, call: Any) -> None:
        """Delivers the answer to `call` (a reference that `Gang.call` returned) to this mailbox, as `tag`."""
        call.future().add_done_callback(lambda done: self._answers.put(_answer(tag, done)))

    def collect(self, timeout_s: float) -> list[Answer]:
        """Returns all answers that have arrived. Waits for the first one, at most `timeout_s`."""
        answers: list[Answer] = []
        try:
            answers.append(self._answers.get(timeout=timeout_s) if timeout_s > 0 else self._answers.get_nowait())
            while True:
                answers.append(self._answers.get_nowait())
        except Empty:
            return answers


class AwakeClock:
    """Counts the seconds in which this process was awake. Read it in every round of a loop: a longer pause between two readings
    (the process was stopped, or stuck) counts as `MAX_ROUND_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._read_at_s, self._awake_s = clock(), 0.0

    def __call__(self) -> float:
        now_s = self._clock()
        self._awake_s += min(now_s - self._read_at_s, MAX_ROUND_S)
        self._read_at_s = now_s
        return self._awake_s


def gather(
    mailbox: MailboxLike, ask: Callable[[Any], Any], timeouts_s: Mapping[Any, float], clock: Callable[[], float] = time.monotonic
) -> dict[Any, Answer]:
    """Makes the call `ask(tag)` for each tag of `timeouts_s`; returns one answer for each, NoAnswer where none came in time.

    An agent that could not be reached is asked again. A stall of this process does not count against the agents.
    """
    awake_s = AwakeClock(clock)
    final_answers: dict[Any, Answer] = {}
    to_ask = deque((tag, 0.0) for tag in timeouts_s)
    """Tags to ask, each with the earliest time, in order of these times."""
    by_timeout = sorted(timeouts_s, key=timeouts_s.__getitem__)
    while len(final_answers) < len(timeouts_s):
        now_s = awake_s()
        while to_ask and to_ask[0][1] <= now_s:
            if (tag := to_ask.popleft()[0]) not in final_answers:
                # A call for each at once, none is waited for: a frozen agent must not delay the others.
                mailbox.expect(tag, ask(tag))
        # The call with the longest timeout that has no answer yet decides how long to wait. The list is sorted once: with
        # thousands of hosts a `max` in every round would be slow.
        while by_timeout[-1] in final_answers:
            by_timeout.pop()
        left_s = timeouts_s[by_timeout[-1]] - now_s
        answers = mailbox.collect(min(ROUND_S, max(0.0, left_s)))
        for answer in answers:
            if isinstance(answer.error, NoAnswer):
                to_ask.append((answer.tag, awake_s() + UNREACHABLE_RETRY_S))
            else:
                final_answers.setdefault(answer.tag, answer)
        # Not before the mailbox is empty: an answer may have come while this process stalled.
        if left_s <= 0 and not answers:
            break
    silent = {tag: Answer(tag, error=NoAnswer(f"no answer in {limit_s:g} s")) for tag, limit_s in timeouts_s.items()}
    return silent | final_answers


def _answer(tag: Any, done: Future[Any]) -> Answer:
    error = done.exception()
    return Answer(tag, done.result()) if error is None else Answer(tag, error=_translated(error))


def _translated(error: BaseException) -> Exception:
    # First: it is a RayActorError as well, and the agent may live.
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return NoAnswer(cut(str(error)))
    if isinstance(error, GONE_ERRORS):
        return AgentGone(cut(str(error)))
    return error if isinstance(error, Exception) else RuntimeError(repr(error))
