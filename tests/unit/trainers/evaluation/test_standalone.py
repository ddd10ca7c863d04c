"""`evaluate` and `eval` outside of training: the same hooks, callbacks and numbers as in it."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from gangway.errors import UsageError
from tests.programs.tiny import numbers
from tests.unit.training import FIXED, arguments, of, trainer
from trainers.base import BaseTrainer
from trainers.callbacks import Callback
from trainers.loop.evaluator import means


class Halving(BaseTrainer):
    """Evaluates half of the parameters, of the newest state alone, and says at which step."""

    def on_evaluation_start(self, state):
        self.kept = state
        return dataclasses.replace(state, params=jax.tree.map(lambda leaf: leaf / 2, state.params))

    def on_evaluation_end(self, state, metrics):
        self.kept = dataclasses.replace(self.kept)
        return self.kept, {**metrics, "step": float(self.info.global_step)}


class Heard(Callback):
    def __init__(self):
        self.heard = []

    def on_evaluate_begin(self, state, *, unit, **kwargs):
        self.heard.append(("begin", state.global_step, unit))

    def on_evaluate(self, state, *, unit, metrics, **kwargs):
        self.heard.append(("end", state.global_step, unit, dict(metrics)))


def last_evaluation(events):
    return [event["metrics"] for event in of(events, "metrics") if event.get("kind") == "eval"][-1]


def test_the_same_state_gives_the_numbers_that_training_published(tmp_path, events):
    heard = Heard()
    made = trainer(tmp_path, heard, cls=Halving, max_num_steps=3, evaluation={"units": {"eval": {}, "again": {}}})
    state = made.train()
    expected, told = last_evaluation(events), list(heard.heard)
    for unit in ("eval", "again"):
        assert {f"{unit}_{name}": value for name, value in made.evaluate(state, unit=unit).items()}.items() <= expected.items()
    assert heard.heard == told * 2
    assert made.evaluate()["step"] == 3.0
    assert made.state is made.kept  # as `on_evaluation_end` left it


def test_a_state_of_another_step_is_reported_as_such(tmp_path, events):
    heard = Heard()
    made = trainer(tmp_path, heard, max_num_steps=2, optimizer=FIXED)
    earlier = made.train()
    later = trainer(tmp_path, max_num_steps=5, optimizer=FIXED).train()
    heard.heard.clear()
    made.evaluate(later)
    made.evaluate(earlier)
    assert [entry[1] for entry in heard.heard] == [5, 5, 2, 2]


def test_the_batches_of_eval_end_with_what_evaluate_returns(tmp_path, events):
    heard = Heard()
    made = trainer(tmp_path, heard, cls=Halving, max_num_steps=2)
    state = made.train()
    whole = made.evaluate(state)
    heard.heard.clear()
    batches = list(made.eval(model_state=state))
    assert len(batches) == 2
    (begin, end) = heard.heard
    assert begin == ("begin", 2, "eval")
    assert end[3] == pytest.approx(whole, rel=1e-6)
    heard.heard.clear()
    next(made.eval(state))
    assert [entry[0] for entry in heard.heard] == ["begin"]  # it was not read to its end


class Nested(BaseTrainer):
    """Measures another unit inside a hook, and adds to what is measured."""

    def on_evaluation_end(self, state, metrics):
        return state, {**metrics, "other": self.evaluate(state, unit="short")["loss"]}

    def evaluate(self, state=None, metric_calculator=None, *, unit=None):
        return {**super().evaluate(state, metric_calculator, unit=unit), "added": 1.0}


def test_an_evaluation_inside_another_one_calls_no_hooks(tmp_path, events):
    heard = Heard()
    units = {"eval": {}, "short": {"max_batches": 1}}
    made = trainer(tmp_path, heard, cls=Nested, max_num_steps=2, evaluation={"units": units})
    state = made.train()
    assert [entry[::2] for entry in heard.heard if entry[0] == "begin"] == [("begin", "eval"), ("begin", "short")]
    expected = last_evaluation(events)
    assert expected["eval_other"] == expected["short_loss"]
    assert made.evaluate(state)["other"] == expected["short_loss"]


def without_held_out_data(tmp_path, cls=BaseTrainer, **changes):
    made = arguments(tmp_path, max_num_steps=2, **changes)
    return cls(made, numbers(made)[0], None)


def test_without_held_out_data_an_evaluation_is_an_error_that_says_what_to_set(tmp_path, events):
    made = without_held_out_data(tmp_path)
    state = made.train()
    assert of(events, "note") == []
    for measure in (made.evaluate, made.eval):
        with pytest.raises(UsageError, match=r"no held-out data to evaluate on; set data\.eval_fraction, or give dataset_eval"):
            measure(state)


class FromElsewhere(BaseTrainer):
    def evaluate(self, state):
        return {"loss": 1.0}


@pytest.mark.parametrize(("cls", "num_notes"), [(BaseTrainer, 1), (FromElsewhere, 0)])
def test_evaluations_that_have_no_data_are_reported_once(tmp_path, events, cls, num_notes):
    without_held_out_data(tmp_path, cls, evaluation={"every_steps": 1}).train()
    told = [event["message"] for event in of(events, "note")]
    assert told == ["evaluation.every_steps: there is no held-out data to evaluate on; set data.eval_fraction"] * num_notes


class ByHand(BaseTrainer):
    """Measures by itself, and notes which hooks were called."""

    def post_init(self):
        self.called = []

    def on_evaluation_start(self, state):
        self.called.append("start")
        return state

    def on_evaluation_end(self, state, metrics):
        self.called.append(sorted(metrics))
        return state, {**metrics, "hooked": 1.0}


class OwnEvaluate(ByHand):
    def evaluate(self, state):
        return {"loss": float(state.step)}


class OwnEval(ByHand):
    def eval(self, model_state):
        yield {"loss": 1.0, "steps": float(model_state.step)}
        yield {"loss": 2.0}


class PassesOn(ByHand):
    def eval(self, model_state, **kwargs):
        for metrics in super().eval(model_state, **kwargs):
            yield {"loss": metrics["loss"], "batches": 1.0}


@pytest.mark.parametrize(
    ("cls", "expected"),
    [(OwnEvaluate, {"loss": 2.0}), (OwnEval, {"loss": 1.5, "steps": 2.0}), (PassesOn, {"batches": 1.0})],
)
def test_a_measure_of_ones_own_is_used_and_its_hooks_called_in_training_and_by_hand(tmp_path, events, cls, expected):
    heard = Heard()
    made = trainer(tmp_path, heard, cls=cls, max_num_steps=2)
    state = made.train()
    calls = [entry[0] for entry in heard.heard]
    assert {name: made.output.metrics[f"eval_{name}"] for name in expected} == pytest.approx(expected)
    assert made.output.metrics["eval_hooked"] == 1.0
    in_training, made.called, heard.heard = made.called, [], []
    by_hand = made.evaluate(state)
    assert {name: by_hand[name] for name in (*expected, "hooked")} == pytest.approx({**expected, "hooked": 1.0})
    assert made.called == in_training == ["start", sorted(by_hand.keys() - {"hooked"})]
    assert [entry[0] for entry in heard.heard] == calls


@pytest.mark.parametrize(("found", "problem"), [([{"loss": "low"}], "no number"), ([3.0], "eval yields float")])
def test_what_are_no_metrics_is_an_error(found, problem):
    with pytest.raises(UsageError, match=problem):
        means(found)
