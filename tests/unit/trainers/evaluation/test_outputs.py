"""Metrics of single predictions: each example counts once, whatever the devices and the padding."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from gangway.errors import UsageError
from tests.programs.outputs import Guesses, MostWrong
from tests.programs.tiny import Numbers, numbers
from tests.unit.training import arguments, of, trainer
from trainers.base import BaseTrainer
from trainers.evaluation.outputs import decoded, encoded
from trainers.planning.estimate import plan

TASK, METRICS = "tests.programs.outputs:Guesses", "tests.programs.outputs:MostWrong"
HERE = "tests.unit.trainers.evaluation.test_outputs:"


def wrong_guesses(state, examples):
    params = {name: np.asarray(leaf) for name, leaf in state.params.items()}
    rows = np.stack([examples[i]["tokens"] for i in range(len(examples))])
    return np.sum(np.argmax(np.tanh(params["embed"][rows[:, :-1]]) @ params["out"], -1) != rows[:, 1:], -1)


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}])
@pytest.mark.slow("compiles a decoder and a step")
def test_each_example_counts_once_on_any_devices(tmp_path, events, mesh):
    units = {"eval": {"metrics": METRICS}, "few": {"metrics": METRICS, "max_batches": 1}}
    changes = {"max_num_steps": 3, "task": TASK, "mesh": mesh}
    made = trainer(
        tmp_path, evaluation={"units": units, "score": {"metrics": ["eval_median_wrong"], "lower_better": True}}, **changes
    )
    state = made.train()
    (published,) = (event["metrics"] for event in of(events, "metrics") if event.get("kind") == "eval")
    wrong = wrong_guesses(state, numbers(made.arguments)[1])
    assert published["eval_examples"] == published["eval_different"] == 21
    assert published["few_examples"] == 16
    assert published["eval_median_wrong"] == published["score"] == np.median(wrong)
    assert published["eval_hits"] == pytest.approx(published["eval_accuracy"], rel=1e-6)
    assert made.evaluate(state)["examples"] == 21  # each evaluation begins with nothing


def test_eval_ends_with_them_too(tmp_path, events):
    class Kept(BaseTrainer):
        def on_evaluation_end(self, state, metrics):
            self.kept = metrics
            return state, metrics

    made = trainer(tmp_path, cls=Kept, max_num_steps=1, task=TASK, evaluation={"units": {"eval": {"metrics": METRICS}}})
    state = made.train()
    batches = list(made.eval(state))
    assert "examples" not in batches[0]
    assert made.kept["examples"] == 21


class LeavesOut(BaseTrainer):
    """No example whose id is odd; and its metrics come from a method."""

    def build_data_transform(self):
        return lambda example: None if example["sample_id"] % 2 else example

    def build_evaluation_metrics(self, unit_name):
        return MostWrong(self.arguments) if unit_name == "eval" else None

    def calculate_metrics(self, metrics, unit):
        return {**metrics, "errors": 1 - metrics["hits"], f"of_{unit}": 1.0}


def test_examples_that_are_left_out_do_not_count_and_a_trainer_may_build_metrics_itself(tmp_path, events):
    made = trainer(tmp_path, cls=LeavesOut, max_num_steps=1, task=TASK)
    made.train()
    (published,) = (event["metrics"] for event in of(events, "metrics") if event.get("kind") == "eval")
    assert published["eval_examples"] == published["eval_different"] == 11
    assert published["eval_errors"] == 1 - published["eval_hits"]
    assert published["eval_of_eval"] == 1.0
    assert made.evaluate()["errors"] == published["eval_errors"]


# ---------------------------------------------------------------------- what is wrong


class NoRows(Guesses):
    def predictions(self, model, batch):
        return {"mean": jnp.mean(super().predictions(model, batch)["wrong"])}


class Undeclared(MostWrong):
    names = ("examples",)


class OfTheLoss(MostWrong):
    names = ("accuracy",)


class NoMerge:
    names = ()

    def __init__(self, arguments): ...

    add = state = compute = __init__


@pytest.mark.parametrize(
    ("task", "metrics", "problem", "is_planned"),
    [
        ("tests.programs.tiny:TableTask", METRICS, r"'eval': TableTask has no method predictions\(model, batch\)", True),
        (TASK, HERE + "OfTheLoss", "the loss has metrics named accuracy too: rename them", True),
        (TASK, HERE + "NoMerge", "NoMerge has no merge; expected what trainers.protocol.EvaluationMetrics describes", True),
        (TASK, HERE + "Undeclared", "compute returned different, .*; expected the declared names: examples", False),
        (HERE + "NoRows", METRICS, r"NoRows returned \['mean'\] of shape \(\): expected \[rows, ...\] with the 16 rows", False),
    ],
)
def test_what_cannot_be_computed_is_an_error_and_found_before_training_if_possible(
    tmp_path, events, task, metrics, problem, is_planned
):
    changes = {"task": task, "max_num_steps": 1, "evaluation": {"units": {"eval": {"metrics": metrics}}}}
    problems, _ = plan(arguments(tmp_path, **changes), 8)
    assert len(problems) == is_planned, problems
    with pytest.raises(UsageError, match=problem) as error:
        trainer(tmp_path, **changes).train()
    assert all(str(error.value) in line for line in problems)


def test_a_plan_knows_the_names_and_that_there_is_such_a_class(tmp_path):
    def problems(metrics, score):
        evaluation = {"units": {"eval": {"metrics": metrics}}, "score": {"metrics": [score], "lower_better": True}}
        return "\n".join(plan(arguments(tmp_path, task=TASK, evaluation=evaluation), 8)[0])

    assert problems(METRICS, "eval_median_wrong") == ""
    assert "did you mean eval_median_wrong" in problems(METRICS, "eval_median_wrongs")
    assert "evaluation.units.eval.metrics: " in problems(HERE + "Nothing", "eval_loss")


def test_states_travel_as_they_are():
    state = {
        "a": np.arange(6, dtype=np.int64).reshape(2, 3),
        "b": [1, 2.5, None, True, "text"],
        "c": {"d": jnp.ones(2, jnp.bfloat16)},
    }
    back = decoded(json.loads(json.dumps(encoded(state))))
    assert back["b"] == state["b"]
    for got, sent in ((back["a"], state["a"]), (back["c"]["d"], state["c"]["d"])):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert np.array_equal(got, sent)
    assert decoded(encoded((np.float32(1.5), ()))) == [np.float32(1.5), []]
    for wrong in ({1: 2}, {"a": {3}}, Numbers(1, 1)):
        with pytest.raises(UsageError, match=r"the state of evaluation metrics has .*expected JSON values and NumPy arrays"):
            encoded(wrong)
