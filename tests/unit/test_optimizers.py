"""Optimizers by name: each against a step computed by hand, what decays, and what Muon is for."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainers.errors import UsageError
from trainers.optimizers import NAMES, build_optimizer, matrices
from trainers.sections import OptimizerConfig

RATE = 0.1
B1, B2 = 0.8, 0.9


def config(name, **changes):
    return OptimizerConfig(name=name, betas=(B1, B2), eps=1e-8, **{"weight_decay": 0.0, **changes})


def updates(settings, params, *gradients):
    """The updates of successive steps, each from the same parameters."""
    optimizer = build_optimizer(settings, optax.constant_schedule(RATE))

    @jax.jit
    def run(params, gradients):
        state, out = optimizer.init(params), []
        for gradient in gradients:
            update, state = optimizer.update(gradient, state, params)
            out.append(update)
        return out

    return run(params, gradients)


def model():
    return {
        "embed": normal(0, 7, 4),
        "final_norm": np.ones(4, np.float32),
        "layers": {"norm": np.ones((3, 4), np.float32), "up": normal(1, 3, 4, 6)},
        "head": {"kernel": normal(2, 4, 2), "bias": np.ones(2, np.float32)},
    }


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def gradient_of(params):
    return jax.tree.map(lambda leaf: normal(leaf.size, *leaf.shape), params)


FIRST, SECOND = 2.0, -3.0

SECOND_STEP = {
    "adamw": -((B1 * (1 - B1) * FIRST + (1 - B1) * SECOND) / (1 - B1**2))
    / np.sqrt((B2 * (1 - B2) * FIRST**2 + (1 - B2) * SECOND**2) / (1 - B2**2)),
    "lion": -np.sign(B1 * (1 - B2) * FIRST + (1 - B1) * SECOND),
    "sgd": -(B1 * FIRST + SECOND),
    "rmsprop": -SECOND / np.sqrt(B2 * (1 - B2) * FIRST**2 + (1 - B2) * SECOND**2),
}


@pytest.mark.parametrize("name", SECOND_STEP)
def test_the_second_step_is_the_one_computed_by_hand(name):
    scalar = {"w": jnp.zeros(())}
    _, second = updates(config(name), scalar, {"w": jnp.array(FIRST)}, {"w": jnp.array(SECOND)})
    assert float(second["w"]) == pytest.approx(RATE * SECOND_STEP[name], rel=1e-5)


def test_what_decays_is_matrices_and_a_stack_of_vectors_is_none():
    assert matrices(model()) == {
        "embed": True,
        "final_norm": False,
        "layers": {"norm": False, "up": True},
        "head": {"kernel": True, "bias": False},
    }


@pytest.mark.parametrize("name", [name for name in NAMES if name != "adam"])
def test_weight_decay_is_decoupled_and_for_matrices_only(name):
    params = model()
    gradient = gradient_of(params)
    (plain,) = updates(config(name), params, gradient)
    (decayed,) = updates(config(name, weight_decay=0.5), params, gradient)
    expected = jax.tree.map(lambda leaf, flag: -RATE * 0.5 * leaf * flag, params, matrices(params))
    jax.tree.map(lambda a, b, c: np.testing.assert_allclose(np.subtract(a, b), c, atol=1e-5), decayed, plain, expected)


def test_adam_is_adamw_without_decay():
    params = model()
    assert_equal(updates(config("adam", weight_decay=0.5), params, params), updates(config("adamw"), params, params))


def test_another_mask_may_be_given():
    params = model()
    everything = build_optimizer(
        config("adamw", weight_decay=1.0), optax.constant_schedule(RATE), lambda tree: jax.tree.map(lambda _: True, tree)
    )
    zeros = jax.tree.map(np.zeros_like, params)
    update, _ = jax.jit(lambda p: everything.update(zeros, everything.init(p), p))(params)
    np.testing.assert_allclose(update["final_norm"], -RATE * params["final_norm"], rtol=1e-6)


def test_muon_makes_the_matrices_of_the_layers_orthogonal_and_leaves_the_rest_to_adamw():
    params = model()
    gradient = gradient_of(params)
    (muon,) = updates(config("muon"), params, gradient)
    (adamw,) = updates(config("adamw"), params, gradient)
    # The update size of AdamW: 0.2 sqrt(max(rows, columns)) times a matrix with singular values near 1.
    for one in (*muon["layers"]["up"], muon["head"]["kernel"]):
        singular = np.linalg.svd(np.asarray(one), compute_uv=False) / (RATE * 0.2 * np.sqrt(max(one.shape)))
        assert np.all((singular > 0.6) & (singular < 1.3)), singular
    for name in ("embed", "final_norm"):
        np.testing.assert_allclose(muon[name], adamw[name], rtol=1e-5)
    np.testing.assert_allclose(muon["layers"]["norm"], adamw["layers"]["norm"], rtol=1e-5)


def test_muon_treats_each_layer_by_itself():
    params = model()
    (stacked,) = updates(config("muon"), params, params)
    for index in range(3):
        alone = {"layers": {"up": params["layers"]["up"][index : index + 1]}}
        (one,) = updates(config("muon"), alone, alone)
        np.testing.assert_allclose(one["layers"]["up"][0], stacked["layers"]["up"][index], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "muon"])
def test_moments_may_be_bfloat16(name):
    optimizer = build_optimizer(dataclasses.replace(config(name), moment_dtype="bfloat16"), optax.constant_schedule(RATE))
    moments = [leaf for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, model())) if leaf.shape == (3, 4, 6)]
    assert any(leaf.dtype == jnp.bfloat16 for leaf in moments)


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_goes_downhill(name):
    params = {"layers": {"up": normal(0, 2, 8, 8)}, "bias": np.ones(8, np.float32)}

    def loss(tree):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))

    optimizer = build_optimizer(config(name), optax.constant_schedule(0.01))
    state, start = jax.jit(optimizer.init)(params), float(loss(params))

    @jax.jit
    def step(params, state):
        update, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, update), state

    params = jax.tree.map(jnp.asarray, params)
    for _ in range(20):
        params, state = step(params, state)
    assert float(loss(params)) < 0.95 * start


def plain_sgd(settings, schedule):
    return optax.sgd(schedule)


def test_a_users_function_is_called_with_settings_and_schedule():
    (update,) = updates(config("tests.unit.test_optimizers:plain_sgd"), {"w": jnp.zeros(())}, {"w": jnp.array(2.0)})
    assert float(update["w"]) == pytest.approx(-RATE * 2)


def test_an_unknown_name_is_an_error_with_a_suggestion():
    with pytest.raises(UsageError) as error:
        build_optimizer(config("AdamX"), optax.constant_schedule(RATE))
    assert str(error.value) == (
        "optimizer.name = 'AdamX': expected one of adamw, adam, lion, sgd, rmsprop, adafactor, muon, "
        "or package.module:function; did you mean 'adam'?"
    )


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
