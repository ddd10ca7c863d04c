"""Activation checkpointing: less memory in the compiled program, and the same numbers up to rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trainers.config import ModelConfig
from trainers.config.model import REMAT
from trainers.models import remat
from trainers.models.decoder import Decoder

TOKENS = np.random.default_rng(0).integers(0, 50, (4, 64), np.int32)


def compiled(policy, num_layers):
    """(The compiled gradient of a loss, its parameters.) Without checkpointing up to four layers are unrolled."""
    config = ModelConfig(vocab_size=50, width=32, num_layers=num_layers, num_heads=4, num_kv_heads=2, mlp_width=96, remat=policy)
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))

    def loss(params):
        return jnp.mean(jax.nn.logsumexp(nnx.merge(graph, params)(TOKENS), -1) ** 2)

    return jax.jit(jax.value_and_grad(loss)).lower(params).compile(), params


@pytest.mark.parametrize("num_layers", [4, 6])
@pytest.mark.slow("compiles a model several times")
def test_it_needs_less_memory_and_changes_no_number(num_layers):
    plain, params = compiled("none", num_layers)
    loss, gradients = plain(params)
    temporaries = {"none": plain.memory_analysis().temp_size_in_bytes}
    for policy in REMAT[1:]:
        program, _ = compiled(policy, num_layers)
        temporaries[policy] = program.memory_analysis().temp_size_in_bytes
        again, gradients_again = program(params)
        np.testing.assert_allclose(again, loss, rtol=1e-6)
        for one, other in zip(*map(jax.tree.leaves, (gradients, gradients_again)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)
    assert temporaries["full"] < 0.7 * temporaries["none"]
    assert temporaries["full"] < temporaries["dots_saveable"] < temporaries["none"]


def test_every_policy_of_the_settings_is_one_of_jax():
    for policy in REMAT:
        assert remat.wrap(jnp.sin, policy)(1.0) == jnp.sin(1.0)


def test_an_unknown_policy_is_an_error_of_the_configuration():
    expected = "expected one of none, full, dots_saveable, dots_with_no_batch_dims_saveable; did you mean dots_saveable"
    with pytest.raises(ValueError, match=f"remat = 'dots_savable': {expected}"):
        ModelConfig(remat="dots_savable")
