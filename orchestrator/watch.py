"""Follows one generation to its end: long polls to every agent, their answers to the intake, silent agents given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import ray

from cluster.gang import Gang
from orchestrator.generation import Generation
from orchestrator.intake import Intake

POLL_S = 1.0
"""How long an agent holds a poll when nothing happens: what happens is told at once. Longer for very many hosts."""
HOSTS_PER_POLL_S = 200
ROUND_S = 0.2
"""How often the driver looks up from its polls."""
SILENCE_S = 20.0
"""An agent whose answer is so long overdue is frozen, or cut off: it is as good as lost."""
SUSPICION_S = 1.5
"""The same may be true of one whose answer is so long overdue when another host fails, or waits for it in vain."""


@dataclass(frozen=True)
class Poll:
    host: int
    due_s: float
    """When an agent that nothing has happened to would answer."""


class Watch:
    def __init__(self, gang: Gang, generation: Generation, intake: Intake, clock: Callable[[], float] = time.monotonic):
        self.gang, self.generation, self.intake, self.clock = gang, generation, intake, clock
        self.poll_s = max(POLL_S, generation.num_hosts / HOSTS_PER_POLL_S)
        self._polls: dict[ray.ObjectRef, Poll] = {}

    def run(self, attend: Callable[[Generation], None]) -> None:
        """Until all hosts are done or one has failed. Calls `attend` every round: it may raise to end the watch."""
        for host in range(self.generation.num_hosts):
            self._ask(host, 0)
        while not self.generation.finished and not self.generation.wants_restart:
            ready, _ = ray.wait(list(self._polls), num_returns=1, timeout=ROUND_S)
            if ready:  # and whatever else has come meanwhile
                ready, _ = ray.wait(list(self._polls), num_returns=len(self._polls), timeout=0)
            for ref in ready:
                self._take(self._polls.pop(ref).host, ref)
            for host in self._overdue(SILENCE_S):
                self.generation.broken.setdefault(host, "agent")
            attend(self.generation)
        self.generation.suspects = self._overdue(SUSPICION_S)

    def _ask(self, host: int, cursor: int) -> None:
        ref = self.gang.call(host, "poll", cursor, self.poll_s)
        self._polls[ref] = Poll(host, self.clock() + self.poll_s)

    def _take(self, host: int, ref: ray.ObjectRef) -> None:
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayActorError:
            self.generation.broken.setdefault(host, "agent")
            return
        self.intake.take_answer(self.generation, host, answer)
        if host not in self.generation.done:
            self._ask(host, answer["cursor"])

    def _overdue(self, limit_s: float) -> set[int]:
        """Hosts whose agents should have answered so long ago."""
        now_s = self.clock()
        return {poll.host for poll in self._polls.values() if now_s - poll.due_s > limit_s}
