"""Follows one generation to its end: long polls to every agent, their answers to the intake, silent agents given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.gang.calls import ROUND_S, UNREACHABLE_RETRY_S, AgentGone, Answer, AwakeClock, Mailbox, NoAnswer
from orchestrator.driver.event_handler import Intake
from orchestrator.driver.generation import End, Generation

POLL_S = 1.0
"""How long an agent holds a poll when nothing happens: what happens is told at once. Longer for very many hosts."""
HOSTS_PER_POLL_S = 200
SILENCE_S = 20.0
"""An agent whose answer is so long overdue is frozen, or cut off: it is as good as lost."""
ASK_AGAIN_S = 10.0
"""When an answer is so long overdue, the agent is asked once more: the question, or its answer, may have been lost on the way."""
SUSPICION_S = 1.5
"""The same may be true of one whose answer is so long overdue when another host fails, or waits for it in vain."""


class Asked(Protocol):
    """Of the gang (`cluster.gang.gang.Gang`), what the watch needs."""

    def call(self, host: int, method: str, *args: Any) -> Any: ...

    def mailbox(self) -> Mailbox: ...


@dataclass
class Poll:
    """What an agent was asked last."""

    cursor: int
    due_s: float
    """When an agent that nothing has happened to would answer."""
    serial: int
    """Of the question: only the answer to the newest one leads to another."""
    ask_again_s: float
    """When to ask once more, should no answer have come; infinite if that was done."""


class Watch:
    def __init__(self, gang: Asked, generation: Generation, intake: Intake, clock: Callable[[], float] = time.monotonic):
        self.gang, self.generation, self.intake = gang, generation, intake
        # Silence counts only while the driver itself was awake to hear something.
        self.clock = AwakeClock(clock)
        self.poll_s = max(POLL_S, generation.num_hosts / HOSTS_PER_POLL_S)
        self._mailbox = gang.mailbox()
        self._polls: dict[int, Poll] = {}
        self._num_asked = 0
        self._next_round_s = 0.0

    def run(self, between: Callable[[Generation], None]) -> End:
        """Until all hosts are done or one has failed. Calls `between` every round: it may raise to end the watch."""
        for host in range(self.generation.num_hosts):
            self._ask(host, 0)
        while (end := self.generation.end) is None:
            # First what has arrived, then what has not.
            for answer in self._mailbox.take(ROUND_S):
                self._take(answer)
            if (now_s := self.clock()) >= self._next_round_s:
                self._next_round_s = now_s + ROUND_S
                self._judge_silence(now_s)
                between(self.generation)
        self.generation.suspect({host for host, late_s in self._late(self.clock()) if late_s > SUSPICION_S})
        return end

    def _ask(self, host: int, cursor: int) -> None:
        due_s = self.clock() + self.poll_s
        self._polls[host] = Poll(cursor, due_s, self._post(host, cursor, self.poll_s), due_s + ASK_AGAIN_S)

    def _post(self, host: int, cursor: int, wait_s: float) -> int:
        self._num_asked += 1
        self._mailbox.expect((host, self._num_asked), self.gang.call(host, "poll", cursor, wait_s))
        return self._num_asked

    def _take(self, answer: Answer) -> None:
        host, serial = answer.tag
        if isinstance(answer.error, AgentGone):
            self._polls.pop(host, None)
            self.generation.lose_agent(host)
        elif isinstance(answer.error, NoAnswer):
            self._not_reached(host, serial)
        elif answer.error is not None:
            raise answer.error
        else:
            self.intake.take_answer(self.generation, host, answer.value)
            self._go_on(host, serial, answer.value["cursor"])

    def _go_on(self, host: int, serial: int, cursor: int) -> None:
        poll = self._polls.get(host)
        if host in self.generation.done:
            self._polls.pop(host, None)
        elif poll is not None and serial == poll.serial:
            self._ask(host, cursor)
        elif poll is not None:  # an answer to an earlier question: it is alive
            poll.due_s = self.clock() + self.poll_s

    def _not_reached(self, host: int, serial: int) -> None:
        """Ray says that the actor cannot be reached now, not that it is dead: its silence begins, and it is asked again."""
        poll, now_s = self._polls.get(host), self.clock()
        if poll is not None and serial == poll.serial:
            poll.due_s, poll.ask_again_s = min(poll.due_s, now_s), now_s + UNREACHABLE_RETRY_S

    def _judge_silence(self, now_s: float) -> None:
        for host, late_s in list(self._late(now_s)):
            poll = self._polls[host]
            if late_s > SILENCE_S:
                del self._polls[host]
                self.generation.lose_agent(host)
            elif now_s >= poll.ask_again_s:
                poll.ask_again_s = float("inf")
                poll.serial = self._post(host, poll.cursor, 0.0)

    def _late(self, now_s: float) -> Iterable[tuple[int, float]]:
        """By how much the hosts' answers are overdue."""
        return ((host, now_s - poll.due_s) for host, poll in self._polls.items() if now_s > poll.due_s)
