"""Evaluations on two hosts: exact over ragged ends, and what comes of them is the same on both."""

from __future__ import annotations

import dataclasses
import os

import jax
import numpy as np
import pytest

from gangway.storage.opening import place_of
from tests.multihost import harness
from tests.multihost.test_elastic import eight
from tests.programs.tiny import TableTask, numbers
from tests.saved import saved
from trainers.base import BaseTrainer
from trainers.checkpoint import weights
from trainers.step.state import initial_parameters

WINGS = ("trainers/evaluation", "trainers/metrics")

STOPPER = "tests.programs.stoppers:host0_at_step_four"


def run(tmp_path):
    made = eight(
        tmp_path,
        max_num_steps=40,
        evaluation={"at_start": True, "every_steps": 2, "score": {"early_stopper": STOPPER, "lower_better": False}},
        checkpoint={"save_steps": 2, "save_total_limit": 1, "keep_best": 1, "keep_model_only": "best"},
    )
    return made, harness.run(made, tmp_path / "logs", hosts=2, devices_per_host=2)


def loss_at_start(arguments):
    params = jax.tree.map(np.asarray, jax.jit(lambda: initial_parameters(TableTask(arguments), arguments.seed))())
    examples = numbers(arguments)[1]
    rows = np.stack([examples[i]["tokens"] for i in range(len(examples))])
    logits = np.tanh(params["embed"][rows[:, :-1]]) @ params["out"]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(logp, rows[:, 1:, None], -1).mean()


@pytest.mark.slow("starts the processes of several hosts")
def test_what_one_host_knows_stops_both_and_what_they_measure_is_exact(tmp_path):
    made, hosts = run(tmp_path)
    first, second = map(harness.result, hosts)
    assert [host.of("done")[0]["stop_reason"] for host in hosts] == ["early_stopped"] * 2
    assert (first["batches"], first["params_digest"]) == (4, second["params_digest"])
    evaluations = {event["step"]: event["metrics"] for event in hosts[0].of("metrics") if event.get("kind") == "eval"}
    assert sorted(evaluations) == [0, 2, 4]
    # 21 examples: the last of three batches of eight is ragged, and the second host has none of its rows on one device.
    assert evaluations[0]["eval_loss"] == pytest.approx(loss_at_start(made), rel=1e-5)
    assert first["best_score_step"] == second["best_score_step"] == 0  # the worst loss, as asked for
    run_folder = tmp_path / made.name
    assert [name.partition("-")[0] for name in os.listdir(run_folder / "checkpoints")] == ["4"]
    assert [name.partition("-")[0] for name in os.listdir(run_folder / "models")] == ["2"]
    shapes = jax.eval_shape(lambda: initial_parameters(TableTask(made), made.seed))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), shapes)
    found = weights.open_model(place_of(saved(run_folder, 2, "models")))
    params = weights.load(found, placed)
    assert found.meta["step"] == 2
    assert np.isfinite(params["embed"]).all()


class SeesItsOwn(BaseTrainer):
    """Adds a metric that differs between the hosts: it rises on host 0, and falls on the others."""

    def on_evaluation_end(self, state, metrics):
        step = self.info.global_step
        return state, {**metrics, "view": step if jax.process_index() == 0 else -step}


@pytest.mark.slow("starts the processes of several hosts")
def test_a_metric_that_differs_between_hosts_scores_as_host_0_sees_it(tmp_path):
    score = {"metrics": ["eval_view"], "lower_better": False}
    evaluation = {"every_steps": 1, "score": score}
    made = eight(tmp_path, trainer=f"{SeesItsOwn.__module__}:SeesItsOwn", max_num_steps=3, evaluation=evaluation)
    first, second = map(harness.result, harness.run(made, tmp_path / "logs", hosts=2, devices_per_host=2))
    assert (first["eval_view"], second["eval_view"]) == (3, -3)
    assert first["best_score_step"] == second["best_score_step"] == 3
    assert first["best_score"] == second["best_score"] == 3


@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": 1, "tensor": 4}])
@pytest.mark.slow("starts the processes of several hosts")
def test_metrics_of_predictions_count_each_example_once_on_two_hosts(tmp_path, mesh):
    """Also where two hosts hold the same rows: with tensor groups over both."""
    units = {"eval": {"metrics": "tests.programs.outputs:MostWrong"}}
    task = "tests.programs.outputs:Guesses"
    made = dataclasses.replace(eight(tmp_path, max_num_steps=1, mesh=mesh, evaluation={"units": units}), task=task)
    first, second = harness.run(made, tmp_path / "logs", hosts=2, devices_per_host=2)
    results = [harness.result(host) for host in (first, second)]
    assert {name: results[0][name] for name in ("eval_examples", "eval_different")} == {"eval_examples": 21, "eval_different": 21}
    assert results[0]["eval_hits"] == pytest.approx(results[0]["eval_accuracy"], rel=1e-6)
    assert results[0]["eval_median_wrong"] == results[1]["eval_median_wrong"]
