"""Batch statistics in every kind of file: whole states, models alone, files of other programs; on another mesh."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from gangway.errors import CheckpointError, UsageError
from gangway.storage.opening import place_of
from tests.saved import saved
from tests.unit.trainers.step.test_model_state import trainer
from tests.unit.training import assert_equal, of
from trainers.checkpoint import weights
from trainers.commands import evaluate
from trainers.export import from_safetensors, to_safetensors
from trainers.trainer import beginnings
from trainers.trainer.build import build

ONE_CHECKPOINT = {"checkpoint": {"save_steps": 3, "model_every_steps": 2, "save_total_limit": 1}}

KEPT = {"keep_every_steps": 2, "keep_model_only": "every"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    made = trainer(tmp_path_factory.mktemp("trained"), **ONE_CHECKPOINT)
    made.train()
    return made


def evaluation(made):
    return {name.removeprefix("eval_"): value for name, value in made.output.metrics.items() if name.startswith("eval_")}


def beginning(made, model_parameters=None):
    build(made)
    return beginnings.beginning(made, model_parameters).make()


def run_folder(made):
    return Path(made.output.checkpoint_path).parents[1]


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "fsdp": 4}])
@pytest.mark.slow("trains more than once")
def test_a_saved_state_is_loaded_on_any_mesh(trained, tmp_path, mesh):
    trained.save_pretrained(str(tmp_path / "saved"))
    loaded = trainer(tmp_path, mesh=mesh).load_pretrained(str(tmp_path / "saved"))
    assert_equal(loaded, trained.output.state)


@pytest.mark.slow("compiles a step and trains")
def test_a_model_alone_has_its_statistics_and_evaluates_as_the_whole_checkpoint_does(trained, tmp_path):
    model = saved(run_folder(trained), 6, "models")
    found = weights.open_model(place_of(model))
    assert {"norm.mean", "norm.var", "norm.scale"} <= set(found.parameters)
    for source in (model, trained.output.checkpoint_path):
        (result,) = evaluate.evaluate(trainer(tmp_path, **ONE_CHECKPOINT), str(source))
        assert result.metrics == {name: evaluation(trained)[name] for name in result.metrics}


@pytest.mark.slow("trains twice")
def test_a_model_that_is_kept_of_an_old_checkpoint_has_its_statistics(tmp_path):
    made = trainer(tmp_path, checkpoint={"save_steps": 2, "save_total_limit": 1, **KEPT}, max_num_steps=4)
    made.train()
    (result,) = evaluate.evaluate(trainer(tmp_path / "other"), str(saved(run_folder(made), 2, "models")))
    assert np.isfinite(result.metrics["loss"])


def test_a_file_of_safetensors_has_all_of_the_model_and_can_be_trained_on(trained, tmp_path, events):
    file = tmp_path / "model.safetensors"
    to_safetensors(trained.output.checkpoint_path, file)
    (result,) = evaluate.evaluate(trainer(tmp_path), str(file))
    assert result.metrics["loss"] == pytest.approx(evaluation(trained)["loss"], rel=1e-6)
    given = from_safetensors(file)
    assert_equal(given["norm"]["mean"], trained.output.state.model_state["norm"]["mean"])
    state = beginning(trainer(tmp_path), given)
    assert_equal(state.model_state, trained.output.state.model_state)
    assert not any("begin as in a new run" in event["message"] for event in of(events, "note"))


def test_parameters_without_statistics_begin_with_new_ones_and_a_note_says_so(trained, tmp_path, events):
    state = beginning(trainer(tmp_path), jax.device_get(trained.output.state.params))
    assert_equal(state.params, trained.output.state.params)
    np.testing.assert_array_equal(state.model_state["norm"]["var"], np.ones(16))
    (note,) = [event["message"] for event in of(events, "note") if "as in a new run" in event["message"]]
    assert note == "model_parameters: norm.mean, norm.var are not among them, and begin as in a new run"
    with pytest.raises(UsageError, match=r"out.bias is missing"):
        beginning(trainer(tmp_path / "b"), {name: state.params[name] for name in ("norm", "inner")})


def test_init_from_takes_the_statistics_along(trained, tmp_path):
    from_run = beginning(trainer(tmp_path, init_from={"path": str(run_folder(trained))}))
    assert_equal((from_run.params, from_run.model_state), (trained.output.state.params, trained.output.state.model_state))
    chosen = {"path": str(run_folder(trained)), "exclude": ["norm.mean"]}
    state = beginning(trainer(tmp_path / "b", init_from=chosen))
    np.testing.assert_array_equal(state.model_state["norm"]["mean"], np.zeros(16))
    assert_equal(state.model_state["norm"]["var"], trained.output.state.model_state["norm"]["var"])


def test_a_checkpoint_of_a_model_without_them_is_one_of_another_model(trained, tmp_path):
    other = trainer(tmp_path, task="tests.unit.trainers.step.test_model_state:CountingTask", max_num_steps=1)
    other.train()
    with pytest.raises(CheckpointError, match="another model"):
        trainer(tmp_path).load_pretrained(other.output.checkpoint_path)
