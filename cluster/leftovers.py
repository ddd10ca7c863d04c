"""What a run has in the cluster, found by its names, and how to remove it: for a new driver, and for agents without one."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from cluster import groups

NAMESPACE = "gangway"
CLEAR_TIMEOUT_S = 20.0
LED_TIMEOUT_S = 5.0
"""For an agent to say whether it has a driver."""


def agent_name(run_name: str, *numbers: int) -> str:
    return f"{run_name}-host-{_joined(numbers)}"


def group_name(run_name: str, *numbers: int) -> str:
    """Of the group of a single seat; without numbers, of the one that all hosts share that the run cannot do without."""
    return f"{run_name}-seat-{_joined(numbers)}" if numbers else f"{run_name}-gang"


def clear(run_name: str, timeout_s: float = CLEAR_TIMEOUT_S, keep: Collection[str] = ()) -> list[str]:
    """Removes what an earlier driver of this run left in the cluster: agents, and groups that hold machines, or wait for them.

    Returns their names. Those in `keep` stay. Agents and groups live on without their driver, so that a new one can adopt them;
    only one driver of a run may call this.
    """
    left = {key: name for key, name in _groups_of(run_name).items() if name not in keep}
    agents = [name for name in _agents_of(run_name) if name not in keep]
    for name in agents:  # before their groups, which would kill them while they are looked up
        _kill_named(name)
    for key in left:
        remove_placement_group(groups.by_id(key))
    groups.wait_until(lambda: not left.keys() & groups.living().keys() and not set(agents) & set(_agents_of(run_name)), timeout_s)
    return [*left.values(), *agents]


def leave(run_name: str) -> None:
    """Ends this process, an agent whose lease has ended. It takes all that is left of the run with it, unless another agent still
    has a driver: then the driver lives, this agent is cut off from it, and the group that they share is not its to remove."""
    own_name = ray.get_runtime_context().get_actor_name()
    others = [name for name in _agents_of(run_name) if name != own_name]
    answers = _answers_of(others)
    if not any(answers.values()):
        for name in set(others) - answers.keys():  # the removal of its group does not end one that waits for a machine
            _kill_named(name)
        own_group = ray.util.get_current_placement_group()
        for key in removal_order(run_name, _groups_of(run_name), own_group.id.hex() if own_group is not None else "", answers):
            remove_placement_group(groups.by_id(key))
    os._exit(0)


def removal_order(run_name: str, left: Mapping[str, str], own_key: str, alive: Collection[str]) -> list[str]:
    """In which an agent that leaves removes groups (names by id): with its own, which goes last, Ray ends it.

    Others may leave at the same moment, and the first to remove another's group ends that one. So what nobody lives in, of whom
    nobody else would ever remove it, goes before the groups of the agents in `alive`.
    """
    inhabited = {_numbers_of(name, run_name, "host")[0] for name in alive}

    def rank(key: str) -> tuple[bool, bool]:
        numbers = _numbers_of(left[key], run_name, "seat")
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
    return {key: info["name"] for key, info in groups.living().items() if is_group_of(info["name"], run_name)}


def is_group_of(name: str, run_name: str) -> bool:
    return name in (f"{run_name}-gang", f"{run_name}-heads") or bool(_numbers_of(name, run_name, "seat"))


def _agents_of(run_name: str) -> list[str]:
    ours = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
    return [name for name in ours if _numbers_of(name, run_name, "host")]


def _numbers_of(name: str, run_name: str, kind: str) -> list[str]:
    """The numbers in the name of an agent ("host") or a group ("seat") of this run; none if it is not one."""
    numbers = name.removeprefix(f"{run_name}-{kind}-")
    return numbers.split("-") if numbers != name and numbers.replace("-", "").isdigit() else []


def _joined(numbers: Collection[int]) -> str:
    return "-".join(map(str, numbers))


def _kill_named(name: str) -> None:
    if (agent := find_agent(name)) is not None:
        ray.kill(agent)
