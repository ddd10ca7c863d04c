"""What a run has in the cluster, found by its names, and how to remove it: for a new driver, and for agents without one."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from cluster.placement import placement_groups
from cluster.placement.waits import CheckStop, do_nothing, wait_until

NAMESPACE = "gangway"
CLEAR_TIMEOUT_S = 20.0
LED_TIMEOUT_S = 5.0
"""For an agent to say whether it has a driver."""
TURN_S, LAST_TURN_S = 0.2, 60.0
"""Agents whose leases end together leave in turn: the first asks all others, removes the groups, and so ends those that wait."""


def agent_name(run_name: str, *numbers: int) -> str:
    return f"{run_name}-host-{_joined(numbers)}"


def steward_name(run_name: str, *numbers: int) -> str:
    return f"{run_name}-steward-{_joined(numbers)}"


def group_name(run_name: str, *numbers: int) -> str:
    """Of the group of a single slot; without numbers, of the one that all hosts share that the run cannot do without."""
    return f"{run_name}-slot-{_joined(numbers)}" if numbers else f"{run_name}-gang"


def clear(
    run_name: str, timeout_s: float = CLEAR_TIMEOUT_S, keep: Collection[str] = (), check_stop: CheckStop = do_nothing
) -> list[str]:
    """Removes what earlier drivers of this run left in the cluster: agents, groups that hold machines or wait for them, stewards.

    Returns their names. Those in `keep` stay. Agents and groups live on without their driver, so that a new one can adopt them;
    only one driver of a run may call this. What `check_stop` raises ends only the wait for their end.
    """
    left = {key: name for key, name in _groups_of(run_name).items() if name not in keep}
    agents = [name for name in _agents_of(run_name) if name not in keep]
    for name in agents:  # before their groups, which would kill them while they are looked up
        _kill_named(name)
    for key in left:
        remove_placement_group(placement_groups.by_id(key))
    # Last: who is killed here before that leaves a steward behind for the rest.
    stewards = [name for name in (steward_name(run_name, *them) for them in _stewards_of(run_name)) if name not in keep]
    for name in stewards:
        _kill_named(name)
    actors = {*agents, *stewards}

    def cleared() -> bool:
        return not left.keys() & placement_groups.living().keys() and not actors & set(_actors())

    wait_until(cleared, timeout_s, check_stop)
    return [*left.values(), *agents, *stewards]


def leave(run_name: str, driver_term: int) -> None:
    """Ends this process, an agent whose lease has ended, and whose last driver had this `driver_term`. It takes all that is
    left of the run with it, unless another agent still has a driver: then the driver lives, this agent is cut off from it, and
    the group that
    they share is not its to remove."""
    own_group = ray.util.get_current_placement_group()
    own_key = own_group.id.hex() if own_group is not None else ""
    own_name = ray.get_runtime_context().get_actor_name() or ""
    time.sleep(turn_s(run_name, own_name))
    remove_unled(run_name, (driver_term,), own_name, own_key)
    os._exit(0)


def turn_s(run_name: str, agent: str) -> float:
    """How long an agent of this name waits before it leaves."""
    numbers = _numbers_of(agent, run_name, "host")
    return min(TURN_S * int(numbers[0]), LAST_TURN_S) if numbers else 0.0


def remove_unled(run_name: str, numbers: tuple[int, ...], own_name: str = "", own_key: str = "") -> bool:
    """Removes what is left of a run, if no agent of it has a driver. Called by an agent (`own_name`, in the group `own_key`) or a
    steward whose own lease has ended; `numbers`: the term of its driver, and when a steward was hired. True if done: nothing
    is left that the caller would have to look after.
    """
    left = _groups_of(run_name)
    # In this order: a driver has a steward before it has groups, so what is in `left` is not a newer one's unless its steward is
    # there.
    if any(other[: len(numbers)] > numbers for other in _stewards_of(run_name)):
        return True
    others = [name for name in _agents_of(run_name) if name != own_name]
    answers = _answers_of(others)
    if any(answers.values()):
        return False
    for name in set(others) - answers.keys():  # the removal of its group does not end one that waits for a machine
        _kill_named(name)
    for key in removal_order(run_name, left, own_key, answers):
        remove_placement_group(placement_groups.by_id(key))
    return True


def removal_order(run_name: str, left: Mapping[str, str], own_key: str, alive: Collection[str]) -> list[str]:
    """In which an agent that leaves removes groups (names by id): with its own, which goes last, Ray ends it.

    Others may leave at the same moment, and the first to remove another's group ends that one. So what nobody lives in, of whom
    nobody else would ever remove it, goes before the groups of the agents in `alive`.
    """
    inhabited = {_numbers_of(name, run_name, "host")[0] for name in alive}

    def rank(key: str) -> tuple[bool, bool]:
        numbers = _numbers_of(left[key], run_name, "slot")
        return key == own_key, not numbers or numbers[0] in inhabited

    return sorted(left, key=rank)


def find_agent(name: str) -> Any | None:
    """The agent's handle; None if it is gone."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except (
        ValueError,
        AssertionError,
    ):  # the latter where Ray has just forgotten its class, with the last one of a driver
        return None


def _answers_of(names: Collection[str]) -> dict[str, bool]:
    """What those of these agents that answer say when asked whether they are led."""
    agents = {name: find_agent(name) for name in names}
    asked = {agent.is_led.remote(): name for name, agent in agents.items() if agent is not None}
    ready = ray.wait(list(asked), num_returns=len(asked), timeout=LED_TIMEOUT_S)[0] if asked else []
    answers = {}
    for ref in ready:
        with suppress(ray.exceptions.RayActorError):
            answers[asked[ref]] = ray.get(ref)
    return answers


def _groups_of(run_name: str) -> dict[str, str]:
    """The names of the groups of a run, by id."""
    return {key: info["name"] for key, info in placement_groups.living().items() if is_group_of(info["name"], run_name)}


def is_group_of(name: str, run_name: str) -> bool:
    return name == f"{run_name}-gang" or bool(_numbers_of(name, run_name, "slot"))


def _agents_of(run_name: str) -> list[str]:
    return [name for name in _actors() if _numbers_of(name, run_name, "host")]


def _stewards_of(run_name: str) -> list[tuple[int, ...]]:
    """The numbers of the stewards of a run."""
    found = [_numbers_of(name, run_name, "steward") for name in _actors()]
    return [tuple(map(int, numbers)) for numbers in found if numbers]


def _actors() -> list[str]:
    """The names of all agents and stewards in the cluster, those included that Ray has not started yet."""
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]


def _numbers_of(name: str, run_name: str, kind: str) -> list[str]:
    """The numbers in the name of an agent ("host"), a steward or a group ("slot") of this run; none if it is not one."""
    numbers = name.removeprefix(f"{run_name}-{kind}-")
    return numbers.split("-") if numbers != name and numbers.replace("-", "").isdigit() else []


def _joined(numbers: Collection[int]) -> str:
    return "-".join(map(str, numbers))


def _kill_named(name: str) -> None:
    if (agent := find_agent(name)) is not None:
        ray.kill(agent)
