"""The state of every optimizer is float32, whatever type the parameters have. Thirty steps of AdamW are those of torch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gangway.errors import UsageError
from tests.programs.tiny import TableTask
from tests.unit.training import assert_equal, of, trainer
from trainers.config import OptimizerConfig, ParameterGroup, ScheduleConfig
from trainers.optim.optimizers import NAMES, build_grouped
from trainers.optim.param_groups import apply_updates
from trainers.optim.precision import check_averages, in_float32, rounded_at_random, share_lost, with_master_weights
from trainers.step import rng

RATE, STEPS = 1e-3, 30
PARAMS = {"w": np.linspace(-1, 1, 24).reshape(4, 6).astype(jnp.bfloat16), "b": np.ones(6, jnp.bfloat16)}


def optimizer(name="adamw", groups=(), **settings):
    config = OptimizerConfig(name=name, schedule=ScheduleConfig(name="constant"), learning_rate=RATE, **settings)
    return build_grouped(config, optax.constant_schedule(RATE), {}, groups)


def floating(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


@pytest.mark.parametrize("groups", [(), (ParameterGroup(pattern="b", learning_rate=1e-2),)])
@pytest.mark.parametrize("name", [*NAMES, "optax.adamw", "optax.adabelief", "optax.rmsprop", "optax.adafactor"])
def test_the_state_and_the_updates_are_float32_before_and_after_an_update(name, groups):
    made = optimizer(name, groups)
    state = jax.eval_shape(made.init, PARAMS)
    updates, after = jax.eval_shape(made.update, PARAMS, state, PARAMS)
    assert {leaf.dtype for tree in (state, updates, after) for leaf in floating(tree)} == {jnp.dtype(jnp.float32)}


def test_a_moment_in_bfloat16_is_asked_for_by_name_and_the_second_stays_float32():
    state = jax.eval_shape(optimizer(moment_dtype="bfloat16").init, PARAMS)
    assert sorted(str(leaf.dtype) for leaf in floating(state)) == ["bfloat16"] * 2 + ["float32"] * 2


def test_the_second_moment_of_bfloat16_parameters_comes_to_its_true_value():
    """In bfloat16 it stayed at 0.5, where 0.95 is true."""
    made, ones = optimizer(betas=(0.9, 0.999)), jax.tree.map(jnp.ones_like, PARAMS)

    @jax.jit
    def run(state):
        return jax.lax.fori_loop(0, 3000, lambda _, state: made.update(ones, state, PARAMS)[1], state)

    found = optax.tree.get(run(made.init(PARAMS)), "nu")["w"]
    np.testing.assert_allclose(found, 1 - 0.999**3000, rtol=1e-4)


def test_a_transformation_of_the_users_own_gets_float32_too(tmp_path):
    made = trainer(tmp_path, task="tests.unit.trainers.optim.test_precision:NarrowTask")
    made.optimizer = optax.adam(RATE)
    state = made.configure_model().state
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in floating(state.opt_state)} == {jnp.dtype(jnp.float32)}


def test_integers_and_wider_types_stay_as_they_are():
    seen = in_float32(optax.stateless(lambda updates, _: updates))
    tree = {"i": jnp.ones(2, jnp.int32), "f": jnp.ones(2), "h": jnp.ones(2, jnp.float16), "none": None}
    updates, _ = seen.update(tree, seen.init(tree))
    assert {name: str(leaf.dtype) for name, leaf in updates.items() if leaf is not None} == {
        "i": "int32",
        "f": "float32",
        "h": "float32",
    }


def test_averages_in_bfloat16_are_refused_by_the_name_of_the_parameter(tmp_path):
    check_averages({"w": jnp.ones(2), "i": jnp.ones(2, jnp.int32)})
    settings = {"name": "schedule_free_adamw", "schedule": {"name": "constant"}, "master_weights": "none"}
    made = trainer(tmp_path, task="tests.unit.trainers.optim.test_precision:NarrowTask", optimizer=settings)
    with pytest.raises(UsageError, match=r"schedule_free_adamw': the parameter embed is bfloat16, .*set param_dtype: float32"):
        made.configure_model()
    task = "tests.unit.trainers.optim.test_precision:NarrowTask"
    trainer(tmp_path, task=task, optimizer=settings | {"master_weights": "float32"}).configure_model()


def test_layers_that_come_one_by_one_are_not_rounded_at_random():
    with pytest.raises(ValueError, match=r"master_weights = 'stochastic': with offload = 'host' all layers draw alike"):
        OptimizerConfig(master_weights="stochastic", offload="host")


# ---------------------------------------------------------------------- updates that a parameter is too coarse for

SMALL = 1e-4
"""Of a parameter of 1.0, whose next values in bfloat16 are 0.996 and 1.008."""
ONES = {"a": np.ones((8, 125), jnp.bfloat16), "b": np.ones(1000, jnp.bfloat16), "wide": np.ones(3, np.float32)}


def steps_down(wrap, num_steps, params=ONES):
    """The parameters after steps of -SMALL each, the state, and whatever the optimizer was told of the parameters."""
    made = wrap(optax.sgd(SMALL))

    @jax.jit
    def step(params, state):
        updates, state = made.update(jax.tree.map(jnp.ones_like, params), state, params)
        return apply_updates(params, updates), state

    state = made.init(params)
    for _ in range(num_steps):
        params, state = step(params, state)
    return params, state


def test_updates_of_bfloat16_add_up_in_master_weights():
    for num_steps in (10, 30, 100):
        params, state = steps_down(with_master_weights, num_steps)
        for name in ("a", "b"):
            np.testing.assert_allclose(state.masters[name], 1 - num_steps * SMALL, rtol=5e-6)
            np.testing.assert_array_equal(params[name], jnp.asarray(1 - num_steps * SMALL, jnp.bfloat16))
        assert state.masters["wide"] is None
        np.testing.assert_array_equal(params["wide"], steps_down(in_float32, num_steps)[0]["wide"])


def test_a_parameter_that_something_else_has_changed_begins_from_there():
    """As one that a pruner has made 0."""
    params, state = steps_down(with_master_weights, 15)
    made = with_master_weights(optax.sgd(SMALL))
    updates, after = made.update(jax.tree.map(jnp.ones_like, params), state, params | {"a": jnp.zeros_like(params["a"])})
    np.testing.assert_allclose(updates["a"], -SMALL, rtol=1e-6)
    np.testing.assert_allclose(after.masters["a"], -SMALL, rtol=1e-6)
    np.testing.assert_allclose(after.masters["b"], 1 - 16 * SMALL, rtol=1e-6)


def test_parameters_that_are_wide_cost_nothing():
    wide = {"a": jnp.ones(3)}
    for wrap in (with_master_weights, at_random):
        assert_equal(wrap(optax.adam(SMALL)).init(wide), optax.adam(SMALL).init(wide))


def at_random(optimizer, seed=0):
    return rounded_at_random(optimizer, partial(rng.key, seed))


def test_rounded_at_random_the_mean_is_right_and_each_a_neighbour():
    params, _ = steps_down(at_random, 1)
    assert {float(value) for value in params["b"]} == {1.0, 0.99609375}
    num_steps = 40
    params, state = steps_down(at_random, num_steps)
    again, _ = steps_down(at_random, num_steps)
    other, _ = steps_down(partial(at_random, seed=1), num_steps)
    assert int(state.num_updates) == num_steps
    for name in ("a", "b"):
        # Each of 1,000 values has gone down by 0.0039 with probability 0.026 a step: the error of the mean is 1.2e-4.
        np.testing.assert_allclose(params[name].astype(jnp.float32).mean(), 1 - num_steps * SMALL, atol=6e-4)
        np.testing.assert_array_equal(params[name], again[name])
        assert np.mean(np.asarray(params[name] != other[name])) > 0.3
    assert np.mean(np.asarray(params["a"].ravel() != params["b"])) > 0.3
    np.testing.assert_allclose(params["wide"], 1 - num_steps * SMALL, rtol=1e-5)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3.3895e38])
def test_what_is_not_finite_does_not_become_a_number(value):
    after, _ = steps_down(at_random, 1, {"a": jnp.asarray([value], jnp.bfloat16)})
    np.testing.assert_array_equal(np.isfinite(after["a"].astype(jnp.float32)), np.isfinite([value]))


def test_the_share_of_lost_updates_counts_those_that_change_nothing():
    params = {"a": jnp.asarray([1.0, 1.0, 1e-3, 1.0], jnp.bfloat16), "wide": jnp.ones(100), "frozen": None}
    updates = {"a": jnp.asarray([1e-4, 0.1, 1e-4, 0.0]), "wide": jnp.full(100, 1e-30), "frozen": None}
    np.testing.assert_allclose(share_lost(params, updates), 1 / 3, rtol=1e-6)
    assert float(share_lost({"a": params["wide"]}, {"a": updates["wide"]})) == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("master_weights", ["float32", "stochastic", "none"])
def test_a_run_of_bfloat16_moves_its_parameters_or_says_that_it_does_not(tmp_path, events, master_weights):
    settings = {
        "task": "tests.unit.trainers.optim.test_precision:FromOneTask",
        "max_num_steps": 30,
        "optimizer": {
            **{"name": "sgd", "betas": [0.0, 0.0], "weight_decay": 0.0, "learning_rate": SMALL, "max_grad_norm": None},
            **{"schedule": {"name": "constant"}, "master_weights": master_weights},
        },
        "publish_every_steps": 1,
    }
    whole = trainer(tmp_path / "whole", **settings).train()
    published = [event["metrics"].get("lost_updates") for event in of(events, "metrics") if "loss" in event["metrics"]]
    assert published == [1.0 if master_weights == "none" else None] * 30
    down = 1 - np.asarray(whole.params["weights"], np.float32).mean()
    np.testing.assert_allclose(down, 0.0 if master_weights == "none" else 30 * SMALL, atol=1e-3)
    trainer(tmp_path / "parts", **settings | {"max_num_steps": 17}).train()
    assert_equal(trainer(tmp_path / "parts", **settings).train(), whole)


class FromOneTask(TableTask):
    """Its gradient is 1, whatever the batch."""

    def build_model(self, rngs):
        return nnx.Dict(weights=nnx.Param(jnp.ones((8, 32), jnp.bfloat16)))

    def loss(self, model, batch):
        return jnp.sum(batch["weight"]) * jnp.sum(model["weights"][...].astype(jnp.float32)), jnp.sum(batch["weight"])


# ---------------------------------------------------------------------- beside torch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_thirty_steps_of_adamw_are_those_of_torch(dtype):
    """After the documentation of `torch.optim.AdamW`, with its default betas and eps, in float64. Parameters in bfloat16 are
    rounded once a step, to the nearest; all else is float32."""
    rng = np.random.default_rng(0)
    start = {"w": rng.standard_normal((4, 6)).astype(dtype), "b": rng.standard_normal(6).astype(dtype)}
    gradients = [jax.tree.map(lambda p: rng.standard_normal(p.shape).astype(dtype), start) for _ in range(STEPS)]
    made = optimizer(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)

    @jax.jit
    def step(params, state, gradient):
        updates, state = made.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params, state = jax.tree.map(jnp.asarray, start), made.init(jax.tree.map(jnp.asarray, start))
    for gradient in gradients:
        params, state = step(params, state, gradient)
    for name, decay in (("w", 0.01), ("b", 0.0)):
        want = by_torch(start[name], [g[name].astype(np.float64) for g in gradients], decay, dtype)
        np.testing.assert_allclose(np.asarray(params[name], np.float64), want, rtol=2e-6 if dtype == "float32" else 2**-8)
        assert not np.allclose(want, start[name].astype(np.float64), rtol=1e-3)


def by_torch(p, gradients, decay, dtype):
    """`gradients` are arrays, or functions of the parameter."""
    p = p.astype(np.float64)
    m = v = np.zeros_like(p)
    for t, given in enumerate(gradients, 1):
        g = given(p) if callable(given) else given
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p - RATE * decay * p
        p = p - RATE * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        p = p.astype(dtype).astype(np.float64)
    return p


class PullTask(TableTask):
    """Pulls each parameter towards 1 + its own first value, by rows whose weights add up to 0.08."""

    def build_model(self, rngs):
        return nnx.Dict(layers=nnx.Param(jnp.asarray(MATRIX)), bias=nnx.Param(jnp.asarray(MATRIX[0])))

    def loss(self, model, batch):
        found = jnp.sum((model["layers"][...] - MATRIX - 1) ** 2) + jnp.sum((model["bias"][...] - MATRIX[0] - 1) ** 2)
        weight = 0.005 * jnp.sum(batch["weight"])
        return weight * found / 2, weight


MATRIX = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)


def test_thirty_steps_of_a_run_of_a_foreign_model_are_those_of_torch(tmp_path):
    settings = {"name": "adamw", "learning_rate": RATE, "betas": [0.9, 0.999], "weight_decay": 0.01, "max_grad_norm": None}
    made = trainer(
        tmp_path,
        task="tests.unit.trainers.optim.test_precision:PullTask",
        optimizer={**settings, "schedule": {"name": "constant"}},
        max_num_steps=STEPS,
        publish_every_steps=STEPS,
        checkpoint={"save_at_end": False},
    )
    params = made.train().params
    for name, start, decay in (("layers", MATRIX, 0.01), ("bias", MATRIX[0], 0.0)):
        want = by_torch(start, [lambda p, start=start: p - start - 1] * STEPS, decay, "float64")
        np.testing.assert_allclose(params[name], want, rtol=1e-5, atol=1e-6)


class NarrowTask(TableTask):
    def build_model(self, rngs):
        model = super().build_model(rngs)
        return nnx.Dict({name: nnx.Param(getattr(model, name)[...].astype(jnp.bfloat16)) for name in ("embed", "out")})

    def loss(self, model, batch):
        return jnp.sum(batch["weight"]) * jnp.sum(model["out"][...] ** 2).astype(jnp.float32), jnp.sum(batch["weight"])
