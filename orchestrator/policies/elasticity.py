"""Elasticity: how many hosts the gang has, and which. Pure functions. Slots are given by number, a gang by its slots in rank
order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gangway.config.section import Section, require


@dataclass(frozen=True, kw_only=True)
class ElasticityPolicy(Section):
    """When a gang that is smaller than `hosts.max` grows again. It always shrinks at once."""

    grow: Literal["when_it_repays", "at_once", "never"] = "when_it_repays"
    """`when_it_repays`: at the next checkpoint, if that saves more time than it costs. `at_once`: at the next checkpoint. (A
    gang that restarts for another reason uses all available hosts.)"""
    restart_cost_s: float = 5.0
    """The assumed cost of a planned restart until the run has measured one."""
    horizon_s: float = 3600.0
    """How far ahead savings are counted."""

    def __post_init__(self):
        for name in ("restart_cost_s", "horizon_s"):
            value = getattr(self, name)
            require(value >= 0, f"{name} = {value}: expected 0 or more (seconds)")


@dataclass(frozen=True)
class Members:
    slots: tuple[int, ...]
    """In rank order."""
    flagged: tuple[int, ...] = ()
    """Members that should be avoided, but without which the gang would be too small."""


@dataclass(frozen=True)
class Grow:
    reason: str


@dataclass(frozen=True)
class Stay:
    reason: str


def allowed_counts(minimum: int, maximum: int, fits: Callable[[int], bool]) -> list[int]:
    """Returns the numbers of hosts that a run can have, smallest first. `fits` tells whether mesh and batch divide over that
    many."""
    return [count for count in range(minimum, maximum + 1) if fits(count)]


def choose_members(
    present: Sequence[int], available: Collection[int], *, allowed: Sequence[int], avoid: Collection[int] = ()
) -> Members | None:
    """Returns the next gang, with as many hosts as are allowed and available; None if there are too few.

    `present` is the gang so far, in rank order, with the lost slots; `available` are the slots that could be members now. A slot
    that stays keeps its rank where possible: a spare gets the rank of a lost slot, and ranks close up only without spares. Slots
    to `avoid` are used only if there would be too few without them, and no more of them than needed.
    """
    if not allowed:
        return None
    free = set(available)
    candidates = [slot for slot in present if slot in free] + sorted(free - set(present))
    usable, flagged = _usable(candidates, set(avoid), needed=min(allowed))
    count = max((n for n in allowed if n <= len(usable)), default=None)
    if count is None:
        return None
    slots = _in_rank_order(present, usable[:count])
    return Members(slots, tuple(slot for slot in slots if slot in flagged))


def _usable(candidates: Sequence[int], avoid: Collection[int], *, needed: int) -> tuple[list[int], set[int]]:
    """Returns the candidates without those to avoid, but with as many of these as are `needed`; and which those are."""
    num_good = sum(slot not in avoid for slot in candidates)
    flagged = set([slot for slot in candidates if slot in avoid][: max(0, needed - num_good)])
    return [slot for slot in candidates if slot not in avoid or slot in flagged], flagged


def _in_rank_order(present: Sequence[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """Orders the chosen slots: slots that stay keep their order, new slots fill the gaps, the rest of them comes last."""
    old, new = set(present), set(chosen)  # as sets: gangs have thousands of hosts
    new_slots = deque(slot for slot in chosen if slot not in old)
    ranks: list[int] = []
    for slot in present:
        if slot in new:
            ranks.append(slot)
        elif new_slots:  # the rank of a lost slot: the ranks of all others stay as they are
            ranks.append(new_slots.popleft())
    return (*ranks, *new_slots)


def next_precompilation(
    present: Sequence[int], others: Sequence[int], *, allowed: Sequence[int], is_ready: Callable[[int, int], bool]
) -> tuple[int, ...] | None:
    """Returns the gang whose programs should be compiled next, ahead of need, in rank order; None if all are compiled.

    The gang may grow to all available hosts. If it loses a host, a spare replaces it, or it goes on with the next smaller allowed
    number. `others` are the slots that could be members and are not. `is_ready(count, slot)` tells whether the machine of this
    slot has the programs of a gang of `count` hosts.
    """
    slots, size = [*present, *others], len(present)
    larger = [count for count in allowed if size < count <= len(slots)]
    same = [count for count in allowed if count == size]
    smaller = [count for count in allowed if count < size]
    for count in (*larger[-1:], *same, *smaller[-1:]):
        ready = {slot for slot in slots if is_ready(count, slot)}
        if len(ready) < len(slots):  # the slots whose machines lack the programs come first
            return tuple(sorted(slots, key=ready.__contains__)[:count])
    return None


def should_grow(
    current: int,
    possible: int,
    *,
    remaining_steps: int | None,
    step_s: Mapping[int, float],
    cost_s: float | None,
    policy: ElasticityPolicy,
) -> Grow | Stay:
    """Decides whether to restart with `possible` hosts instead of `current` ones.

    `step_s`: measured median seconds of a step, by number of hosts. If `possible` was never measured, the work is assumed to
    divide evenly. `remaining_steps` is None if no number of steps ends the run. `cost_s`: the cost of a restart, None if there
    was none.
    """
    if possible <= current:
        return Stay(f"there are no more than {current} hosts")
    if policy.grow == "never":
        return Stay("driver.elasticity.grow = never")
    if policy.grow == "at_once":
        return Grow(f"{possible} hosts instead of {current} (driver.elasticity.grow = at_once)")
    now_s = step_s.get(current, 0.0)
    if now_s <= 0:
        return Stay("no step was measured yet")
    then_s = step_s.get(possible, now_s * current / possible)
    horizon = int(policy.horizon_s / now_s)
    steps = horizon if remaining_steps is None else min(remaining_steps, horizon)
    saved_s = steps * (now_s - then_s)
    price_s = policy.restart_cost_s if cost_s is None else cost_s
    text = f"{possible} hosts instead of {current} save {saved_s:.1f} s over {steps} steps, a restart costs {price_s:.1f} s"
    return Grow(text) if saved_s > price_s else Stay(text)
