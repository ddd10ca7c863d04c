"""Decides which agents are the gang of a driver that has ended, from what the agents report. Pure.

The agents decide and not the driver's record: the driver may have ended after it gave new orders and before it recorded them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gangway.storage import shapes
from gangway.wire.orders import IN_GANG, Start


class AdoptError(Exception):
    """The agents of an earlier driver are not a complete gang; the message says why."""


def newest_generation(leads: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Returns the slots of the newest generation's hosts, in host order. `leads`: the answers of `HostAgent.take_over`, by slot.

    Raises AdoptError if the agent of one of its hosts is not among them, or if an agent has orders of another kind.
    """
    ordered = {slot: lead["orders"] for slot, lead in leads.items() if lead.get("orders") is not None}
    if odd := [(slot, problem) for slot, orders in ordered.items() if (problem := shapes.problem(Start, orders, only=IN_GANG))]:
        raise AdoptError(f"the agent of slot {odd[0][0]} has orders that belong to no gang: {odd[0][1]}")
    newest = max((orders["generation"] for orders in ordered.values()), default=None)
    if newest is None:
        raise AdoptError("no agent has orders for a generation" if leads else "no agent answers")
    hosts = {orders["host"]: slot for slot, orders in ordered.items() if orders["generation"] == newest}
    num_hosts = next(orders["num_hosts"] for orders in ordered.values() if orders["generation"] == newest)
    missing = [host for host in range(num_hosts) if host not in hosts]
    if missing:
        shown = ", ".join(map(str, missing))
        raise AdoptError(f"of generation {newest}, the agents of hosts {shown} are gone, do not answer, or had no orders yet")
    return [hosts[host] for host in range(num_hosts)]
