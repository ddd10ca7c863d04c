"""Adapters in a model: the decoder with its cache and with checkpointing, `nnx.Linear`, dropout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gangway.errors import UsageError
from trainers.config import LoraConfig, ModelConfig
from trainers.models import lora
from trainers.models.decoder import Decoder
from trainers.step import rng
from trainers.step.loss import in_mode

SIZES = {"vocab_size": 32, "width": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 24}
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 6)).astype(np.int32)


def key_of(name):
    return rng.key(0, name, 0)


def adapted(config, remat="none", dtype=jnp.float32):
    """A decoder whose adapters are not 0."""
    model = Decoder(ModelConfig(**SIZES, remat=remat), rngs=nnx.Rngs(0), dtype=dtype)
    return filled(lora.adapt(model, config, key_of))


def filled(model):
    params = nnx.state(model, nnx.Param)
    for number, (_, variable) in enumerate(nnx.to_flat_state(params)):
        variable[...] = 0.3 * jax.random.normal(jax.random.key(number), variable.shape)
    return model


@pytest.mark.slow("compiles a model several times")
def test_the_decoder_with_a_cache_says_what_it_says_without():
    model = adapted(LoraConfig(rank=2))

    @jax.jit
    def both():
        logits = model(TOKENS)
        cache, time = model.init_cache(2, 6), TOKENS.shape[1]
        positions = jnp.broadcast_to(jnp.arange(time), (2, time))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((time, time), bool)), (2, time, time))
        return logits[:, -1], model.decode_step(TOKENS, positions, mask, cache, 0)[0]

    whole, cached = both()
    np.testing.assert_allclose(whole, cached, rtol=1e-5, atol=1e-5)
    plain = Decoder(ModelConfig(**SIZES), rngs=nnx.Rngs(0))
    assert np.abs(jax.jit(lambda: plain(TOKENS)[:, -1])() - whole).max() > 0.1


@pytest.mark.slow("compiles a model several times")
def test_with_checkpointing_the_gradients_are_the_same():
    """Also with dropout: the same values are dropped when activations are computed again."""

    def gradients(remat):
        model = in_mode(adapted(LoraConfig(rank=2, dropout=0.5), remat), training=True)
        graph, params, others = nnx.split(model, nnx.Param, ...)

        def loss(params, others):
            others = jax.tree.map(lambda leaf: leaf, others)  # drawing changes its variables, which belong to the trace
            return jnp.mean(jax.nn.logsumexp(nnx.merge(graph, params, others)(TOKENS), -1) ** 2)

        return nnx.to_pure_dict(jax.jit(jax.grad(loss))(params, others))

    plain, again = gradients("none"), gradients("full")
    assert set(plain["layers"]) == {f"{name}_lora_{end}" for name in lora.Layers.LINEAR for end in "ab"}
    for name, value in plain["layers"].items():
        np.testing.assert_allclose(again["layers"][name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_dropout_is_that_of_the_adapters_inputs_and_differs_by_name_and_key():
    x, weights = jnp.ones((64, 16)), {lora.KEEP: jnp.float32(0.75)}
    names = ("query", "value")
    for name in names:
        # With A the identity the output is the input that was kept.
        weights |= {f"{name}{lora.A}": jnp.eye(16), f"{name}{lora.B}": jnp.eye(16)}
    zeros = jnp.zeros((64, 16))

    def outputs(key):
        return [np.asarray(lora.added(zeros, x, {**weights, lora.KEY: key}, name)) for name in names]

    query, value = outputs(jax.random.key(1))
    assert set(np.unique(query)) == {0.0, np.float32(1 / 0.75)}
    assert np.mean(query == 0) == pytest.approx(0.25, abs=0.05)
    assert not np.array_equal(query, value)
    assert not np.array_equal(query, outputs(jax.random.key(2))[0])
    np.testing.assert_array_equal(query, outputs(jax.random.key(1))[0])


@pytest.mark.slow("compiles a model several times")
def test_dropout_is_off_in_evaluations_and_each_layer_has_its_own():
    model = adapted(LoraConfig(rank=2, dropout=0.5))
    assert lora.noise(in_mode(model, training=False).layers) == {}
    keys = lora.noise(in_mode(model, training=True).layers)[lora.KEY]
    assert not np.array_equal(*jax.random.key_data(keys))


def test_the_scale_is_alpha_over_rank():
    model = adapted(LoraConfig(rank=2, alpha=3.0, targets=("up",)))
    weights, b = lora.scaled(model.layers), model.layers.up_lora_b
    np.testing.assert_array_equal(weights["up_lora_b"], 1.5 * b[...])


class Perceptron(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.tied = self.second.bias

    def __call__(self, x):
        return self.second(jax.nn.relu(self.first(x)))


def test_a_linear_layer_of_ones_own_model_is_adapted():
    config, x = LoraConfig(rank=2, alpha=4.0, targets=(r"first\.kernel",)), jnp.ones((5, 6))
    plain = Perceptron(nnx.Rngs(0))
    model = lora.adapt(Perceptron(nnx.Rngs(0)), config, key_of)
    assert {".".join(path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))} == {
        "first.kernel_lora_a",
        "first.kernel_lora_b",
    }
    np.testing.assert_array_equal(model(x), plain(x))
    filled(model)
    merged = lora.merged(
        "first.kernel",
        np.asarray(plain.first.kernel[...]),
        {f"first.kernel_lora_{end}": np.asarray(getattr(model.first, f"kernel_lora_{end}")[...]) for end in "ab"},
        config,
    )
    plain.first.kernel[...] = jnp.asarray(merged)
    np.testing.assert_allclose(model(x), plain(x), rtol=1e-5, atol=1e-5)
    assert model.tied is model.second.bias


def test_dropout_of_a_linear_layer_follows_the_mode():
    model = filled(lora.adapt(Perceptron(nnx.Rngs(0)), LoraConfig(rank=2, dropout=0.5), key_of))
    x = jnp.ones((5, 6))
    model.train()
    noisy = np.asarray(model(x))
    model.eval()
    np.testing.assert_array_equal(model(x), model(x))
    assert not np.array_equal(noisy, model(x))


def test_a_model_with_other_state_or_without_linear_weights_is_refused():
    class Normed(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.linear = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

    class Table(nnx.Module):
        def __init__(self):
            self.table = nnx.Param(jnp.zeros((4, 4)))

    with pytest.raises(UsageError, match=r"lora: the model has state beside its parameters \(norm\.mean, norm\.var\)"):
        lora.adapt(Normed(nnx.Rngs(0)), LoraConfig(rank=2), key_of)
    with pytest.raises(UsageError, match="lora: the model has no linear weights that can be adapted; its parameters are table"):
        lora.adapt(Table(), LoraConfig(rank=2), key_of)
