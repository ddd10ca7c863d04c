"""The score of evaluations: which is the best, and when to stop. On one host; the agreement of several: tests/multihost."""

from __future__ import annotations

import json
import math

import pytest

from gangway.errors import UsageError
from gangway.stop_reason import StopReason
from gangway.user_modules import load_object
from tests.unit.training import trainer
from trainers.base import BaseTrainer
from trainers.checkpoint.retention import Retention
from trainers.config import CheckpointConfig, EvaluationConfig, ScoreConfig
from trainers.evaluation.score import ScoreKeeper, combined


def keeper(**config):
    made = ScoreConfig(**config)
    return ScoreKeeper(made, load_object(made.early_stopper) if made.early_stopper else None)


def feed(made, scores, first=1):
    """Adds a score at each step; returns at which of them training would stop."""
    stops = []
    for step, score in enumerate(scores, first):
        made.add(step, {"eval_loss": score})
        stops += [step] if made.wants_stop else []
    return stops


@pytest.mark.parametrize(
    ("config", "scores", "best"),
    [
        ({}, [3.0, 1.0, 2.0], (2, 1.0)),
        ({"lower_better": False}, [1.0, 3.0, 2.0], (2, 3.0)),
        ({}, [1.0, 1.0], (1, 1.0)),  # an equal one is no better
        ({"min_delta": 0.5}, [3.0, 2.6], (1, 3.0)),
        ({"min_delta": 0.5}, [3.0, 2.6, 2.4], (3, 2.4)),  # measured from the best, not from the last
        ({}, [math.nan, 2.0, math.nan], (2, 2.0)),
    ],
)
def test_the_best_is_known_with_its_step(config, scores, best):
    made = keeper(**config)
    feed(made, scores)
    assert (made.scores.best_step, made.scores.best) == best


@pytest.mark.parametrize(
    ("metrics", "lowest"),
    [
        (["eval_loss"], True),
        (["eval_accuracy"], False),
        (["valid_token_error"], True),
        (["long_top5_accuracy", "eval_f1"], False),
        (["eval_loss/code"], True),
    ],
)
def test_the_names_of_the_metrics_tell_whether_lower_is_better(metrics, lowest):
    assert ScoreConfig(metrics=tuple(metrics)).lowest_is_best is lowest
    assert ScoreConfig(metrics=tuple(metrics), lower_better=not lowest).lowest_is_best is not lowest


@pytest.mark.parametrize("metrics", [["eval_roughness"], ["eval_loss", "eval_accuracy"], ["eval_accuracy_error"]])
def test_a_direction_that_is_not_known_is_an_error(metrics):
    with pytest.raises(ValueError, match=r"lower_better = null: expected true or false.* do not tell: eval"):
        ScoreConfig(metrics=tuple(metrics))
    assert ScoreConfig(metrics=tuple(metrics), lower_better=True).lowest_is_best


def test_the_best_accuracy_is_the_highest_one():
    made = keeper(metrics=("eval_accuracy",), patience=2)
    stops = []
    for step, accuracy in enumerate([0.1, 0.5, 0.4, 0.3], 1):
        made.add(step, {"eval_accuracy": accuracy})
        stops += [step] if made.wants_stop else []
    assert (made.scores.best_step, stops) == (2, [4])
    assert Retention.of(CheckpointConfig(keep_best=1), made.config).lower_better is False


@pytest.mark.parametrize(("combine", "expected"), [("mean", 2.0), ("min", 1.0), ("max", 3.0)])
def test_several_units_scores_are_combined(combine, expected):
    config = ScoreConfig(metrics=("eval_loss", "long_loss"), combine=combine)
    assert combined({"eval_loss": 1.0, "long_loss": 3.0, "long_accuracy": 9.0}, config) == expected


@pytest.mark.parametrize("combine", ["mean", "min", "max"])
@pytest.mark.parametrize("losses", [(1.0, math.nan), (math.nan, 1.0)])
def test_a_metric_that_is_nan_makes_the_score_nan_wherever_it_stands(combine, losses):
    config = ScoreConfig(metrics=("eval_loss", "long_loss"), combine=combine)
    assert math.isnan(combined(dict(zip(config.metrics, losses, strict=True)), config))


def test_a_metric_that_is_not_there_is_an_error_that_names_those_that_are():
    with pytest.raises(UsageError, match=r"gave no evil_loss; expected names among eval_accuracy, eval_loss"):
        combined({"eval_loss": 1.0, "eval_accuracy": 0.5}, ScoreConfig(metrics=("evil_loss",)))


@pytest.mark.parametrize(
    ("patience", "scores", "stops"),
    [
        (1, [3.0, 2.0, 1.0], []),
        (1, [3.0, 2.0, 2.5], [3]),
        (2, [3.0, 4.0, 2.0, 2.1, 2.2], [5]),  # a better one starts the count anew
        (2, [math.nan, math.nan], [2]),
    ],
)
def test_patience_counts_evaluations_that_brought_nothing_better(patience, scores, stops):
    assert feed(keeper(patience=patience), scores) == stops


