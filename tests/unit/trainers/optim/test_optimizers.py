"""Optimizers by name: each against a step computed by hand, what decays, and what Muon is for."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gangway.errors import UsageError
from tests.unit.training import trainer
from trainers.config import OptimizerConfig, ScheduleConfig
from trainers.optim.optimizers import NAMES, SCHEDULE_FREE, build_optimizer, parameters_to_evaluate
from trainers.optim.parameter_kinds import ParameterKind, matrices
from trainers.step.train_step import clip
from trainers.trainer.model_design import evaluated_parameters

RATE = 0.1
B1, B2 = 0.8, 0.9


def config(name, **changes):
    constant = ScheduleConfig(name="constant")
    return OptimizerConfig(name=name, betas=(B1, B2), **{"weight_decay": 0.0, "eps": 1e-8, "schedule": constant, **changes})


def updates(settings, params, *gradients):
    """The updates of successive steps, each from the same parameters."""
    optimizer = build_optimizer(settings, optax.constant_schedule(RATE), KINDS)

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


KINDS = {
    "embed": ParameterKind((-2, -1), "table"),
    "layers.norm": ParameterKind((-1,), "vector"),
    "layers.up": ParameterKind((-2, -1), "matrix"),
    "layers.expert_up": ParameterKind((-2, -1), "matrix"),
}
"""Of `model`: its layers are stacked."""


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def gradient_of(params):
    return jax.tree.map(lambda leaf: normal(leaf.size, *leaf.shape), params)


# ---------------------------------------------------------------------- three steps in NumPy, from the papers' formulas

EPS, DECAY = 1e-3, 0.25
TREE = {"up": (3, 5), "bias": (5,)}
"""`up` decays, `bias` does not."""


def by_adamw(p, gradients, decay, rates):
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        p = p - rate * ((m / (1 - B1**t)) / (np.sqrt(v / (1 - B2**t)) + EPS) + decay * p)
    return p


def by_lion(p, gradients, decay, rates):
    m = np.zeros_like(p)
    for g, rate in zip(gradients, rates, strict=True):
        p = p - rate * (np.sign(B1 * m + (1 - B1) * g) + decay * p)
        m = B2 * m + (1 - B2) * g
    return p


def by_sgd(p, gradients, decay, rates):
    m = np.zeros_like(p)
    for g, rate in zip(gradients, rates, strict=True):
        m = B1 * m + g
        p = p - rate * (m + decay * p)
    return p


def by_rmsprop(p, gradients, decay, rates):
    v = np.zeros_like(p)
    for g, rate in zip(gradients, rates, strict=True):
        v = B2 * v + (1 - B2) * g * g
        p = p - rate * (g / (np.sqrt(v) + EPS) + decay * p)
    return p


def by_adafactor(p, gradients, decay, rates):
    """Without factors, for dimensions this small: Shazeer & Stern, algorithm 4."""
    v = np.zeros_like(p)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        beta = 1 - t**-0.8
        v = beta * v + (1 - beta) * (g * g + 1e-30)
        u = g / np.sqrt(v)
        p = p - rate * (u / max(1.0, np.sqrt(np.mean(u * u))) + decay * p)
    return p


def by_muon(p, gradients, decay, rates):
    """Keller Jordan's quintic iteration on Nesterov momentum; sized after Liu et al. 2025. Vectors are AdamW's."""
    if p.ndim < 2:
        return by_adamw(p, gradients, decay, rates)
    m = np.zeros_like(p)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        m = B2 * m + (1 - B2) * g
        x = B2 * m / (1 - B2 ** (t + 1)) + (1 - B2) * g / (1 - B2**t)
        x = x / (np.linalg.norm(x) + EPS)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        p = p - rate * (0.2 * np.sqrt(max(p.shape)) * x + decay * p)
    return p


def by_schedule_free_adamw(y, gradients, decay, rates):
    """Defazio et al. 2024, algorithm 1. Returns where gradients are taken, and the average."""
    x = z = y
    v, total = np.zeros_like(y), 0.0
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        v = B2 * v + (1 - B2) * g * g
        z = z - rate * (g / (np.sqrt(v / (1 - B2**t)) + EPS) + decay * y)
        weight = max(rates[:t]) ** 2
        total += weight
        x = (1 - weight / total) * x + weight / total * z
        y = (1 - B1) * z + B1 * x
    return y, x


def three_steps(settings, schedule=None, size=1.0):
    params = {"layers": {}, **{name: normal(5, *shape) for name, shape in TREE.items()}}
    gradients = [
        jax.tree.map(lambda leaf, seed=seed: normal(seed + leaf.size, *leaf.shape) * np.float32(size), params)
        for seed in (10, 20, 30)
    ]
    optimizer = build_optimizer(settings, schedule or optax.constant_schedule(RATE), {})

    @jax.jit
    def run(params):
        state = optimizer.init(params)
        for gradient in gradients:
            update, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, update)
        return params, parameters_to_evaluate(state, params)

    return params, gradients, run(params)


FORMULAS = {
    "adamw": by_adamw,
    "adam": by_adamw,
    "lion": by_lion,
    "sgd": by_sgd,
    "rmsprop": by_rmsprop,
    "adafactor": by_adafactor,
    "muon": by_muon,
    "schedule_free_adamw": lambda *args: by_schedule_free_adamw(*args)[0],
}


def test_every_optimizer_has_a_formula():
    assert set(FORMULAS) == set(NAMES)


@pytest.mark.parametrize("name", FORMULAS)
def test_three_steps_are_those_of_the_formula(name):
    start, gradients, (got, evaluated) = three_steps(config(name, eps=EPS, weight_decay=DECAY))
    for leaf in TREE:
        decay = DECAY if leaf == "up" and name != "adam" else 0.0
        want = FORMULAS[name](start[leaf].astype(np.float64), [g[leaf] for g in gradients], decay, [RATE] * 3)
        np.testing.assert_allclose(got[leaf], want, rtol=2e-4, atol=2e-5)
        if name != "schedule_free_adamw":
            np.testing.assert_array_equal(evaluated[leaf], got[leaf])


@pytest.mark.parametrize("name", FORMULAS)
def test_three_steps_are_those_of_the_formula_for_gradients_of_any_size(name):
    for size in (1e-8, 1e-5, 1e-3, 1e-1, 1e4):  # around EPS too: where it is added makes a difference there
        start, gradients, (got, _) = three_steps(config(name, eps=EPS), size=size)
        for leaf in TREE:
            start64, gradients64 = start[leaf].astype(np.float64), [g[leaf].astype(np.float64) for g in gradients]
            want = FORMULAS[name](start64, gradients64, 0.0, [RATE] * 3) - start64
            # A sum in float32 rounds the parameter by 1e-7.
            np.testing.assert_allclose(got[leaf] - start64, want, rtol=2e-3, atol=3e-7, err_msg=f"{leaf}, {size}")


def test_the_averages_of_schedule_free_weigh_steps_by_their_rates():
    rates = [0.05, 0.1, 0.1]
    settings = config("schedule_free_adamw", eps=EPS, weight_decay=DECAY)
    start, gradients, (got, evaluated) = three_steps(settings, lambda step: jnp.asarray(rates)[step])
    for leaf in TREE:
        decay = DECAY if leaf == "up" else 0.0
        y, x = by_schedule_free_adamw(start[leaf].astype(np.float64), [g[leaf] for g in gradients], decay, rates)
        np.testing.assert_allclose(got[leaf], y, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(evaluated[leaf], x, rtol=2e-4, atol=2e-5)
        assert not np.allclose(x, y, atol=1e-3)


def test_the_averages_are_found_in_a_state_from_files_where_everything_is_dicts_and_lists():
    optimizer = build_optimizer(config("schedule_free_adamw"), optax.constant_schedule(RATE), {})
    params = {"up": jnp.ones((2, 2))}
    state = optimizer.init(params)._replace(z={"up": jnp.full((2, 2), 3.0)})
    plain = [{"inner": {**state._asdict(), "base_optimizer_state": []}}]
    averages = parameters_to_evaluate(state, params)
    assert not np.array_equal(averages["up"], params["up"])
    np.testing.assert_array_equal(parameters_to_evaluate(plain, params)["up"], averages["up"])


def test_what_is_evaluated_is_the_average_in_a_whole_run_with_groups(tmp_path):
    groups = [{"pattern": "embed", "frozen": True}, {"pattern": "out", "learning_rate": 0.05}]
    settings = {"name": "schedule_free_adamw", "learning_rate": 0.01, "schedule": {"name": "constant"}, "groups": groups}
    made = trainer(tmp_path, optimizer=settings, checkpoint={"save_at_end": False})
    state = made.train()
    averages = evaluated_parameters(state)
    assert_equal(averages["embed"], state.params["embed"])
    assert not np.array_equal(averages["out"], state.params["out"])
    other = trainer(tmp_path / "other", max_num_steps=1, checkpoint={"save_at_end": False})
    other.train()
    expected = other.evaluate(dataclasses.replace(other.state, params=averages))
    assert made.evaluate(state)["loss"] == pytest.approx(expected["loss"], rel=1e-6)


# ---------------------------------------------------------------------- what decays


def test_what_decays_is_matrices_and_a_stack_of_vectors_is_none():
    assert matrices(KINDS)(model()) == {
        "embed": True,
        "final_norm": False,
        "layers": {"norm": False, "up": True},
        "head": {"kernel": True, "bias": False},
    }


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("adam", SCHEDULE_FREE)])
def test_weight_decay_is_decoupled_and_for_matrices_only(name):
    params = model()
    gradient = gradient_of(params)
    (plain,) = updates(config(name), params, gradient)
    (decayed,) = updates(config(name, weight_decay=0.5), params, gradient)
    expected = jax.tree.map(lambda leaf, flag: -RATE * 0.5 * leaf * flag, params, matrices(KINDS)(params))
    jax.tree.map(lambda a, b, c: np.testing.assert_allclose(np.subtract(a, b), c, atol=1e-5), decayed, plain, expected)


def test_the_names_of_a_decoder_mean_nothing_in_a_model_that_does_not_say_so():
    """The gradient is 0, so that an update is the decay alone."""
    names = ("layers", "expert_up", "embed", "unembed")
    params = {name: {"kernel": normal(0, 4, 6)} for name in names}
    zeros = jax.tree.map(np.zeros_like, params)
    optimizer = build_optimizer(config("adamw", weight_decay=0.5), optax.constant_schedule(RATE), {})
    update, _ = jax.jit(lambda p: optimizer.update(zeros, optimizer.init(p), p))(params)
    jax.tree.map(lambda u, p: np.testing.assert_allclose(u, -RATE * 0.5 * p, rtol=1e-6), update, params)
    muon = build_optimizer(config("muon"), optax.constant_schedule(RATE), {})
    update, _ = jax.jit(lambda p: muon.update(p, muon.init(p), p))(params)
    for name in names:
        singular = np.linalg.svd(update[name]["kernel"], compute_uv=False) / (RATE * 0.2 * np.sqrt(6))
        assert np.all((singular > 0.6) & (singular < 1.3)), name


@pytest.mark.parametrize("name", NAMES)
def test_stacked_parameters_get_the_updates_that_each_would_get_alone(name):
    """Stacked along the second dimension too: any may be."""
    alone = [{"up": normal(seed, 4, 6) * 10**seed, "norm": normal(seed + 9, 4)} for seed in range(3)]
    kinds = {"up": ParameterKind((-3, -1), "matrix"), "norm": ParameterKind((-1,), "vector")}
    stacked = {"up": np.stack([one["up"] for one in alone], 1), "norm": np.stack([one["norm"] for one in alone])}
    settings = config(name, weight_decay=0.5)

    def two_updates(params, kinds):
        optimizer = build_optimizer(settings, optax.constant_schedule(RATE), kinds)

        @jax.jit
        def run(params):
            _, state = optimizer.update(params, optimizer.init(params), params)
            return optimizer.update(jax.tree.map(lambda leaf: leaf**2, params), state, params)[0]

        return run(params)

    got = two_updates(stacked, kinds)
    for index, one in enumerate(alone):
        want = two_updates(one, {})
        np.testing.assert_allclose(got["up"][:, index], want["up"], rtol=2e-3, atol=1e-5)
        np.testing.assert_allclose(got["norm"][index], want["norm"], rtol=1e-4, atol=1e-6)


def test_adam_is_adamw_without_decay():
    params = model()
    assert_equal(updates(config("adam", weight_decay=0.5), params, params), updates(config("adamw"), params, params))


def test_another_mask_may_be_given():
    params = model()
    everything = build_optimizer(
        config("adamw", weight_decay=1.0), optax.constant_schedule(RATE), KINDS, lambda tree: jax.tree.map(lambda _: True, tree)
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


def test_muon_treats_each_expert_by_itself():
    params = {"layers": {"expert_up": jax.random.normal(jax.random.key(3), (2, 3, 8, 6))}}
    (stacked,) = updates(config("muon"), params, params)
    alone = {"layers": {"up": params["layers"]["expert_up"][:, 1]}}
    (one,) = updates(config("muon"), alone, alone)
    np.testing.assert_allclose(stacked["layers"]["expert_up"][:, 1], one["layers"]["up"], rtol=1e-4, atol=1e-7)


def test_muon_treats_each_layer_by_itself():
    params = model()
    (stacked,) = updates(config("muon"), params, params)
    for index in range(3):
        alone = {"layers": {"up": params["layers"]["up"][index : index + 1]}}
        (one,) = updates(config("muon"), alone, alone)
        np.testing.assert_allclose(one["layers"]["up"][0], stacked["layers"]["up"][index], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "muon"])
def test_moments_may_be_bfloat16(name):
    optimizer = build_optimizer(dataclasses.replace(config(name), moment_dtype="bfloat16"), optax.constant_schedule(RATE), KINDS)
    moments = [leaf for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, model())) if leaf.shape == (3, 4, 6)]
    assert any(leaf.dtype == jnp.bfloat16 for leaf in moments)


@pytest.mark.parametrize("name", ["rmsprop", "adafactor", "schedule_free_adamw", "optax.adam"])
def test_moments_that_cannot_be_bfloat16_are_an_error(name):
    with pytest.raises(
        ValueError, match=f"moment_dtype = 'bfloat16': {name} keeps its moments as they are; .* adamw, adam, lion"
    ):
        config(name, moment_dtype="bfloat16")


def test_schedule_free_wants_no_decay_of_the_rate():
    with pytest.raises(ValueError, match=r"schedule.name = 'cosine': schedule_free_adamw averages .*; expected 'constant'"):
        OptimizerConfig(name="schedule_free_adamw")


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_goes_downhill(name):
    params = {"layers": {"up": normal(0, 2, 8, 8)}, "bias": np.ones(8, np.float32)}

    def loss(tree):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))

    optimizer = build_optimizer(config(name), optax.constant_schedule(0.01), KINDS)
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
    (update,) = updates(
        config("tests.unit.trainers.optim.test_optimizers:plain_sgd"), {"w": jnp.zeros(())}, {"w": jnp.array(2.0)}
    )
    assert float(update["w"]) == pytest.approx(-RATE * 2)


def test_any_factory_of_optax_takes_arguments_and_the_schedule():
    settings = config("optax.adamw", arguments={"b1": B1, "b2": B2, "eps": EPS, "weight_decay": DECAY})
    rates = [0.1, 0.2, 0.3]
    start, gradients, (got, _) = three_steps(settings, lambda step: jnp.asarray(rates)[step])
    for leaf in TREE:
        want = by_adamw(start[leaf].astype(np.float64), [g[leaf] for g in gradients], DECAY, rates)
        np.testing.assert_allclose(got[leaf], want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("optax.adamw", {"beta": 1}, "optimizer.arguments.beta: optax.adamw has no such argument; expected among b1, b2,"),
        ("optax.adamw", {"learning_rate": 1}, "optimizer.arguments.learning_rate: it is optimizer.learning_rate; leave it out"),
        ("optax.adammw", {}, "has no such function; did you mean .*optax.adamw"),
        ("optax.scale_by_adam", {}, "it takes no learning_rate; expected a function of optax that does"),
    ],
)
def test_what_optax_does_not_have_is_named(name, arguments, message):
    with pytest.raises(UsageError, match=message):
        build_optimizer(config(name, arguments=arguments), optax.constant_schedule(RATE), {})


def test_arguments_are_for_optax_alone():
    with pytest.raises(ValueError, match=r"arguments = .*: they are for a name of the form optax.<factory>, and name is 'adamw'"):
        config("adamw", arguments={"b1": 0.9})


def test_an_unknown_name_is_an_error_with_a_suggestion():
    with pytest.raises(UsageError) as error:
        build_optimizer(config("AdamX"), optax.constant_schedule(RATE), {})
    assert str(error.value) == (
        "optimizer.name = 'AdamX': expected one of adamw, adam, lion, sgd, rmsprop, adafactor, muon, schedule_free_adamw, "
        "or package.module:function; did you mean adam?"
    )


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_gradients_are_scaled_down_to_the_greatest_norm_and_never_up():
    gradients = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
    norm = optax.tree.norm(gradients)
    for max_norm in (None, 5.0, 7.0):
        assert jax.tree.map(np.asarray, clip(gradients, norm, max_norm))["a"].tolist() == [3.0, 0.0]
    clipped = clip(gradients, norm, 0.5)
    np.testing.assert_allclose(clipped["a"], [0.3, 0.0], rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], [0.4], rtol=1e-6)
