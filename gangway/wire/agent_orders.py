"""The orders of a driver, as far as an agent goes by them. It passes on all other fields to its process, which checks them.

The complete schemas are in `gangway.wire.orders`; a test checks that the two agree. `NotRequired` fields may be absent: the
driver may be of another version of the code than the agent, for a driver adopts a gang that runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict, cast

from cluster.agent.fields import problem_in
from gangway.wire import agent_limits as limits_of
from gangway.wire.agent_limits import Limits


class OrderError(ValueError):
    """An order that an agent does not understand. The message names what is wrong with it."""


class MachineOrders(TypedDict):
    """The part of a host's orders that depends on its machine (`Gang.orders`)."""

    local_device_ids: list[int] | None
    slice: int
    cache_dir: str | None
    env: NotRequired[dict[str, str]]


class StartOrders(TypedDict):
    """The orders that make a standby the process of a generation."""

    generation: int
    host: NotRequired[int]
    """Absent: the process belongs to no gang. No driver can adopt it, and it cannot be profiled."""
    num_hosts: NotRequired[int]
    limits: NotRequired[Mapping[str, Any]]
    """Of the process without progress, by the names of `gangway.wire.agent_limits.Limits`. Absent: none."""
    shown_lines: NotRequired[int]
    """How many of the lines that the process prints are shown in a second. Absent: none."""


class GangOrders(TypedDict):
    """What the orders of a host say that belongs to a gang."""

    generation: int
    host: int
    num_hosts: int


class Command(TypedDict):
    """A line for a process that trains. The process alone knows the other fields."""

    cmd: str


class ProfileCommand(Command):
    id: str
    """The answer of the process has the same."""


def read_start(orders: Any) -> tuple[StartOrders, Limits]:
    """Returns the orders, and the limits in them. Raises OrderError."""
    _refuse("start", problem_in(StartOrders, orders))
    try:
        return cast(StartOrders, orders), limits_of.read(orders.get("limits", {}))
    except ValueError as error:
        raise OrderError(f"the order 'start': limits: {error}") from error


def read_command(message: Any) -> Command:
    """Returns the message as a command. Raises OrderError."""
    _refuse("order", problem_in(Command, message))
    return cast(Command, message)


def read_profile(message: Any) -> ProfileCommand:
    """Returns the message as the command to profile. Raises OrderError."""
    _refuse("profile", problem_in(ProfileCommand, message))
    return cast(ProfileCommand, message)


def _refuse(order: str, problem: str) -> None:
    if problem:
        raise OrderError(f"the order {order!r}: {problem}")
