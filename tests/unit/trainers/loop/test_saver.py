"""What is asked of the checkpoint manager, and what a checkpoint has beside the state."""

from __future__ import annotations

import collections
from types import SimpleNamespace

import pytest

from gangway.errors import CheckpointError, SaveFailedError, kind_of
from tests.unit.training import arguments, of, trainer
from trainers.callbacks import CallbackList, RunInfo
from trainers.checkpoint import trial
from trainers.loop.evaluator import Evaluator
from trainers.loop.lineage import Lineage
from trainers.loop.saver import LAST_SAVE_PAUSES_S, Saver, TimeUsed


class Manager:
    """Writes down what it is asked for."""

    problem = unsavable = ""

    def __init__(self):
        self.asked, self.last_saved_step = [], 3

    def __getattr__(self, name):
        return lambda *given, **named: self.asked.append((name, given, named))


@pytest.fixture
def saver(tmp_path, events):
    info = RunInfo()
    info.global_step = 5
    data_state = SimpleNamespace(
        meta=lambda step: {"data_state": step}, restore=lambda meta: events.append({"ev": "data", **meta})
    )
    score = SimpleNamespace(meta=lambda: {"best": 1.0}, go_back=lambda scores: None, scores=SimpleNamespace(best=None))
    evaluator = Evaluator(None, (), None, score)
    reporter = SimpleNamespace(latest={"loss": 2.0})
    return Saver(
        Manager(),
        arguments(tmp_path, seed=9),
        info,
        Lineage(),
        reporter,
        evaluator,
        CallbackList(),
        collections.deque(),
        TimeUsed(7.0),
        data_state,
    )


@pytest.fixture
def slept(monkeypatch):
    """How long it has waited, in seconds."""
    found = []
    monkeypatch.setattr("time.sleep", found.append)
    return found


@pytest.mark.parametrize("patient", [True, False])
def test_a_save_waits_for_the_one_before_and_hands_on_state_meta_and_patience(saver, events, patient):
    saver.save("state", patient=patient)
    (waited, _, _), (name, (step, state, meta), named) = saver.manager.asked
    assert (waited, name, step, state, named) == ("wait_for_save", "save", 5, "state", {"patient": patient})
    assert (meta["batch_index"], meta["seed"], meta["metrics"], meta["data_state"]) == (5, 9, {"loss": 2.0}, 5)
    assert meta["arguments"]["seed"] == 9
    assert [event["step"] for event in of(events, "saving")] == [5]


def test_what_is_saved_already_is_not_saved_again_nor_reported(saver, events):
    saver.manager.last_saved_step = 5
    saver.save("state")
    assert [name for name, _, _ in saver.manager.asked] == ["wait_for_save"]
    assert not of(events, "saving")


@pytest.mark.parametrize("patient", [True, False])
def test_a_save_of_the_model_alone_has_the_same_meta_and_patience(saver, patient):
    saver.save_model("state", patient=patient)
    [(name, (step, state, meta), named)] = saver.manager.asked
    assert (name, step, state, named) == ("save_model", 5, "state", {"patient": patient})
    assert (meta["batch_index"], meta["seed"]) == (5, 9)


def test_a_checkpoint_that_became_complete_is_reported_to_the_callbacks_once(saver):
    told = []
    saver.callbacks = SimpleNamespace(report_saved=lambda info, complete: told.append((info, complete)))
    saver.report_saved()
    assert told == [(saver.info, saver.complete)]


def test_at_the_end_the_last_step_must_have_been_saved(saver, slept):
    assert saver.finish() == 3
    with pytest.raises(SaveFailedError, match="the checkpoint of its last step, 5, could not be saved"):
        saver.finish("state")
    saver.manager.last_saved_step = 5
    assert saver.finish("state") == 5
    again = ["wait", "wait_for_save", "save"]
    assert [name for name, _, _ in saver.manager.asked] == ["wait", *again, *again, "wait", "wait"]
    assert slept == list(LAST_SAVE_PAUSES_S)


def test_a_last_save_that_failed_is_tried_again_while_the_state_is_at_hand(saver, slept, monkeypatch):
    monkeypatch.setattr(
        Manager, "save", lambda self, step, *given, **named: setattr(self, "last_saved_step", step), raising=False
    )
    assert saver.finish("state") == 5
    assert slept == [1.0]


def test_what_was_recorded_comes_back_and_at_the_beginning_there_is_nothing(saver, events):
    saver.restore({"metrics": {"loss": 1.0}, "evaluation": {"step": 4, "metrics": {"eval_loss": 3.0}}})
    assert (saver.reporter.latest, saver.evaluator.evaluated_step) == ({"loss": 1.0}, 4)
    assert "metrics" in of(events, "data")[0]
    saver.restore({})
    assert (saver.reporter.latest, saver.evaluator.evaluated_step) == ({}, None)


def test_a_save_that_can_never_work_ends_the_run_at_once_and_for_good(saver):
    saver.manager.unsavable = ".params['x'] is of no type that can be written"
    with pytest.raises(CheckpointError, match=r"on any storage: \.params\['x'\] is of no type") as caught:
        saver.report_saved()
    assert kind_of(caught.value)["deterministic"]


def test_why_the_last_save_failed_is_said_at_the_end(saver, slept):
    saver.manager.problem = "no room in /data"
    with pytest.raises(SaveFailedError, match=r"its last step, 5, could not be saved: no room in /data"):
        saver.finish("state")


def test_whether_a_state_can_be_saved_is_known_before_the_second_step_of_a_new_run(tmp_path, events, monkeypatch):
    trainer(tmp_path / "before", max_num_steps=4).train()
    before = of(events, "metrics")
    monkeypatch.setattr(trial, "problem", lambda abstract: ".params['embed']: nobody can write this")
    with pytest.raises(CheckpointError, match=r"\.params\['embed'\]: nobody can write this"):
        trainer(tmp_path).train()
    assert [event["step"] for event in of(events, "first_step")] == [1, 1]
    assert of(events, "metrics") == before
    # One that goes on has been saved before: nothing is tried again in a recovery.
    trainer(tmp_path / "before", max_num_steps=5).train()
    assert of(events, "first_step")[-1]["step"] == 5
