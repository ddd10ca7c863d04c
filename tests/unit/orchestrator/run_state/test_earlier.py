"""Several launches of one run: the numbers of the run are those of all, and those of the newest are told apart."""

from __future__ import annotations

import pytest

from orchestrator.run_state import launch as launches
from orchestrator.run_state import summary
from orchestrator.run_state.incidents import Action, Incident
from orchestrator.tracking.config import TrackingConfig


def launched(tmp_path, launch_id, began_s, *, lasted_s=90.0, incidents=1, drivers=1):
    """Trains for all but ten seconds; returns its summary."""
    for _ in range(drivers):
        clock = lambda: began_s + lasted_s  # noqa: E731
        tracking = TrackingConfig(mlflow=False)
        launch = launches.open_launch(str(tmp_path), launch_id, began_s, tracking, {}, clock, monotonic=clock)
        launch.progress.requests["put"] = launch.progress.requests.get("put", 0) + 2
        launch.progress.failed_requests += 1
        if launch.progress.drivers == 1:
            launch.next_generation()
            launch.progress.goodput.switch("step", began_s + 10.0)
            for number in range(incidents):
                incident = Incident(kind="hang", host=0, generation=0, step=number, failed_at_s=began_s + number)
                incident.action = Action.REPORT
                launch.record(incident)
        document = summary.build(launch, "stopped", {}, None, began_s + lasted_s, {})
        launch.close("KILLED", 30.0)
    return document


def test_a_resumed_launch_knows_what_the_earlier_ones_used_and_met(tmp_path):
    launched(tmp_path, "first", 1000.0, incidents=2)
    launched(tmp_path, "second", 5000.0, drivers=2)
    found = launched(tmp_path, "third", 9000.0, lasted_s=30.0, incidents=0)
    assert (found["launches"], found["generations"], found["drivers"], found["num_incidents"]) == (3, 3, 4, 3)
    assert (found["requests"], found["failed_requests"]) == ({"put": 8}, 4)
    assert [(i["launch_id"], i["step"]) for i in found["incidents"]] == [("first", 0), ("first", 1), ("second", 0)]
    assert (found["goodput"]["step"], found["wall_s"]) == (80.0 + 80.0 + 20.0, 210.0)
    assert sum(found["goodput"].values()) == pytest.approx(found["wall_s"])
    assert found["started_at"] == "1970-01-01T00:16:40+00:00"
    of_launch = found["launch"]
    assert (of_launch["num_incidents"], of_launch["generations"], of_launch["drivers"]) == (0, 1, 1)
    assert (of_launch["wall_s"], of_launch["goodput"]["step"]) == (30.0, 20.0)


def test_the_share_that_is_shown_while_it_trains_is_that_of_the_run(tmp_path):
    launched(tmp_path, "first", 1000.0)
    launch = launches.open_launch(str(tmp_path), "second", 2000.0, TrackingConfig(mlflow=False), {}, lambda: 2010.0)
    assert launch.progress.goodput_of_run(2010.0) == pytest.approx(80.0 / 100.0)
    launch.close("KILLED", 30.0)
