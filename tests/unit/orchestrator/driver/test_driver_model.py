"""A model check of the driver: random faults, driver deaths and stalls of up to minutes, storage that hangs or fails at any
write, clocks that step, answers lost and late.

What must hold, whatever happens: one gang trains at a time and every step is committed once; no healthy host is given up and no
healthy gang halted; every wait ends; the run comes to its end or says why not; each second is in one category of the ledger.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import pytest

from orchestrator.driver.halt import AGENT_TIMEOUT_S
from orchestrator.driver.stop_requests import STOP_TIMEOUT_S
from tests import fuzz
from tests.unit.driving import Launched, end_of
from tests.unit.fake_gang import Process, World

HORIZON_S = 3600.0
"""A run of seconds that takes longer has a wait that does not end."""
CLOCK_STEP_S = 3600.0
STOPPED_WITHIN_S = STOP_TIMEOUT_S + 3 * AGENT_TIMEOUT_S
"""The state is saved first; then each host is asked for its end, and for its last events."""
HARMLESS = ("driver", "stall", "storage_hangs", "storage_fails", "write_fails", "clock", "driver_clock", "blip")
"""What the gang itself does not notice."""


@dataclass(frozen=True)
class Fault:
    kind: str
    at_s: float
    """Of a fault of the driver: the number of the effect before which it strikes."""
    host: int
    seconds: float


KINDS = (
    *("process", "agent", "freeze", "blip", "cut_off", "driver", "stall", "pause"),
    *("storage_hangs", "storage_fails", "write_fails", "clock", "driver_clock"),
)
PAUSE_S = 300.0
"""Longer than the lease of the agents: they have left."""


def some_faults(rng: random.Random) -> list[Fault]:
    return [
        Fault(rng.choice(KINDS), rng.uniform(1.3, 12.0), rng.randrange(2), rng.choice([0.5, 3.0, 12.0, 25.0, 90.0]))
        for _ in range(rng.randrange(1, 6))
    ]


def victim(world: World, host: int) -> Process | None:
    """The process of a host in the newest generation, while it trains."""
    job = max(world.jobs.values(), key=lambda job: job.generation, default=None)
    process = job.processes.get(host) if job is not None else None
    return process if process is not None and process.alive and not process.done else None


def plan(world: World, fault: Fault) -> None:
    if fault.kind == "driver":
        world.die_at.add(int(fault.at_s * 25))
    elif fault.kind == "stall":
        world.stall_at[int(fault.at_s * 25)] = fault.seconds
    elif fault.kind == "pause":
        world.stall_at[int(fault.at_s * 25)] = PAUSE_S
    elif fault.kind == "write_fails":
        first = int(fault.at_s * 5)
        world.fail_writes |= {*range(first, first + int(fault.seconds) + 1)}
    else:
        world.at(fault.at_s, lambda: strike(world, fault))


def strike(world: World, fault: Fault) -> None:
    process = victim(world, fault.host)
    if fault.kind == "storage_hangs":
        world.storage_free_s = world.now_s + fault.seconds
    elif fault.kind == "storage_fails":
        world.storage_fails = True
        world.storage_free_s = world.now_s  # it was away once
        world.at(fault.seconds, lambda: setattr(world, "storage_fails", False))
    elif fault.kind == "driver_clock":
        # The present driver does not see it, the next one does.
        world.driver_ahead_s += CLOCK_STEP_S * (1 if fault.host else -1)
    elif process is None:
        return
    elif fault.kind == "clock":
        process.agent.ahead_s += CLOCK_STEP_S * (1 if fault.seconds > 10 else -1)
    elif fault.kind == "process":
        process.agent.end_process(told=True)
    elif fault.kind == "agent":
        process.agent.die()
    elif fault.kind == "freeze":
        process.frozen = True
    else:
        seconds = min(fault.seconds, 12.0) if fault.kind == "blip" else 60.0
        process.agent.out_of_reach_s = (world.now_s, world.now_s + seconds)
        process.agent.unavailable = fault.seconds in (3.0, 25.0)


def check(world: World, launched: Launched, end: tuple[str, object]) -> None:
    how, about = end
    assert world.violations == []
    assert how == "finished", about
    assert about["steps"] == world.max_steps
    assert [step for _, step in world.commits] == sorted({step for _, step in world.commits})
    assert world.commits[-1][1] == world.max_steps
    assert world.now_s < HORIZON_S
    totals = launched.launch.progress.goodput.totals(launched.clock())
    assert sum(totals.values()) == pytest.approx(launched.launch.progress.goodput.wall_s(launched.clock()))
    assert all(seconds >= 0 for seconds in totals.values())
    assert not any(agent.alive for agent in world.agents)


@pytest.mark.slow("many runs; `make fuzz KIND=driver` has more")
def test_many_runs_end_as_if_nothing_had_happened():
    for number in range(fuzz.count(40)):
        check_one(fuzz.seed(1) * 1000 + number)


@pytest.mark.parametrize("seed", range(15))
def test_whatever_happens_the_run_ends_as_if_nothing_had(seed):
    check_one(seed)


def check_one(seed):
    rng, world = random.Random(seed), World(max_steps=100)
    planned, launched = some_faults(rng), Launched(world, spares=rng.randrange(2))
    for fault in planned:
        plan(world, fault)
    check(world, launched, end_of(launched))
    if not any(agent.lost for agent in world.agents):  # one that is given up takes along what it has not told
        assert set(world.files["published"]) == {5 * n for n in range(1, world.max_steps // 5 + 1)}
    if all(fault.kind in HARMLESS for fault in planned):
        assert len(world.jobs) == 1 or any(fault.kind in ("driver", "stall") for fault in planned)


@pytest.mark.slow("a run for each write of a run")
def test_each_write_may_fail_once():
    """Of a run with a killed process and a killed driver: as many runs as it writes documents."""

    def run(*fail_writes: int) -> World:
        world = World(max_steps=40)
        launched = Launched(world, spares=1)
        world.fail_writes |= {*fail_writes}
        plan(world, Fault("process", 2.0, 1, 0.5))
        plan(world, Fault("driver", 4.0, 0, 0.5))
        check(world, launched, end_of(launched))
        return world

    for number in range(1, run().num_writes + 1):
        run(number)


@pytest.mark.slow("many runs; `make fuzz KIND=stops` has more")
def test_a_stop_in_each_of_many_waits_ends_it():
    for number in range(fuzz.count(8)):
        check_stopped(fuzz.seed(1) * 1000 + number)


@pytest.mark.parametrize("seed", [*range(4), 33, 52])
def test_a_stop_ends_whatever_the_driver_waits_for(seed):
    check_stopped(seed)


WORLDS = (("can_start_agents", False, 0.5), ("deaf", True, 0.3), ("storage_fails", True, 0.2), ("dying_s", 2000.0, 0.3))


def check_stopped(seed):
    """A stop at any moment of a run with random faults, of which some are never overcome."""
    rng, world = random.Random(seed), World(max_steps=400)
    planned = [fault for fault in some_faults(rng) if fault.kind not in ("stall", "pause", "storage_hangs")]
    launched = Launched(world, spares=rng.randrange(2), restart={"backoff_initial_s": 60.0})
    for fault in planned:
        plan(world, fault)
    for name, value, share in WORLDS:
        if rng.random() < share:
            world.at(rng.uniform(0.0, 12.0), partial(setattr, world, name, value))
    stop_s = rng.uniform(0.1, 40.0)
    world.at(stop_s, lambda: launched.board.request_stop("interrupted"))
    how, about = end_of(launched, stored=False)
    assert world.violations == []
    if world.now_s > stop_s:
        assert "stopped on request" in about if how == "failed" else about["stop_reason"] in ("interrupted", "max_steps")
    assert world.now_s - stop_s < STOPPED_WITHIN_S
    assert not any(agent.alive and agent.reachable for agent in world.agents)
