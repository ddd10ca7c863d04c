"""Callbacks: what each event has, by keyword; none changes a result, in whatever order; an error in one is an error."""

from __future__ import annotations

import numpy as np
import pytest

from tests.saved import saved
from tests.unit.training import FIXED, assert_equal, trainer
from trainers.callbacks import Callback

pytestmark = pytest.mark.usefixtures("events")

EVENTS = [name for name in vars(Callback) if name.startswith("on_")]


class Everything(Callback):
    """Notes every event with what it had."""

    def __init__(self):
        self.heard = []

    def of(self, event):
        return [(step, had) for name, step, had in self.heard if name == event]


def _listen(event):
    def method(self, state, **had):
        self.heard.append((event, state.global_step, had))

    return method


for _event in EVENTS:
    setattr(Everything, _event, _listen(_event))


@pytest.mark.slow("trains more than once")
def test_every_event_comes_when_it_should_and_has_what_it_says(tmp_path):
    heard = Everything()
    made = trainer(tmp_path, heard, global_batch_size=20, max_num_steps=6, evaluation={"every_steps": 4, "max_batches": 1})
    made.train()
    assert heard.heard[0][:2] == ("on_train_begin", 0)
    assert heard.heard[-1][:2] == ("on_train_end", 6)
    assert [step for step, _ in heard.of("on_step_begin")] == list(range(6))
    assert [step for step, _ in heard.of("on_step_end")] == list(range(1, 7))
    assert [(step, had["epoch"]) for step, had in heard.of("on_epoch_begin")] == [(0, 0), (5, 1)]
    assert [(step, had["epoch"]) for step, had in heard.of("on_epoch_end")] == [(5, 0)]
    assert [step for step, _ in heard.of("on_evaluate_begin")] == [step for step, _ in heard.of("on_evaluate")] == [4, 6]
    assert [had["step"] for _, had in heard.of("on_publish")] == list(range(1, 7))
    assert heard.of("on_save")[0][1] == {"step": 4, "path": str(saved(tmp_path / "run", 4))}
    for _, had in heard.of("on_step_end"):
        assert {"batch", "loss", "loss_dict", "grad_norm"} <= had.keys()
    published = {had["step"]: had["metrics"] for _, had in heard.of("on_publish")}
    for step, had in heard.of("on_step_end"):
        assert float(had["loss"]) == pytest.approx(published[step]["loss"])
        assert float(had["loss_dict"]["accuracy"]) == pytest.approx(published[step]["accuracy"])
        assert float(had["grad_norm"]) == pytest.approx(published[step]["grad_norm"])
        weight = np.asarray(had["batch"]["weight"]) > 0
        ids = np.asarray(had["batch"]["sample_id"])[weight]
        assert sorted(ids.tolist()) == sorted((20 * (step - 1) + row) % 96 for row in range(20))
    assert heard.of("on_evaluate")[-1][1]["metrics"]["loss"] == made.output.metrics["eval_loss"]


class Meddler(Callback):
    """Does what it can with what it is given: changes the dicts, reads the numbers, draws random ones."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def on_step_end(self, state, *, batch, loss, loss_dict, grad_norm, **kwargs):
        self.log.append((self.name, state.global_step))
        batch["weight"] = loss_dict["loss"] = None
        np.random.seed(0)

    def on_publish(self, state, *, metrics, **kwargs):
        metrics["loss"] = -1.0


@pytest.mark.slow("compiles a step and trains")
@pytest.mark.parametrize("order", ["", "ab", "ba"])
def test_the_order_of_callbacks_never_changes_results(tmp_path, order):
    """Nor whether there are any."""
    log = []
    state = trainer(tmp_path, *(Meddler(name, log) for name in order), optimizer=FIXED).train()
    assert_equal(state, trainer(tmp_path / "alone", optimizer=FIXED).train())
    assert "".join(name for name, _ in log[: len(order)]) == order


def test_what_a_callback_does_to_its_metrics_is_seen_by_nobody_else(tmp_path):
    heard = Everything()
    made = trainer(tmp_path, Meddler("first", []), heard, max_num_steps=4)
    made.train()
    assert all(had["metrics"]["loss"] > 0 for _, had in heard.of("on_publish"))
    assert all(had["loss_dict"]["loss"] is not None for _, had in heard.of("on_step_end"))
    assert made.output.metrics["train_loss"] > 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("event", [event for event in EVENTS if event != "on_exception"])
def test_an_error_in_a_callback_never_ends_training_as_a_success(tmp_path, event):
    def method(self, state, **had):
        raise KeyboardInterrupt

    heard = Everything()
    bad = type("Bad", (Callback,), {event: method})()
    made = trainer(tmp_path, heard, bad, global_batch_size=20, max_num_steps=7, evaluation={"max_batches": 1})
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert made.output is None or event == "on_train_end"
    assert [type(had["error"]) for _, had in heard.of("on_exception")] == [KeyboardInterrupt]


def test_callbacks_may_be_added_later_and_must_be_callbacks(tmp_path):
    made, heard = trainer(tmp_path, max_num_steps=1), Everything()
    made.add_callback(heard)
    made.train()
    assert len(heard.of("on_step_end")) == 1
    with pytest.raises(TypeError, match=r"expected an instance of a subclass of trainers\.callbacks\.Callback"):
        made.add_callback(Everything)


def test_a_callback_may_be_given_its_trainer(tmp_path, events):
    class Named(Callback):
        def on_train_end(self, state, **kwargs):
            names.append(self.trainer.arguments.name)

    class WithItsOwn(Callback):
        def __init__(self, limit):
            self.limit = limit

    names = []
    made = trainer(tmp_path, WithItsOwn(3), max_num_steps=1, checkpoint={"save_at_end": False})
    made.add_callback(Named(made))
    made.train()
    assert names == ["run"]
