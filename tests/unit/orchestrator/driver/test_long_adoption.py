"""A driver that takes over a gang whose agents have dropped most of their events: it knows all the same how far the gang is."""

from __future__ import annotations

import pytest

from cluster.agent import state
from tests.unit.driving import Launched
from tests.unit.fake_gang import World


@pytest.fixture
def world(monkeypatch):
    """Its agents keep a handful of events, as after days of evaluations."""
    monkeypatch.setattr(state, "MAX_EVENTS", 8)
    world = World()
    world.max_steps = 300

    def chatter():
        for job in world.jobs.values():
            for process in job.processes.values():
                if process.agent.alive and process.alive:
                    for phase in ("evaluate", "train"):
                        process.agent.tell({"ev": "phase", "phase": phase})
        if world.now_s < 60:
            world.at(0.05, chatter)

    world.at(1.0, chatter)
    yield world
    assert world.violations == []


def test_a_stop_request_after_it_saves_the_work(world):
    launched = Launched(world)
    world.die_at = {60}
    world.at(9.0, lambda: launched.board.request_stop("interrupted"))
    result = launched.run()
    assert (launched.kinds(), launched.num_drivers) == (["driver_lost"], 2)
    assert result["stop_reason"] == "interrupted"
    assert world.commits[-1][1] == result["steps"] > 0
    lost = [event["message"] for event in launched.told() if event["ev"] == "note" and "are lost" in event["message"]]
    assert lost
