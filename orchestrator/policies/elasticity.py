"""How many hosts, and which: pure functions of what there is. Slots are named by number; a gang is its slots in rank order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainers.config.section import Section, require


@dataclass(frozen=True, kw_only=True)
class ElasticityPolicy(Section):
    """When a gang that is smaller than `hosts.max` takes in hosts that have come back. It always shrinks at once."""

    grow: Literal["when_it_repays", "at_once", "never"] = "when_it_repays"
    """At the next checkpoint if the time it saves is more than it costs; at the next checkpoint anyway; never. (A gang that
    restarts for another reason takes what there is.)"""
    restart_cost_s: float = 5.0
    """What a planned restart is taken to cost until the run has measured one."""
    horizon_s: float = 3600.0
    """How far ahead a saving is counted: who knows what comes after."""

    def __post_init__(self):
        for name in ("restart_cost_s", "horizon_s"):
            value = getattr(self, name)
            require(value >= 0, f"{name} = {value}: expected 0 or more (seconds)")


@dataclass(frozen=True)
class Members:
    slots: tuple[int, ...]
    """In rank order."""
    flagged: tuple[int, ...] = ()
    """Those of them that were to be avoided: without them the gang would be too small."""


@dataclass(frozen=True)
class Grow:
    reason: str


@dataclass(frozen=True)
class Stay:
    reason: str


def allowed_counts(minimum: int, maximum: int, fits: Callable[[int], bool]) -> list[int]:
    """The numbers of hosts that a run can have, smallest first: `fits` says whether mesh and batch divide over so many."""
    return [count for count in range(minimum, maximum + 1) if fits(count)]


def choose_members(
    present: Sequence[int], available: Collection[int], *, allowed: Sequence[int], avoid: Collection[int] = ()
) -> Members | None:
    """The next gang: as many hosts as are allowed and available; None if there are too few.

    `present` is the gang so far, in rank order, with those that are lost; `available` are the slots that could be members now.
    Who is left keeps its rank where it can: a spare takes the place of a lost one, and only without spares the ranks close up.
    Slots to `avoid` are taken only if there would be too few without them, and no more of them than needed.
    """
    if not allowed:
        return None
    there, before, bad = set(available), set(present), set(avoid)
    order = [slot for slot in present if slot in there] + sorted(there - before)
    num_good = sum(slot not in bad for slot in order)
    flagged = set([slot for slot in order if slot in bad][: max(0, min(allowed) - num_good)])
    usable = [slot for slot in order if slot not in bad or slot in flagged]
    count = max((n for n in allowed if n <= len(usable)), default=None)
    if count is None:
        return None
    chosen = set(usable[:count])
    newcomers = deque(slot for slot in usable[:count] if slot not in before)
    # Over the old ranks: those that stay, and newcomers in the gaps; who finds no gap comes last.
    ranks = [slot if slot in chosen else (newcomers.popleft() if newcomers else None) for slot in present]
    slots = (*(slot for slot in ranks if slot is not None), *newcomers)
    return Members(slots, tuple(slot for slot in slots if slot in flagged))


def next_precompilation(
    present: Sequence[int], others: Sequence[int], *, allowed: Sequence[int], is_ready: Callable[[int, int], bool]
) -> tuple[int, ...] | None:
    """The gang whose programs should be compiled next, ahead of need: its slots, in rank order; None if all is compiled.

    The gang may grow to what there is; if it loses a host, another one takes its place, or it goes on with the next smaller
    number that is allowed. `others` are the slots that could be members and are not. `is_ready(count, slot)`: the machine of
    this slot has the programs of a gang of so many hosts.
    """
    everyone, size = [*present, *others], len(present)
    grown, smaller = [n for n in allowed if size < n <= len(everyone)], [n for n in allowed if n < size]
    for count in (*grown[-1:], *(n for n in allowed if n == size), *smaller[-1:]):
        ready = {slot for slot in everyone if is_ready(count, slot)}
        if len(ready) < len(everyone):  # those first whose machines have them not
            return tuple(sorted(everyone, key=ready.__contains__)[:count])
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
    """Whether to restart with `possible` hosts instead of `current` ones.

    `step_s`: measured median seconds of a step, by number of hosts; where `possible` was never measured, the work is taken to
    divide evenly. `remaining_steps` is None where no number of steps ends the run. `cost_s`: what a restart cost, None if there
    was none yet.
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
    saved_s, price_s = steps * (now_s - then_s), policy.restart_cost_s if cost_s is None else cost_s
    what = f"{possible} hosts instead of {current} save {saved_s:.1f} s over {steps} steps, a restart costs {price_s:.1f} s"
    return Grow(what) if saved_s > price_s else Stay(what)
