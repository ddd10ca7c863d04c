"""Gradients are scaled to the largest norm that is allowed, however small it is."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from trainers.step.train_step import clip


@pytest.mark.parametrize(("norm", "max_norm", "factor"), [(0.1, 0.05, 0.5), (8.0, 2.0, 0.25), (0.1, 0.2, 1.0), (0.0, 1.0, 1.0)])
def test_a_norm_above_the_limit_is_scaled_to_it(norm, max_norm, factor):
    gradients = {"w": jnp.array([0.75, -1.0], jnp.bfloat16)}
    clipped = clip(gradients, jnp.float32(norm), max_norm)["w"]
    assert clipped.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(clipped, np.float32), factor * np.array([0.75, -1.0]), rtol=1e-2)


def test_without_a_limit_nothing_is_scaled():
    gradients = {"w": jnp.ones(2)}
    assert clip(gradients, jnp.float32(9.0), None) is gradients
