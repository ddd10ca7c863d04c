"""Activation checkpointing: less memory in the compiled program, and the same numbers up to rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trainers.config import ModelConfig
from trainers.config.model import AUTO, REMAT
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


def test_every_policy_of_the_settings_is_known():
    for policy in REMAT:
        assert remat.wrap(jnp.sin, policy)(1.0) == jnp.sin(1.0)


def test_an_unknown_policy_is_an_error_of_the_configuration():
    expected = f"expected one of {', '.join((*REMAT, AUTO))}; did you mean dots_saveable"
    with pytest.raises(ValueError, match=f"remat = 'dots_savable': {expected}"):
        ModelConfig(remat="dots_savable")


@pytest.mark.parametrize(
    ("name", "ours"), [("minimal", "dots_with_no_batch_dims_saveable"), ("save_out_proj", "save_dot_except_mlp")]
)
def test_a_policy_of_maxtext_that_has_another_name_here_is_told(name, ours):
    with pytest.raises(ValueError, match=f"remat = '{name}': .*; did you mean {ours}\\?"):
        ModelConfig(remat=name)


def kept(policy):
    """What the forward pass of two layers keeps of each layer for the backward pass, as (memory, channels) beside the weights."""
    config = ModelConfig(vocab_size=50, width=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=96, remat=policy)
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))

    def residuals(params):
        return jax.tree.leaves(jax.vjp(lambda params: nnx.merge(graph, params)(TOKENS), params)[1])

    avals = [var.aval for var in jax.make_jaxpr(residuals)(params).jaxpr.outvars]
    tokens = TOKENS.size
    return sorted((a.memory_space.name, a.shape[2]) for a in avals if a.ndim == 3 and a.shape[:2] == (2, tokens))


def test_a_policy_keeps_what_its_name_says():
    x, query, key, value, out, gate, up = [("Device", size) for size in (32, 32, 16, 16, 32, 96, 96)]
    assert kept("full") == [x]
    assert kept("save_qkv_proj") == sorted([x, query, key, value])
    assert kept("save_dot_except_mlp") == sorted([x, query, key, value, out])
    # The last product of a layer is only added to what it has read: nothing needs it again.
    assert kept("dots_with_no_batch_dims_saveable") == sorted([x, query, key, value, out, gate, up])
    assert kept("qkv_proj_offloaded") == sorted([x, *(("Host", size) for _, size in (query, key, value))])
    assert kept("minimal_offloaded") == sorted([x, *(("Host", size) for _, size in (query, key, value, out, gate, up))])
