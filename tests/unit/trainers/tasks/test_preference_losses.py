"""The losses of preferences on fixed numbers, against their formulas in float64, written a second time."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import ROOT
from trainers.config import PreferenceConfig
from trainers.tasks.completions import Completions
from trainers.tasks.preference import pair_losses

POLICY = np.array([[-12.0, -15.5], [-30.25, -20.0], [-3.5, -9.0], [-7.0, -7.5]])
REFERENCE = np.array([[-14.0, -14.5], [-28.0, -22.0], [-3.0, -8.0], [-7.5, -7.5]])
COUNTS = np.array([[6, 8], [20, 10], [2, 6], [5, 5]], np.float64)


def log_sigmoid(x):
    return -np.logaddexp(0.0, -x)


def dpo(policy, beta, smoothing=0.0):
    h = beta * ((policy - REFERENCE)[:, 0] - (policy - REFERENCE)[:, 1])
    return -(1 - smoothing) * log_sigmoid(h) - smoothing * log_sigmoid(-h)


def ipo(policy, beta):
    means = (policy - REFERENCE) / COUNTS
    return (means[:, 0] - means[:, 1] - 0.5 / beta) ** 2


def orpo(policy, beta):
    p = np.exp(policy / COUNTS)
    odds = p / (1 - p)
    return -np.log(p[:, 0]) - beta * log_sigmoid(np.log(odds[:, 0] / odds[:, 1]))


def simpo(policy, beta, gamma=0.5, smoothing=0.0):
    means = beta * policy / COUNTS
    margin = means[:, 0] - means[:, 1] - gamma
    return -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)


CASES = [
    (PreferenceConfig(), lambda policy: dpo(policy, 0.1)),
    (PreferenceConfig(loss="dpo", beta=0.5, label_smoothing=0.2), lambda policy: dpo(policy, 0.5, 0.2)),
    (PreferenceConfig(loss="ipo", beta=0.3), lambda policy: ipo(policy, 0.3)),
    (PreferenceConfig(loss="orpo", beta=0.4), lambda policy: orpo(policy, 0.4)),
    (PreferenceConfig(loss="simpo", beta=2.0), lambda policy: simpo(policy, 2.0)),
    (PreferenceConfig(loss="simpo", beta=2.0, gamma=1.5, label_smoothing=0.1), lambda policy: simpo(policy, 2.0, 1.5, 0.1)),
]


def computed(config, policy):
    counts = jnp.asarray(COUNTS, jnp.float32)
    reference = Completions(jnp.asarray(REFERENCE, jnp.float32), counts) if config.has_reference else None
    return pair_losses(config, Completions(policy, counts), reference)


@pytest.mark.parametrize(("config", "formula"), CASES)
def test_losses_and_gradients_are_those_of_the_formulas(config, formula):
    policy = jnp.asarray(POLICY, jnp.float32)
    losses, _ = computed(config, policy)
    np.testing.assert_allclose(losses, formula(POLICY), rtol=1e-5)
    gradient = jax.grad(lambda policy: jnp.sum(computed(config, policy)[0]))(policy)
    np.testing.assert_allclose(gradient, central_differences(formula), rtol=1e-4, atol=1e-6)


FROM_TRL = json.loads((ROOT / "tests" / "unit" / "data" / "preference_losses.json").read_text())


@pytest.mark.parametrize("case", FROM_TRL["cases"], ids=lambda case: str(case["preference"]))
def test_losses_and_gradients_are_those_of_trl(case):
    """Of its own lines, run once on these numbers."""
    assert (FROM_TRL["policy"], FROM_TRL["reference"], FROM_TRL["num_targets"]) == tuple(
        numbers.tolist() for numbers in (POLICY, REFERENCE, COUNTS)
    )
    config, policy = PreferenceConfig(**case["preference"]), jnp.asarray(POLICY, jnp.float32)
    np.testing.assert_allclose(computed(config, policy)[0], case["losses"], rtol=1e-5)
    gradient = jax.grad(lambda policy: jnp.sum(computed(config, policy)[0]))(policy)
    np.testing.assert_allclose(gradient, case["gradient"], rtol=1e-5, atol=1e-7)


def central_differences(formula, step=1e-5):
    gradient = np.zeros_like(POLICY)
    for place in np.ndindex(POLICY.shape):
        change = np.zeros_like(POLICY)
        change[place] = step
        gradient[place] = np.sum(formula(POLICY + change) - formula(POLICY - change)) / (2 * step)
    return gradient


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (PreferenceConfig(beta=0.5), 0.5 * (POLICY - REFERENCE)),
        (PreferenceConfig(loss="ipo", beta=0.5), 0.5 * (POLICY - REFERENCE) / COUNTS),
        (PreferenceConfig(loss="orpo", beta=0.5), 0.5 * POLICY / COUNTS),
        (PreferenceConfig(loss="simpo", beta=0.5), 0.5 * POLICY / COUNTS),
    ],
)
def test_rewards_are_what_is_compared_times_beta(config, expected):
    _, rewards = computed(config, jnp.asarray(POLICY, jnp.float32))
    np.testing.assert_allclose(rewards, expected, rtol=1e-5, atol=1e-7)


def test_a_completion_that_is_certain_has_finite_odds():
    config, counts = PreferenceConfig(loss="orpo"), jnp.ones((1, 2))
    loss, gradient = jax.value_and_grad(lambda policy: pair_losses(config, Completions(policy, counts), None)[0][0])(
        jnp.array([[0.0, -1.0]])
    )
    assert np.isfinite(loss)
    assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"beta": 0.0}, r"beta = 0\.0: expected more than 0"),
        ({"label_smoothing": 0.5}, r"label_smoothing = 0\.5: expected 0 <= label_smoothing < 0\.5"),
        ({"loss": "ipo", "label_smoothing": 0.1}, r"label_smoothing = 0\.1: the loss ipo has none"),
        ({"gamma": 1.0}, r"gamma = 1\.0: the loss dpo has none"),
        ({"loss": "orpo", "reference": "frozen"}, "reference = 'frozen': the loss orpo needs no reference"),
    ],
)
def test_settings_that_have_no_meaning_are_errors(settings, error):
    with pytest.raises(ValueError, match=error):
        PreferenceConfig(**settings)
