"""Which agents make up the gang that a driver has left: what the agents say themselves. Pure.

The record that the driver wrote may be of the generation before: it may have ended between its orders and the record of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class AdoptError(Exception):
    """What an earlier driver left is not a gang that could go on; the message says why."""


def newest_generation(leads: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """The slots of the newest generation's hosts, in host order. `leads`: what the agent on each slot said (`HostAgent.lead`).

    Raises AdoptError if the agent of one of its hosts is not among them.
    """
    ordered = {slot: lead["orders"] for slot, lead in leads.items() if lead["orders"] is not None}
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
