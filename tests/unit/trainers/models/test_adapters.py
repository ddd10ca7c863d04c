"""Models that are no NNX modules, each trained: a Linen module with batch statistics and dropout, and plain functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from gangway.stop_reason import StopReason
from tests.programs import normed
from tests.programs.normed import MOMENTUM, NormedTask, real_rows, running_statistics
from tests.unit.trainers.step.test_model_state import STILL, trainer
from tests.unit.training import OneDevice, StopAt, assert_equal, losses
from trainers import runtime
from trainers.models.adapters import from_functions, from_linen
from trainers.optim.param_groups import parameter_paths
from trainers.step.state import abstract_model, initial_model

HERE = "tests.unit.trainers.models.test_adapters:"


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.Dense(16, name="inner")(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=MOMENTUM, name="norm")(x)
        x = linen.Dropout(0.3, deterministic=not train)(jnp.tanh(x))
        return linen.Dense(normed.LABELS, name="out")(x)


class LinenTask(NormedTask):
    def build_model(self, rngs):
        return from_linen(Linen(), jnp.zeros((1, normed.WIDTH)), rngs=rngs)


def init(key):
    first, second = jax.random.split(key)
    return [
        {"w": jax.random.normal(first, (normed.WIDTH, 16)) * 0.3, "b": jnp.zeros(16)},
        (jax.random.normal(second, (16, normed.LABELS)) * 0.3,),
    ]


def apply(params, x, training, key):
    layer, (out,) = params
    x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0.0) if training else x) @ out


class FunctionTask(NormedTask):
    def build_model(self, rngs):
        return from_functions(init, apply, rngs=rngs)


class PlainTask(NormedTask):
    """Of one array, and without modes or noise."""

    def build_model(self, rngs):
        first = lambda key: jax.random.normal(key, (normed.WIDTH, normed.LABELS))  # noqa: E731
        return from_functions(first, lambda weights, x: x @ weights, rngs=rngs)


@pytest.mark.parametrize("task", ["LinenTask", "FunctionTask"])
@pytest.mark.slow("compiles a model several times")
def test_it_learns_and_a_resumed_run_equals_an_undisturbed_one(tmp_path, events, task):
    about = {"task": HERE + task, "accumulation_steps": 3, "max_num_steps": 40, "cls": OneDevice}
    whole = trainer(tmp_path / "whole", **about)
    whole.train()
    got = list(losses(events).values())
    assert np.mean(got[-5:]) < 0.6 * np.mean(got[:5])
    assert whole.evaluate()["accuracy"] > 0.75
    assert whole.evaluate() == whole.evaluate()
    trainer(tmp_path / "cut", StopAt(17, StopReason.TERMINATED), **about).train()
    runtime.install(runtime.Runtime(events.append))  # nobody asks this one to stop
    again = trainer(tmp_path / "cut", **about)
    assert_equal(again.train(), whole.output.state)


@pytest.mark.slow("compiles a model several times")
def test_the_statistics_of_a_linen_module_are_those_of_the_rows_that_count(tmp_path):
    made = trainer(tmp_path, task=HERE + "LinenTask", cls=OneDevice, max_num_steps=2, accumulation_steps=3, **STILL)
    state = made.train()
    (below,) = state.model_state.values()
    assert set(below) == {"norm"}
    micro_batches = [rows for index in range(2) for rows in np.split(real_rows(index), 3)]
    mean, var = running_statistics(state.params["linen"]["inner"], micro_batches)
    np.testing.assert_allclose(below["norm"]["mean"], mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(below["norm"]["var"], var, rtol=1e-4)


def test_the_parameters_of_functions_have_the_names_of_their_places():
    _, shapes, _ = abstract_model(FunctionTask(None), 0)
    named = dict(zip(parameter_paths(shapes), jax.tree.leaves(shapes), strict=True))
    assert {name: leaf.shape for name, leaf in named.items()} == {
        "weights.0.w": (6, 16),
        "weights.0.b": (16,),
        "weights.1.0": (16, 3),
    }


def test_one_array_is_a_pytree_too(tmp_path):
    state = trainer(tmp_path, task=HERE + "PlainTask", max_num_steps=1).train()
    assert {name: below.keys() for name, below in state.params.items()} == {"weights": {"value"}}


@pytest.mark.slow("trains")
def test_in_an_evaluation_a_linen_module_changes_nothing_and_drops_nothing_out():
    parts, _, _ = abstract_model(LinenTask(None), 0)
    model = parts.merge(*initial_model(LinenTask(None), 0))
    model.eval()
    x = jnp.asarray(real_rows(0))
    np.testing.assert_array_equal(model(x), model(x))
    model.train()
    assert not np.array_equal(model(x), model(x))
