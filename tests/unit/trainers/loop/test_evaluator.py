"""An evaluation in training: what it measures, tells and leaves behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.unit.training import of
from trainers.callbacks import RunInfo
from trainers.evaluation.score import ScoreKeeper
from trainers.loop.evaluator import Evaluator


def made(measured, units=("eval", "far")):
    """Its hooks count the evaluations in the state. `measured`: the metrics of each unit."""
    info = RunInfo()
    info.global_step = 6

    def evaluate(state, name, measure):
        return state + 1, measure(state)

    def measure(state, unit="eval"):
        return measured.get(unit, {})

    observed = SimpleNamespace(info=info, evaluate=evaluate)
    return Evaluator(measure, units, observed, ScoreKeeper(None, None), lambda name: {"seconds": 2.0})


@pytest.mark.parametrize("units", [("eval", "far"), ()])
def test_an_evaluation_that_measures_nothing_leaves_a_state_and_no_metrics(events, units):
    evaluator = made({}, units)
    assert evaluator.evaluate(0) == max(len(units), 1)
    assert (evaluator.last, evaluator.evaluated_step, evaluator.final_metrics()) == (None, 6, {})
    assert events == []


def test_units_are_measured_in_their_order_and_reported_with_their_names_and_rates(events):
    evaluator = made({"eval": {"loss": 1.0}, "far": {"loss": 3.0}})
    assert evaluator.evaluate(0) == 2
    (event,) = of(events, "metrics")
    assert (event["step"], event["kind"]) == (6, "eval")
    assert event["metrics"] == {"eval_loss": 1.0, "far_loss": 3.0, "eval_seconds": 2.0, "far_seconds": 2.0}
    # Neither a score nor a checkpoint depends on a clock.
    assert evaluator.final_metrics() == {"eval_loss": 1.0, "far_loss": 3.0}
    again = made({})
    again.restore(evaluator.meta())
    assert (again.evaluated_step, again.final_metrics()) == (6, evaluator.final_metrics())
    again.restore({})
    assert (again.evaluated_step, again.last) == (None, None)
