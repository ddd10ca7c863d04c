"""Asks the agents of a gang for a sign of life: a slot is available as long as its agent answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from cluster.gang.calls import GONE_ERRORS
from cluster.gang.slots import Slot
from cluster.placement.placement_groups import wait_answers
from gangway.text import cut
from gangway.waits import CheckStop

INTERVAL_S = 2.0
"""How often agents that nobody polls are asked. Less often if there are very many."""
PROBES_PER_S = 200
TIMEOUT_S = 10.0
"""An agent that had answered before and is silent for so long counts as not available."""
FAILURE_LOOK_S = 0.5
"""How often a wait for all agents looks whether one of them has died."""


class AgentDied(Exception):
    """An agent that was waited for has died; the message says of what."""


class Probes:
    """One open question for each slot. `describe(slot)` asks its agent and returns Ray's reference to the answer.
    `answered(slot)` is called when the agent lives."""

    def __init__(self, describe: Callable[[Slot], Any], answered: Callable[[Slot], None]):
        self._describe, self._answered = describe, answered
        self._interval_s = INTERVAL_S

    def slow_down_for(self, count: int) -> None:
        """So many slots will be probed from now on."""
        self._interval_s = max(INTERVAL_S, count / PROBES_PER_S)

    def send(self, slot: Slot) -> None:
        self.sent(slot, self._describe(slot))

    def sent(self, slot: Slot, ref: Any) -> None:
        """`ref` is a question to the agent of this slot, whose answer describes it."""
        slot.probe, slot.next_probe_s = ref, time.monotonic() + self._interval_s

    def probe(self, slot: Slot) -> None:
        """Asks, if it is time for it. An agent that has been silent for too long is not available."""
        now_s = time.monotonic()
        if slot.unassigned:
            return
        if slot.probe is None and now_s >= slot.next_probe_s:
            self.send(slot)
        elif slot.available and now_s > slot.next_probe_s + TIMEOUT_S:
            slot.description = None  # it will be available again if it ever answers

    def take_answers(self, slots: Sequence[Slot]) -> tuple[list[Slot], list[Slot]]:
        """Takes the answers that are there. Returns the slots that were answered for, and those of them whose agent is dead."""
        probed = {slot.probe: slot for slot in slots if slot.probe is not None}
        ready = ray.wait(list(probed), num_returns=len(probed), timeout=0)[0] if probed else ()
        answered = [probed[ref] for ref in ready]
        return answered, [slot for slot in answered if not self._accept_answer(slot)]

    def wait_for_all(self, slots: Sequence[Slot], deadline_s: float, check_stop: CheckStop) -> list[int]:
        """Waits until all these slots are available, at most until `deadline_s`. Returns the numbers of those that are not.
        Raises AgentDied."""
        while missing := {slot.probe: slot for slot in slots if not slot.available}:
            for ref in wait_answers(list(missing), min(deadline_s, time.monotonic() + FAILURE_LOOK_S), check_stop):
                slot = missing[ref]
                if not self._accept_answer(slot):
                    raise AgentDied(slot.death_message)
                if slot.probe is None and not slot.available:  # Ray could not reach it just now
                    self.send(slot)
            if time.monotonic() >= deadline_s and (silent := [slot.number for slot in slots if not slot.available]):
                return silent
        return []

    def _accept_answer(self, slot: Slot) -> bool:
        """Takes the answer to a probe. Returns False if the agent is dead."""
        ref, slot.probe = slot.probe, None
        try:
            slot.description = ray.get(ref)
        except ray.exceptions.ActorUnavailableError:  # before GONE_ERRORS: it is a RayActorError too, but the agent may live
            slot.description = None
            return True
        except GONE_ERRORS as error:
            slot.description, slot.death_message = None, cut(str(error))
            return False
        self._answered(slot)
        return True
