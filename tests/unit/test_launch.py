from __future__ import annotations

import json

import pytest

from orchestrator.launch import Launch
from orchestrator.ledger import Action
from orchestrator.tracking import TrackingConfig


class Clock:
    def __init__(self, now_s):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
def take_up(tmp_path, clock):
    """Another driver's view of the launch; all are closed in the end."""
    made = []

    def take_up(launch_id="launch"):
        made.append(Launch(str(tmp_path), launch_id, 1000.0, TrackingConfig(mlflow=False), {}, clock))
        return made[-1]

    yield take_up
    for launch in made:
        launch.close("FINISHED", 0.0)


def test_a_driver_that_adopts_the_gang_lost_nothing_but_the_time_without_a_watcher(take_up, clock):
    first = take_up()
    first.goodput.switch("step", 1010.0)
    clock.now_s = 1020.0
    first.formed({"generation": 0})
    clock.now_s = 1027.0
    second = take_up()
    assert second.drivers == 2
    assert second.gang == {"generation": 0}
    second.goodput.switch("step", 1026.0)  # what the agents told of the time since then was taken in
    incident = second.adopted(1027.0, step=70)
    assert (incident.action, incident.resumed_step, incident.failed_at_s) == (Action.ADOPT, 70, 1020.0)
    assert incident.recovery_s == {"detect": 7.0}
    assert second.open_incident() is None
    assert second.goodput.totals(1030.0)["step"] == 20.0


def test_the_next_driver_finds_an_agent_that_came_while_the_gang_trained(take_up, clock):
    first = take_up()
    first.formed({"generation": 0, "gang": {"seats": ["a"]}})
    clock.now_s = 1001.0
    first.reseated({"seats": ["a"]})
    assert take_up().goodput.counted_to_s == 1000.0  # nothing has changed: nothing was written
    first.reseated({"seats": ["b"]})
    assert take_up().gang == {"generation": 0, "gang": {"seats": ["b"]}}


def test_with_the_gang_lost_the_time_without_a_driver_was_detection(take_up, clock):
    first = take_up()
    first.goodput.switch("step", 1010.0)
    clock.now_s = 1020.0
    first.formed({"generation": 0})
    clock.now_s = 1027.0
    second = take_up()
    incident = second.gang_lost(1027.0, "an agent is gone")
    second.goodput.switch("schedule", 1027.0)
    assert second.open_incident() is incident
    assert incident.recovery_s == {"detect": 7.0}
    assert second.goodput.totals(1027.0)["detection"] == 7.0
    assert second.goodput.totals(1027.0)["step"] == 10.0


def test_another_launch_keeps_the_progress_and_starts_ledgers_of_its_own(take_up, clock):
    first = take_up()
    first.saved(40, "/checkpoints/40")
    first.close("KILLED", 0.0)
    second = take_up("another")
    assert (second.checkpoint_step, second.saved_path, second.drivers, second.gang) == (40, "/checkpoints/40", 1, None)
    assert second.incidents == []


def test_a_storage_that_cannot_be_written_is_told_and_does_not_raise(take_up, tmp_path, clock):
    launch = take_up()
    state = tmp_path / "launch.json"
    state.unlink(missing_ok=True)
    state.mkdir()
    launch.store()
    assert "launch.json could not be written" in launch.storage_problem
    state.rmdir()
    launch.store()
    assert launch.storage_problem is None


def test_previews_are_kept_in_the_folder_and_shown_to_the_tracker(take_up, tmp_path):
    about = {"step": 20, "previews": [{"prompt": "def ", "text": "f():"}]}
    take_up().preview(about)
    path = tmp_path / "previews" / "20.json"
    assert json.loads(path.read_text()) == about
    records = [json.loads(line) for line in (tmp_path / "tracking" / "metrics.jsonl").read_text().splitlines()]
    assert {"artifact": str(path), "folder": "previews"}.items() <= records[-1].items()
