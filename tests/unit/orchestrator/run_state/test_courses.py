"""Points that were published, when training goes back and takes another course: the newest ones of a step count."""

from __future__ import annotations

import json

import pytest

from gangway.storage.opening import place_of
from gangway.wire.events import course_left_at
from orchestrator.commands import checkpoints
from orchestrator.faultlab.verify.command import read_losses
from orchestrator.run_state import launch as launches
from orchestrator.tracking import mlflow_shipper
from orchestrator.tracking.config import TrackingConfig
from orchestrator.tracking.mlflow_shipper import Shipper, read_lines


@pytest.fixture
def opened(tmp_path):
    made = []

    def opened(launch_id, **params):
        for launch in made[-1:]:
            launch.close("KILLED", 30.0)
        arguments = {"optimizer.learning_rate": 0.1, "hosts.count": 2, "name": "x", **params}
        made.append(
            launches.open_launch(str(tmp_path), launch_id, 1000.0, TrackingConfig(mlflow=False), arguments, lambda: 1000.0)
        )
        return made[-1]

    yield opened
    made[-1].close("KILLED", 30.0)


def published(launch, *steps, kind="train", loss=1.0):
    new = [step for step in steps if launch.progress.is_new(step, kind)]
    for step in new:
        launch.publish(step, {"loss": loss})
    return new


def test_other_settings_leave_the_points_after_the_checkpoint(opened, tmp_path):
    assert published(opened("first"), 900, 950, 990) == [900, 950, 990]
    second = opened("second", **{"optimizer.learning_rate": 0.01})
    assert second.resumed(900)
    assert not second.resumed(900)
    assert published(second, 900, 950, loss=2.0) == [950]
    assert second._writer.flush(30)
    assert read_losses(tmp_path / "tracking" / "metrics.jsonl") == {900: 1.0, 950: 2.0}


@pytest.mark.parametrize("params", [{}, {"hosts.count": 3}, {"name": "moved"}])
def test_the_same_training_gives_the_same_points(opened, params):
    published(opened("first"), 900, 950)
    second = opened("second", **params)
    assert not second.resumed(900)
    assert published(second, 950, 960) == [960]


def test_a_launch_that_ends_before_it_trains_leaves_it_to_the_next(opened):
    published(opened("first"), 900, 950)
    opened("second", seed=2)
    third = opened("third", seed=2)
    assert third.resumed(900)
    assert published(third, 950) == [950]


def test_after_a_loss_was_accepted_all_later_points_are_new(opened, tmp_path):
    published(opened("first"), 900, 950)
    published(opened("first"), 940, kind="eval")
    opened("first").close("KILLED", 30.0)
    checkpoints.accept_loss(place_of(tmp_path / "checkpoints"))
    second = opened("second")
    assert second.resumed(0)
    assert published(second, 10, 950) == [10, 950]
    assert published(second, 10, kind="eval") == [10]


@pytest.mark.parametrize(
    ("restored", "skipped", "step"), [(None, [7], None), (4, [7], 7), (4, [3, 7], 4), (0, [], None), (4, [5, 6, 7], 5)]
)
def test_a_rollback_leaves_the_points_of_steps_after_the_first_batch_left_out(restored, skipped, step):
    assert course_left_at({"restored_step": restored, "skipped_batches": skipped}) == step


class Run:
    def __init__(self):
        self.values, self.tags, self.found = [], {}, True

    def send_values(self, values):
        self.values += [(value.name, value.step, value.value) for value in values]

    def send_record(self, record):
        self.tags |= record.get("tags", {})


def test_mlflow_gets_the_points_of_the_new_course(tmp_path):
    records = [
        *({"t": step, "step": step, "metrics": {"loss": 1.0}} for step in (1, 2, 3)),
        {"t": 4, "go_back": 1},
        *({"t": 10 + step, "step": step, "metrics": {"loss": 2.0}} for step in (1, 2, 3)),
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    shipper, run = Shipper(str(tmp_path), None), Run()
    lines = read_lines(str(path), 0)
    while lines:
        batch = mlflow_shipper.next_batch(lines)
        shipper._send(batch, run)
        lines = lines[len(batch) :]
    assert run.values == [("loss", 1, 1.0), ("loss", 2, 1.0), ("loss", 3, 1.0), ("loss", 2, 2.0), ("loss", 3, 2.0)]
    assert run.tags == {mlflow_shipper.LEFT_TAG: "steps 2 to 3: the newest point of each counts"}
