"""The losses of tokens, with all logits at once and in parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainers.config import LossConfig
from trainers.models.decoder import Hidden
from trainers.tasks import cross_entropy

ROWS, TIME, WIDTH, VOCAB = 3, 12, 8, 40
EVERYTHING = LossConfig(label_smoothing=0.1, z_loss_weight=1e-2)


@pytest.fixture(scope="module")
def given():
    draw = np.random.default_rng(1)
    hidden = draw.standard_normal((ROWS, TIME, WIDTH), np.float32)
    table = draw.standard_normal((WIDTH, VOCAB), np.float32)
    return hidden, table, draw.integers(0, VOCAB, (ROWS, TIME), np.int32)


def test_losses_and_hits_are_those_of_the_logits(given):
    hidden, table, targets = given
    targets = targets.copy()
    logits = hidden @ table
    targets[:, ::2] = logits.argmax(-1)[:, ::2]
    losses, hits, z_losses = cross_entropy.from_logits(jnp.asarray(logits), jnp.asarray(targets), LossConfig())
    expected = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), jnp.asarray(targets))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_array_equal(hits, logits.argmax(-1) == targets)
    assert 0.5 <= float(np.mean(hits)) < 1
    assert not np.any(z_losses)


def test_the_z_loss_is_the_weighted_square_of_log_z(given):
    hidden, table, targets = given
    logits = jnp.asarray(hidden @ table)
    plain = cross_entropy.from_logits(logits, targets, LossConfig())
    with_z = cross_entropy.from_logits(logits, targets, LossConfig(z_loss_weight=0.5))
    np.testing.assert_allclose(with_z.z_losses, 0.5 * np.log(np.exp(hidden @ table).sum(-1)) ** 2, rtol=1e-5)
    np.testing.assert_allclose(with_z.losses, plain.losses + with_z.z_losses, rtol=1e-5)


@pytest.mark.parametrize("config", [LossConfig(), LossConfig(z_loss_weight=0.5), LossConfig(label_smoothing=0.2), EVERYTHING])
def test_the_gradient_is_that_of_the_definition(given, config):
    hidden, table, targets = given
    logits, targets = jnp.asarray(hidden @ table), jnp.asarray(targets)
    scale = jnp.linspace(-1, 2, ROWS * TIME).reshape(ROWS, TIME)

    def defined(logits):
        labels = optax.smooth_labels(jax.nn.one_hot(targets, VOCAB), config.label_smoothing)
        z_losses = config.z_loss_weight * jax.nn.logsumexp(logits, -1) ** 2
        return jnp.sum(scale * (optax.softmax_cross_entropy(logits, labels) + z_losses) + z_losses)

    def ours(logits):
        found = cross_entropy.from_logits(logits, targets, config)
        return jnp.sum(scale * found.losses + found.z_losses)

    value, gradient = jax.value_and_grad(ours)(logits)
    expected, expected_gradient = jax.value_and_grad(defined)(logits)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", [LossConfig(), EVERYTHING])
@pytest.mark.parametrize("num_parts", [2, 3, 5, TIME])
def test_parts_give_what_all_logits_at_once_give(given, num_parts, config, monkeypatch):
    monkeypatch.setattr(cross_entropy, "parts_of", lambda *_: num_parts)

    def total(hidden, table, compute):
        found = compute(hidden, table)
        return jnp.sum(found.losses * jnp.arange(TIME)), found

    def compared(compute):
        return jax.jit(jax.value_and_grad(lambda h, t: total(h, t, compute), (0, 1), has_aux=True))(*given[:2])

    whole = compared(lambda h, t: cross_entropy.from_logits(h @ t, given[2], config))
    parts = compared(lambda h, t: cross_entropy.from_hidden(Hidden(h, t), given[2], config))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), parts, whole)


def test_the_logits_of_a_whole_batch_are_never_in_memory():
    rows, time, width, vocab = 4, 256, 16, 4096
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, time, width), (width, vocab))]
    targets = jnp.zeros((rows, time), jnp.int32)

    def temporary_bytes(max_logits):
        def loss(hidden, table):
            return jnp.sum(cross_entropy.from_hidden(Hidden(hidden, table), targets, LossConfig(), max_logits).losses)

        return jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    all_logits = 4 * rows * time * vocab
    assert temporary_bytes(rows * time * vocab) >= all_logits
    assert temporary_bytes(rows * time * vocab // 32 // jax.device_count()) < all_logits / 4


@pytest.mark.parametrize(
    ("max_logits", "parts"),
    # Each of the devices holds a share of the logits of 6 rows of 12 positions over 10 tokens.
    [(720, 1), (719, 2), (360, 2), (359, 3), (120, 6), (119, 12), (1, 12)],
)
def test_parts_are_as_few_as_the_memory_allows(max_logits, parts, monkeypatch):
    monkeypatch.setattr(cross_entropy, "num_devices", lambda: 1)
    assert cross_entropy.parts_of((6, 12), 10, max_logits) == parts
    monkeypatch.setattr(cross_entropy, "num_devices", lambda: 2)
    assert cross_entropy.parts_of((12, 12), 10, max_logits) == parts
