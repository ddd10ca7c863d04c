"""Calls to agents and their answers, without Ray's own words: whoever asks many agents waits for none of them in turn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import ray

ROUND_S = 0.2
UNREACHABLE_RETRY_S = 1.0
"""How long after Ray could not reach an agent it is asked again."""
LONGEST_ROUND_S = 1.0
"""A round of a loop that takes longer was a stall of this process: for its length nobody else can be blamed."""


class AgentGone(Exception):
    """The agent's process has ended, or will never start: its host is lost."""


class NoAnswer(Exception):
    """The agent has not answered in time, or could not be reached just now. It may answer when it is asked again."""


GONE_ERRORS = (
    ray.exceptions.RayActorError,
    ray.exceptions.ActorPlacementGroupRemoved,
    ray.exceptions.ActorUnschedulableError,
)
"""What Ray raises of an agent that is dead, or will never live; but for ActorUnavailableError, which is one of the first kind."""


@dataclass(frozen=True)
class Answer:
    tag: Any
    """What the asker called the question."""
    value: Any = None
    error: Exception | None = None
    """AgentGone, NoAnswer, or what the agent's method raised."""


class Mailbox:
    """The answers to calls, in the order in which they arrive. One thread takes them."""

    def __init__(self) -> None:
        self._answers: SimpleQueue[Answer] = SimpleQueue()

    def expect(self, tag: Any, call: Any) -> None:
        """Has the answer to `call` (a reference that `Gang.call` returned) arrive here as `tag`."""
        call.future().add_done_callback(lambda done: self._answers.put(_answer(tag, done)))

    def take(self, timeout_s: float) -> list[Answer]:
        """All answers that are there. Waits for the first, at most `timeout_s`."""
        taken: list[Answer] = []
        try:
            taken.append(self._answers.get(timeout=timeout_s) if timeout_s > 0 else self._answers.get_nowait())
            while True:
                taken.append(self._answers.get_nowait())
        except Empty:
            return taken


class AwakeClock:
    """Seconds in which the process that reads it was awake. To be read in every round of a loop: a longer pause between two
    readings (the process was stopped, or stuck) counts as one round."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._read_at_s, self._awake_s = clock(), 0.0

    def __call__(self) -> float:
        now_s = self._clock()
        self._awake_s += min(now_s - self._read_at_s, LONGEST_ROUND_S)
        self._read_at_s = now_s
        return self._awake_s


def gather(
    mailbox: Mailbox, ask: Callable[[Any], Any], timeouts_s: Mapping[Any, float], clock: Callable[[], float] = time.monotonic
) -> dict[Any, Answer]:
    """One answer for each tag of `timeouts_s`, to the call that `ask(tag)` makes; NoAnswer for those that have none in that time.

    An agent that could not be reached is asked again. A stall of this process is not held against the agents.
    """
    awake_s = AwakeClock(clock)
    found: dict[Any, Answer] = {}
    to_ask = deque((tag, 0.0) for tag in timeouts_s)
    """Whom to ask, and from when on: in this order."""
    patience = sorted(timeouts_s, key=timeouts_s.__getitem__)
    while len(found) < len(timeouts_s):
        now_s = awake_s()
        while to_ask and to_ask[0][1] <= now_s:
            if (tag := to_ask.popleft()[0]) not in found:
                mailbox.expect(tag, ask(tag))
        while patience[-1] in found:
            patience.pop()
        left_s = timeouts_s[patience[-1]] - now_s
        answers = mailbox.take(min(ROUND_S, max(0.0, left_s)))
        for answer in answers:
            if isinstance(answer.error, NoAnswer):
                to_ask.append((answer.tag, awake_s() + UNREACHABLE_RETRY_S))
            else:
                found.setdefault(answer.tag, answer)
        if left_s <= 0 and not answers:
            break
    silent = {tag: Answer(tag, error=NoAnswer(f"no answer in {limit_s:g} s")) for tag, limit_s in timeouts_s.items()}
    return silent | found


def _answer(tag: Any, done: Future[Any]) -> Answer:
    error = done.exception()
    return Answer(tag, done.result()) if error is None else Answer(tag, error=_translated(error))


def _translated(error: BaseException) -> Exception:
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return NoAnswer(str(error))
    if isinstance(error, GONE_ERRORS):
        return AgentGone(str(error))
    return error if isinstance(error, Exception) else RuntimeError(repr(error))
