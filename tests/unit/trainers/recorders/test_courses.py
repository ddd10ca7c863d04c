"""Recorders when training goes back to take another course: what they keep is that of the course that counts."""

from __future__ import annotations

import json

import pytest

from tests.unit.trainers.recorders.test_recorders import about
from trainers.recorders.dispatch import Recorders
from trainers.recorders.jsonl import LEFT, JsonLines, read
from trainers.recorders.tensorboard import TensorBoard


def losses(path):
    return [(line["step"], line["metrics"]["loss"]) for line in read(path) if "loss" in line["metrics"]]


def test_the_lines_of_the_course_that_was_left_are_moved(tmp_path):
    recorder = JsonLines(about(tmp_path))
    for step in (1, 2, 3):
        recorder.record(step, {"loss": 1.0}, {})
    recorder.go_back(5)
    recorder.go_back(1)
    for step in (1, 2):
        recorder.record(step, {"loss": 2.0}, {})
    recorder.close()
    assert losses(tmp_path / "metrics.jsonl") == [(1, 1.0), (2, 2.0)]
    assert losses(tmp_path / LEFT) == [(2, 1.0), (3, 1.0)]
    again = JsonLines(about(tmp_path))
    again.record(2, {"loss": 3.0}, {})
    again.close()
    assert losses(tmp_path / "metrics.jsonl") == [(1, 1.0), (2, 2.0)]


def test_tensorboard_voids_what_was_left(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(TensorBoard, "_open", lambda self, first_step: opened.append(first_step) or Writer())
    recorder = TensorBoard(about(tmp_path))
    recorder.record(900, {"loss": 1.0}, {})
    recorder.go_back(900)
    recorder.record(950, {"loss": 1.0}, {})
    assert opened == [900, 901]


class Writer:
    add_scalar = close = lambda self, *args: None


def test_going_back_keeps_its_place_among_the_publishes_and_is_never_dropped(tmp_path):
    notes = []
    recorders = Recorders(["jsonl", f"{__name__}:Plain"], about(tmp_path), notes.append, kept_publishes=2)
    for step in (1, 2):
        recorders.record(step, {"loss": 1.0})
    recorders.go_back(1)
    recorders.record(2, {"loss": 2.0})
    recorders.close()
    assert losses(tmp_path / "metrics.jsonl")[-1] == (2, 2.0)
    assert not any("failed" in note for note in notes)


class Plain:
    """Knows nothing of going back."""

    def __init__(self, about): ...

    def record(self, step, metrics, distributions): ...

    def close(self): ...


@pytest.mark.slow("trains twice")
def test_a_run_that_goes_on_with_another_learning_rate_keeps_the_losses_that_count(tmp_path, monkeypatch):
    from trainers.commands import run

    def trained(learning_rate):
        config = tmp_path / "own.yaml"
        settings = {
            "storage": str(tmp_path),
            "task": "tests.programs.tiny:TableTask",
            "data": {"sequence_length": 8, "dataset": "tests.programs.tiny:numbers"},
            "max_num_steps": 6,
            "publish_every_steps": 1,
            "checkpoint": {"save_steps": 4, "save_at_end": False},
            "optimizer": {"learning_rate": learning_rate},
            "recorders": ["jsonl"],
        }
        config.write_text(json.dumps(settings))
        monkeypatch.setattr("sys.argv", ["run", str(config)])
        assert run.main() == 0
        return dict(losses(tmp_path / "own" / "metrics.jsonl"))

    first, second = trained(0.01), trained(1.0)
    assert list(second) == [1, 2, 3, 4, 5, 6]
    assert [first[step] == second[step] for step in second] == [True] * 5 + [False]  # the loss before the first new update
    assert [step for step, _ in losses(tmp_path / "own" / LEFT)] == [5, 6]
