"""Calls many hosts of a generation at once. A host that does not answer counts as lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cluster.gang.calls import AgentGone, NoAnswer, gather
from cluster.gang.gang_like import Asked
from orchestrator.driver.generation import Generation


def ask_hosts(
    gang: Asked,
    generation: Generation,
    ask: Callable[[int], Any],
    limits_s: Mapping[int, float],
    clock: Callable[[], float],
) -> dict[int, Any]:
    """Makes the call `ask(host)` for each host of `limits_s`; returns the answers that come within these times, by host.

    Raises what an agent's method raised, such as StaleDriver.
    """
    answers = gather(gang.mailbox(), ask, limits_s, clock)
    for host, answer in answers.items():
        if isinstance(answer.error, AgentGone | NoAnswer):
            generation.lose_agent(host)
        elif answer.error is not None:
            raise answer.error
    return {host: answer.value for host, answer in answers.items() if answer.error is None}
