"""The time limit of a run, in the world without Ray, processes or time: it counts over restarts, drivers and launches."""

from __future__ import annotations

import pytest

from orchestrator.driver.ending import TrainingFailed
from tests.unit.driving import Launched
from tests.unit.fake_gang import START_AGENT_S, Job, World

LIMIT_S = 6.0


@pytest.fixture
def world():
    return World(max_steps=100_000)


def launched(world, **settings):
    return Launched(world, time_limit=f"{LIMIT_S:g}s", **settings)


def used_s(launched):
    return launched.launch.progress.time_used.seconds(launched.world.clock())


def test_the_hosts_are_asked_to_stop_and_save_at_the_limit(world):
    run = launched(world)
    result = run.run()
    assert result["stop_reason"] == "time_limit"
    assert world.commits[-1][1] == result["steps"]
    # The reservation does not count; then the stop and its save.
    assert LIMIT_S < used_s(run) < LIMIT_S + 1.0 < world.now_s
    assert world.violations == []


def test_a_restart_gives_no_time_back(world):
    run = launched(world)
    for at_s in (3.0, 5.0):
        world.at(START_AGENT_S + at_s, lambda: newest(world).processes[1].agent.end_process(told=True))
    assert run.run()["stop_reason"] == "time_limit"
    assert run.kinds() == ["process_crash", "process_crash"]
    assert LIMIT_S < used_s(run) < LIMIT_S + 2.0


def test_the_processes_are_reported_how_much_is_used(world):
    run = launched(world)
    world.at(START_AGENT_S + 3.0, lambda: newest(world).processes[1].agent.end_process(told=True))
    run.run()
    first, second = (job.processes[0].orders["time_used_s"] for job in world.jobs.values())
    assert first == 0.0
    assert 2.0 < second < 4.0
    assert {job.processes[0].orders["retry_for_s"] for job in world.jobs.values()} == {run.config.driver.restart.retry_for_s}


def test_another_driver_goes_on_counting(world):
    run = launched(world)
    # The effects of the first second are many; this one is in the middle of training.
    world.at(START_AGENT_S + 3.0, lambda: world.die_at.add(world.num_effects + 1))
    assert run.run()["stop_reason"] == "time_limit"
    assert run.num_drivers == 2
    assert LIMIT_S < used_s(run) < LIMIT_S + 2.0


def test_a_later_launch_has_what_is_left_and_then_nothing(world):
    first = Launched(world, time_limit="3s")
    first.run()
    began_s = world.now_s
    second = launched(world, launch_id="second")
    world.now_s += 1000.0  # between launches nothing counts
    assert second.run()["stop_reason"] == "time_limit"
    assert LIMIT_S < used_s(second) < LIMIT_S + 2.0
    assert world.now_s - 1000.0 - began_s < 5.0
    num_jobs = len(world.jobs)
    assert launched(world, launch_id="third").run() == {"stop_reason": "time_limit"}
    assert len(world.jobs) == num_jobs, "a gang was started without any time left"


def test_a_trainer_that_does_not_know_why_it_was_asked_still_ends_at_the_limit(world, monkeypatch):
    monkeypatch.setattr(Job, "stop", lambda job, reason: setattr(job, "stop_reason", "terminated"))
    assert launched(world).run()["stop_reason"] == "time_limit"


def test_hosts_that_do_not_stop_are_ended(world):
    world.deaf = True
    run = launched(world, watchdog={"evaluate_s": 2.0, "save_s": 3.0})
    assert run.run() == {"stop_reason": "time_limit"}
    assert LIMIT_S + 5.0 < used_s(run) < LIMIT_S + 7.0
    told = [event["message"] for event in run.told() if event["ev"] == "note"]
    assert "the hosts did not stop within 5 s of it" in told[-1]
    assert not any(agent.alive for agent in world.agents)


def test_without_a_checkpoint_that_is_a_failure():
    world = World(max_steps=100_000, save_steps=100_000)
    world.deaf = True
    with pytest.raises(TrainingFailed, match=r"the time limit \(6s\) has passed: .*; there is no checkpoint"):
        launched(world, watchdog={"evaluate_s": 2.0, "save_s": 3.0}).run()


def test_a_failure_after_the_limit_ends_the_run_as_the_limit_does(world):
    world.deaf = True
    run = launched(world)
    world.at(START_AGENT_S + LIMIT_S + 2.0, lambda: newest(world).processes[0].agent.end_process(told=True))
    assert run.run() == {"stop_reason": "time_limit"}
    (incident,) = run.launch.progress.incidents
    assert (incident.action, incident.detail) == ("give up", "the time limit has passed")


def test_a_wait_for_machines_ends_at_the_limit(world):
    run = launched(world)

    def take_all():
        world.can_start_agents = False
        for agent in world.agents:
            agent.die()

    world.at(START_AGENT_S + 3.0, take_all)
    assert run.run() == {"stop_reason": "time_limit"}
    assert LIMIT_S <= used_s(run) < LIMIT_S + 2.0


def newest(world):
    return max(world.jobs.values(), key=lambda job: job.generation)