def stop_below_two(step, score):
    return score < 2


def broken(step, score):
    raise RuntimeError("mine")


def test_a_function_may_say_when_to_stop():
    made = keeper(early_stopper="tests.unit.trainers.evaluation.test_score:stop_below_two")
    assert feed(made, [3.0, 1.0]) == [2]


class FromTwoScores(BaseTrainer):
    """Its function knows the scores before."""

    def build_early_stopper(self):
        scores = []

        def enough(step, score):
            scores.append(score)
            return len(scores) == 2

        return enough


def test_a_trainer_may_build_the_function_itself(tmp_path, events):
    made = trainer(tmp_path, cls=FromTwoScores, evaluation={"every_steps": 2, "score": {}})
    made.train()
    assert (made.output.stop_reason, made.output.metrics["batches"]) == (StopReason.EARLY_STOPPED, 4)


def test_an_error_in_it_is_an_error():
    with pytest.raises(RuntimeError, match="mine"):
        feed(keeper(early_stopper="tests.unit.trainers.evaluation.test_score:broken"), [1.0])


def through_json(meta):
    return json.loads(json.dumps(meta))


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_restart_goes_on_counting_and_knows_the_best(cut):
    scores = [2.0, 3.0, 1.0, 4.0, 5.0]
    whole, cut_off, resumed = (keeper(patience=2) for _ in range(3))
    feed(whole, scores)
    feed(cut_off, scores[:cut])
    resumed.go_back(through_json(cut_off.meta()))
    feed(resumed, scores[cut:], first=cut + 1)
    assert resumed.scores == whole.scores
    assert resumed.wants_stop


def test_a_stop_is_remembered_as_long_as_the_configuration_wants_it():
    said = keeper(early_stopper="tests.unit.trainers.evaluation.test_score:stop_below_two", patience=9)
    feed(said, [1.0])
    meta = through_json(said.meta())
    for config, wants in (
        ({"early_stopper": "tests.unit.trainers.evaluation.test_score:stop_below_two"}, True),
        ({"patience": 9}, False),
    ):
        again = keeper(**config)
        again.go_back(meta)
        assert again.wants_stop is wants


def test_a_rollback_takes_later_scores_back():
    made = keeper()
    feed(made, [3.0, 2.0])
    before = through_json(made.meta())
    feed(made, [1.0], first=3)
    made.go_back(before)
    assert (made.scores.best_step, made.scores.best) == (2, 2.0)
    made.go_back(None)
    assert made.scores.best is None


def test_scores_of_another_metric_are_not_compared():
    loss = keeper()
    feed(loss, [0.1])
    accuracy = keeper(metrics=("eval_accuracy",), lower_better=False)
    accuracy.go_back(through_json(loss.meta()))
    assert accuracy.scores.best is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ScoreConfig(metrics=()), "metrics = .*expected at least one metric"),
        (lambda: ScoreConfig(patience=0), "patience = 0: expected at least 1"),
        (lambda: ScoreConfig(early_stopper="mine"), "early_stopper = 'mine': expected package.module:Name"),
        (
            lambda: EvaluationConfig(score=ScoreConfig(patience=2)),
            "nothing calls for evaluations; set every_steps or every_epochs",
        ),
        (lambda: CheckpointConfig(keep_model_only="best"), "nothing is kept by keep_best"),
    ],
)
def test_what_makes_no_sense_is_reported(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class KnowsMore(BaseTrainer):
    def calculate_metrics(self, metrics, unit):
        return {**metrics, "mine": 1.0}


class BuildsLater(BaseTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


def test_a_score_of_an_unknown_metric_is_an_error_when_the_trainer_is_built(tmp_path):
    def made(metric, **changes):
        return trainer(tmp_path, evaluation={"score": {"metrics": [metric], "lower_better": True}}, **changes)

    with pytest.raises(UsageError, match=r"score.metrics: 'eval_los': expected .*did you mean eval_loss\?"):
        made("eval_los")
    with pytest.raises(UsageError, match=r"score.metrics: 'val_loss': expected"):
        made("val_loss")
    made("eval_accuracy")
    made("eval_mine", cls=KnowsMore)
    # Its parts may be set after `super().__init__`: then it is found before a device is used.
    later = made("eval_los", cls=BuildsLater)
    with pytest.raises(UsageError, match=r"score.metrics: 'eval_los': expected"):
        later.prepare()


def test_a_users_metrics_are_asked_for_by_each_evaluation_alone(tmp_path, events):
    class Own(BaseTrainer):
        asked = 0

        def build_evaluation_metrics(self, unit):
            self.asked += 1

    made = trainer(tmp_path, cls=Own, evaluation={"score": {"metrics": ["eval_loss"], "lower_better": True}})
    made.train()
    begun = made.asked
    made.evaluate()
    of_one = made.asked - begun
    made.prepare()
    assert made.asked == begun + of_one
