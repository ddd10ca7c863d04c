"""Follows one generation to its end: polls every agent, passes the answers to the event handler, gives up silent agents."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cluster.gang.calls import ROUND_S, UNREACHABLE_RETRY_S, AgentGone, Answer, AwakeClock, NoAnswer
from cluster.gang.gang_like import Asked
from orchestrator.driver.event_handler import EventHandler
from orchestrator.driver.generation import End, Generation

POLL_S = 1.0
"""How long an agent holds a poll when nothing happens; an event is returned at once. Longer for very many hosts."""
HOSTS_PER_POLL_S = 200
SILENCE_S = 20.0
"""An agent whose answer is so long overdue is frozen or cut off: its host counts as lost."""
ASK_AGAIN_S = 10.0
"""When an answer is so long overdue, the agent is asked once more: the call or its answer may have been lost."""
SUSPICION_S = 1.5
"""An agent whose answer is so long overdue when the generation ends is suspected to be frozen or cut off."""


@dataclass
class Poll:
    """The open poll of one agent."""

    cursor: int
    due_s: float
    """When an agent without events would answer."""
    serial: int
    """The number of the call. Only the answer to the newest call is followed by another poll."""
    ask_again_s: float
    """When to ask once more if no answer has come; infinite once that was done."""


class Poller:
    def __init__(self, gang: Asked, generation: Generation, events: EventHandler, clock: Callable[[], float] = time.monotonic):
        self.gang, self.generation, self.events = gang, generation, events
        # Silence counts only while the driver itself was awake: after a stall all answers are late.
        self.clock = AwakeClock(clock)
        self.poll_s = max(POLL_S, generation.num_hosts / HOSTS_PER_POLL_S)
        self._mailbox = gang.mailbox()
        self._polls: dict[int, Poll] = {}
        self._num_asked = 0
        self._next_round_s = 0.0

    def run(self, between: Callable[[Generation], None]) -> End:
        """Polls until all hosts are done or one has failed. Calls `between` in every round, which may raise to end the
        polling."""
        for host in range(self.generation.num_hosts):
            # From 0: an agent keeps only the events of its newest generation.
            self._ask(host, 0)
        while (end := self.generation.end) is None:
            # Answers first, silence second: an answer may have arrived just now.
            for answer in self._mailbox.collect(ROUND_S):
                self._handle_answer(answer)
            if (now_s := self.clock()) >= self._next_round_s:
                self._next_round_s = now_s + ROUND_S
                self._check_silence(now_s)
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

    def _handle_answer(self, answer: Answer) -> None:
        host, serial = answer.tag
        if isinstance(answer.error, AgentGone):
            self._polls.pop(host, None)
            self.generation.lose_agent(host)
        elif isinstance(answer.error, NoAnswer):
            self._not_reached(host, serial)
        elif answer.error is not None:
            raise answer.error
        else:
            # An answer to an earlier call too: events that were handled before are known by their numbers.
            self.events.handle_answer(self.generation, host, answer.value)
            self._poll_again(host, serial, answer.value["cursor"])

    def _poll_again(self, host: int, serial: int, cursor: int) -> None:
        poll = self._polls.get(host)
        if host in self.generation.done:
            self._polls.pop(host, None)
        elif poll is not None and serial == poll.serial:
            self._ask(host, cursor)
        elif poll is not None:  # an answer to an earlier call: the agent is alive
            poll.due_s = self.clock() + self.poll_s

    def _not_reached(self, host: int, serial: int) -> None:
        """Handles an agent that Ray could not reach: it may live, so its silence begins now, and it is asked again."""
        poll, now_s = self._polls.get(host), self.clock()
        if poll is not None and serial == poll.serial:
            poll.due_s, poll.ask_again_s = min(poll.due_s, now_s), now_s + UNREACHABLE_RETRY_S

    def _check_silence(self, now_s: float) -> None:
        for host, late_s in list(self._late(now_s)):
            poll = self._polls[host]
            if late_s > SILENCE_S:
                del self._polls[host]
                self.generation.lose_agent(host)
            elif now_s >= poll.ask_again_s:
                # Once only: calls to a frozen agent must not pile up.
                poll.ask_again_s = float("inf")
                # Without a wait: the answer shows at once that the agent lives.
                poll.serial = self._post(host, poll.cursor, 0.0)

    def _late(self, now_s: float) -> Iterable[tuple[int, float]]:
        """Returns the hosts whose answers are overdue, with the seconds."""
        return ((host, now_s - poll.due_s) for host, poll in self._polls.items() if now_s > poll.due_s)
