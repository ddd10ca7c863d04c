"""An update of the optimizer's state, applied or refused."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainers.config import OptimizerConfig, ScheduleConfig
from trainers.optim.optimizers import DIRECTIONS, build_optimizer
from trainers.optim.parameter_kinds import ParameterKind
from trainers.step.offloaded_update import kept_update

PARAMS = {
    "layers": {"up": np.linspace(-1, 1, 48, dtype=np.float32).reshape(2, 4, 6), "norm": np.ones((2, 4), np.float32)},
    "embed": np.linspace(1, 2, 20, dtype=np.float32).reshape(5, 4),
}
KINDS = {"layers.norm": ParameterKind((-1,), "vector"), "embed": ParameterKind((-2, -1), "table")}
GRADIENTS = jax.tree.map(lambda leaf: np.sin(7 * leaf), PARAMS)


def begun(optimizer):
    """Returns a state that no leaf of which is as it was at first."""
    return optimizer.update(jax.tree.map(jnp.cos, PARAMS), optimizer.init(PARAMS), PARAMS)[1]


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(DIRECTIONS))
def test_an_update_is_that_of_the_optimizer_and_a_refused_one_changes_nothing(name):
    config = OptimizerConfig(name=name, schedule=ScheduleConfig(name="constant"))
    optimizer = build_optimizer(config, optax.linear_schedule(1e-2, 0, 10), KINDS)
    state = begun(optimizer)
    updates, new = kept_update(optimizer, jnp.array(True), GRADIENTS, state, PARAMS)
    expected, expected_state = optimizer.update(GRADIENTS, state, PARAMS)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9), (updates, new), (expected, expected_state))
    assert jax.tree.structure(new) == jax.tree.structure(state)
    not_finite = jax.tree.map(lambda leaf: leaf * jnp.nan, GRADIENTS)
    assert_same(kept_update(optimizer, jnp.array(False), not_finite, state, PARAMS)[1], state)


def test_a_state_may_keep_its_inputs_and_constants_and_one_value_twice():
    def init(params):
        return {"params": params, "gradients": params, "sums": (params, params), "one": jnp.zeros(()), "same": jnp.ones(3)}

    def update(gradients, state, params):
        total = jax.tree.map(jnp.add, gradients, params)
        new = {"params": params, "gradients": gradients, "sums": (total, total), "one": jnp.float32(1), "same": state["same"]}
        return total, new

    optimizer = optax.GradientTransformation(init, update)
    others = jax.tree.map(jnp.zeros_like, PARAMS)
    # The two sums differ, though they will be one value.
    state = {**init(others), "sums": (others, jax.tree.map(jnp.ones_like, PARAMS))}
    assert_same(kept_update(optimizer, jnp.array(True), GRADIENTS, state, PARAMS)[1], update(GRADIENTS, state, PARAMS)[1])
    assert_same(kept_update(optimizer, jnp.array(False), GRADIENTS, state, PARAMS)[1], state)


def test_no_second_state_is_in_memory():
    optimizer = optax.adamw(1e-3)
    params = jnp.zeros(1 << 20)

    def step(params, state, gradients, applied):
        updates, new = kept_update(optimizer, applied, gradients, state, params)
        return jnp.where(applied, params + updates, params), new

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, optimizer.init(params), params, jnp.array(True)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < params.nbytes / 4


def test_what_is_computed_keeps_its_scope():
    def update(gradients, state, params):
        with jax.named_scope("momentum"):
            return gradients, jnp.tanh(gradients + state)

    optimizer = optax.GradientTransformation(lambda params: params, update)
    step = jax.jit(lambda gradients, state: kept_update(optimizer, jnp.sum(gradients) > 0, gradients, state, gradients))
    assert "momentum/tanh" in step.lower(jnp.ones(3), jnp.ones(3)).as_text(debug_info=True)
