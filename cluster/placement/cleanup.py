"""Finds the actors and placement groups of a run by name, and removes them: for a new driver, and for agents without a driver."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from cluster.placement import placement_groups
from gangway.waits import CheckStop, do_nothing, wait_until

NAMESPACE = "gangway"
CLEAR_TIMEOUT_S = 20.0
LED_TIMEOUT_S = 5.0
"""How long to wait for the answers of other agents about whether they have a driver."""
EXIT_STAGGER_S, MAX_EXIT_DELAY_S = 0.2, 60.0
"""Agents whose leases end together exit one after the other. The first asks all others and removes the groups, which ends
them."""


def name_of(run_name: str, kind: str, *numbers: int) -> str:
    """Returns the name of an agent (`host`), a steward (`steward`), or the group of a slot (`slot`) of a run."""
    return f"{run_name}-{kind}-{'-'.join(map(str, numbers))}"


def gang_name(run_name: str) -> str:
    """Returns the name of the group that the `min_hosts` hosts share."""
    return f"{run_name}-gang"


def clear(
    run_name: str, timeout_s: float = CLEAR_TIMEOUT_S, keep: Collection[str] = (), check_stop: CheckStop = do_nothing
) -> list[str]:
    """Removes what earlier drivers of this run left in the cluster: agents, placement groups and stewards. Returns their names.

    Those in `keep` stay. Agents and groups outlive their driver so that the next one can adopt them: only one driver of a run may
    call this. An exception of `check_stop` ends only the wait for the removal.
    """
    groups = {key: name for key, name in _groups_of(run_name).items() if name not in keep}
    agents = [name for name in _agents_of(run_name) if name not in keep]
    # Agents before their groups: a group that is removed kills its agents while we look them up.
    for name in agents:
        _kill_named(name)
    for key in groups:
        remove_placement_group(placement_groups.by_id(key))
    # Stewards last: if this process is killed before that, a steward still cleans up the rest.
    stewards = [name for name in _actors() if _numbers_of(name, run_name, "steward") and name not in keep]
    for name in stewards:
        _kill_named(name)
    actors = {*agents, *stewards}

    def cleared() -> bool:
        # Until Ray has removed them, their names are in use.
        return not groups.keys() & placement_groups.living().keys() and not actors & set(_actors())

    wait_until(cleared, timeout_s, check_stop)
    return [*groups.values(), *agents, *stewards]


def exit_agent(run_name: str, driver_term: int) -> None:
    """Ends this process: an agent whose lease has ended, and whose last driver had this `driver_term`.

    It removes the rest of the run as well, unless another agent still has a driver. Then the driver lives and only this agent is
    cut off from it, so it must not remove the group that they share.
    """
    group = ray.util.get_current_placement_group()
    group_id = group.id.hex() if group is not None else ""
    name = ray.get_runtime_context().get_actor_name() or ""
    time.sleep(exit_delay_s(run_name, name))
    remove_orphaned(run_name, (driver_term,), name, group_id)
    os._exit(0)  # not `sys.exit`: that would end this thread alone


def exit_delay_s(run_name: str, agent: str) -> float:
    """Returns how long an agent of this name waits before it exits: longer with each slot number."""
    numbers = _numbers_of(agent, run_name, "host")
    return min(EXIT_STAGGER_S * int(numbers[0]), MAX_EXIT_DELAY_S) if numbers else 0.0


def remove_orphaned(run_name: str, numbers: tuple[int, ...], caller: str = "", caller_group: str = "") -> bool:
    """Removes what is left of a run if none of its agents has a driver.

    An agent (its name is `caller`, its group `caller_group`) or a steward calls this when its lease has ended. `numbers` are the
    term of its driver and, for a steward, the time when it was hired. Returns True if the caller has nothing more to look after.
    """
    groups = _groups_of(run_name)
    # Groups are listed before stewards. A driver hires its steward before it asks for groups: if there is no newer steward now,
    # none of the listed groups is a newer driver's.
    if any(steward[: len(numbers)] > numbers for steward in _stewards_of(run_name)):
        return True
    agents = [name for name in _agents_of(run_name) if name != caller]
    answers = _ask_for_drivers(agents)
    if any(answers.values()):
        return False
    # An agent that still waits for a machine is not ended by the removal of its group.
    for name in set(agents) - answers.keys():
        _kill_named(name)
    for key in removal_order(run_name, groups, caller_group, answers):
        remove_placement_group(placement_groups.by_id(key))
    return True


def removal_order(run_name: str, groups: Mapping[str, str], caller_group: str, alive: Collection[str]) -> list[str]:
    """Returns the order in which an agent that exits removes these groups (names by id).

    Its own group goes last, since Ray ends the agent with it. Several agents may exit at once, and the first that removes the
    group of another one ends that agent. So groups without an agent, which nobody else would remove, go before those of the
    agents in `alive`.
    """
    occupied = {_numbers_of(name, run_name, "host")[0] for name in alive}

    def rank(key: str) -> tuple[bool, bool]:
        numbers = _numbers_of(groups[key], run_name, "slot")
        return key == caller_group, not numbers or numbers[0] in occupied

    return sorted(groups, key=rank)


def find_agent(name: str) -> Any | None:
    """Returns the agent's handle; None if it is gone."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except (ValueError, AssertionError):  # AssertionError: Ray has just dropped the class, with the last actor of a driver
        return None


def _ask_for_drivers(names: Collection[str]) -> dict[str, bool]:
    """Asks all these agents at once whether they have a driver; returns the answers of those that answer."""
    agents = {name: find_agent(name) for name in names}
    calls = {agent.is_led.remote(): name for name, agent in agents.items() if agent is not None}
    # Bounded: a frozen agent does not answer, and must not hold the machines for ever.
    ready = ray.wait(list(calls), num_returns=len(calls), timeout=LED_TIMEOUT_S)[0] if calls else []
    answers = {}
    for ref in ready:
        with suppress(ray.exceptions.RayActorError):
            answers[calls[ref]] = ray.get(ref)
    return answers


def _groups_of(run_name: str) -> dict[str, str]:
    """Returns the names of the groups of a run, by id."""
    return {key: info["name"] for key, info in placement_groups.living().items() if is_group_of(info["name"], run_name)}


def is_group_of(name: str, run_name: str) -> bool:
    return name == gang_name(run_name) or bool(_numbers_of(name, run_name, "slot"))


def _agents_of(run_name: str) -> list[str]:
    return [name for name in _actors() if _numbers_of(name, run_name, "host")]


def _stewards_of(run_name: str) -> list[tuple[int, ...]]:
    """Returns the numbers in the names of the run's stewards: driver term and time of hiring."""
    all_numbers = [_numbers_of(name, run_name, "steward") for name in _actors()]
    return [tuple(map(int, numbers)) for numbers in all_numbers if numbers]


def _actors() -> list[str]:
    """Returns the names of all agents and stewards in the cluster, including those that Ray has not started yet."""
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]


def _numbers_of(name: str, run_name: str, kind: str) -> list[str]:
    """Returns the numbers in the name of an agent ("host"), a steward or a group ("slot") of this run; none for another name."""
    # The digits are checked: the name of another run may begin with the name of this one.
    numbers = name.removeprefix(f"{run_name}-{kind}-")
    return numbers.split("-") if numbers != name and numbers.replace("-", "").isdigit() else []


def _kill_named(name: str) -> None:
    if (agent := find_agent(name)) is not None:
        ray.kill(agent)
