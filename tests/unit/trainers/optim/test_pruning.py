"""Pruning by magnitude: which weights, when, and for good."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.unit.training import FIXED, assert_equal, of, trainer
from trainers.config import PruningConfig
from trainers.optim.pruning import pruning, sparsity
from trainers.planning import estimate

CONFIG = PruningConfig(pattern="out", final_sparsity=0.8, begin_step=2, end_step=10, every_steps=3)


def test_the_part_that_is_zero_follows_the_cubic_law():
    """Zhu & Gupta's equation 1 as they write it, from an initial sparsity of 0."""
    steps = np.arange(14)
    clipped = np.clip(steps, 2, 10)
    want = 0.8 + (0.0 - 0.8) * (1 - (clipped - 2) / (10 - 2)) ** 3
    np.testing.assert_allclose(jax.vmap(lambda step: sparsity(CONFIG, step))(steps), want, atol=1e-6)


def test_the_smallest_weights_go_and_none_comes_back():
    """In NumPy, by sorting; every update tries to bring all weights back."""
    optimizer = pruning(CONFIG, optax.sgd(1.0))
    rng = np.random.default_rng(0)
    params = {"out": jnp.asarray(rng.normal(size=(7, 11)), jnp.float32), "embed": jnp.ones(3)}
    state, zeros = optimizer.init(params), np.zeros(77, bool)
    update = jax.jit(optimizer.update)
    for step in range(1, 13):
        gradients = {"out": jnp.asarray(rng.normal(size=(7, 11)), jnp.float32), "embed": jnp.ones(3)}
        moved = np.asarray(params["out"] - gradients["out"]).ravel()
        if step in (3, 6, 9, 10, 12):  # every third, and the last
            zeros = np.zeros(77, bool)
            zeros[np.argsort(np.abs(moved))[: int(np.float32(sparsity(CONFIG, step)) * 77)]] = True
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(np.asarray(params["out"]).ravel() == 0, zeros)
        np.testing.assert_array_equal(np.asarray(params["out"]).ravel()[~zeros], moved[~zeros])
    assert zeros.sum() == int(0.8 * 77)
    np.testing.assert_array_equal(params["embed"], 1 - 12)


def part_of_zeros(state):
    return float(np.mean(np.asarray(state.params["out"]) == 0))


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 1, "fsdp": 8}])
def test_a_run_prunes_and_resumes_bit_for_bit_amid_it(tmp_path, events, mesh):
    settings = {
        "optimizer": FIXED,
        "mesh": mesh,
        "pruning": {"pattern": "out", "final_sparsity": 0.8, "end_step": 10, "every_steps": 4},
    }
    whole = trainer(tmp_path / "whole", **settings).train()
    half = trainer(tmp_path, max_num_steps=6, **settings).train()
    assert 0.5 < part_of_zeros(half) < part_of_zeros(whole) == pytest.approx(0.8, abs=1e-3)
    assert not np.any(np.asarray(whole.params["embed"]) == 0)
    events.clear()
    resumed = trainer(tmp_path, **settings).train()
    assert of(events, "restored")[0]["step"] == 6
    assert_equal(resumed, whole)


def test_a_pattern_that_is_in_no_name_is_told_before_machines_are_taken(tmp_path):
    made = trainer(tmp_path, pruning={"pattern": "outt"})
    problems, _ = estimate.plan(made.arguments, num_devices=8)
    assert problems == ["pruning.pattern = 'outt': it is in no parameter's name; these are embed, out"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"final_sparsity": 1.0}, "final_sparsity = 1.0: expected 0 < final_sparsity < 1"),
        ({"begin_step": 5, "end_step": 5}, r"end_step = 5: expected more than begin_step \(5\)"),
        ({"pattern": "("}, r"pattern = '\(': expected a regular expression"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        PruningConfig(**settings)


def test_averages_would_undo_it(tmp_path):
    optimizer = {"name": "schedule_free_adamw", "schedule": {"name": "constant"}}
    with pytest.raises(ValueError, match=r"pruning\.pattern = 'out': expected null, for schedule_free_adamw averages zeros away"):
        trainer(tmp_path, optimizer=optimizer, pruning={"pattern": "out"})
