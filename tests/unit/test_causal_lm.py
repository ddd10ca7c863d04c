"""The language-model task: what its loss counts, what it costs, what it generates."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trainers import rng
from trainers.arguments import TrainingArguments
from trainers.errors import UsageError
from trainers.protocol import Task
from trainers.sections import DataConfig, ModelConfig
from trainers.tasks.causal_lm import CausalLMTask, generate

LENGTH = 12


@pytest.fixture(scope="module")
def task():
    model = ModelConfig(width=32, num_layers=2, num_heads=2, num_kv_heads=1, mlp_width=48)
    return CausalLMTask(TrainingArguments(name="t", max_num_steps=1, model=model, data=DataConfig(sequence_length=LENGTH)))


@pytest.fixture(scope="module")
def model(task):
    @nnx.jit
    def build():
        made = task.build_model(nnx.Rngs(rng.key(0, "init", 0)))
        params = nnx.to_pure_dict(nnx.state(made))
        nnx.update(made, jax.tree.map(lambda leaf: leaf + 0.2 * jax.random.normal(jax.random.key(5), leaf.shape), params))
        return made

    return build()


def batch(rows, weight):
    tokens = np.random.default_rng(rows).integers(0, 256, (rows, LENGTH + 1), np.int32)
    return {"tokens": tokens, "weight": np.asarray(weight, np.float32)}


def test_the_loss_is_the_mean_of_minus_log_p_of_each_next_token(task, model):
    rows = batch(3, [1, 1, 1])
    loss = jax.jit(task.loss)(model, rows)
    logits = np.asarray(jax.jit(lambda m, tokens: m(tokens))(model, rows["tokens"][:, :-1]), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets = rows["tokens"][:, 1:]
    expected = -np.take_along_axis(log_p, targets[..., None], -1)
    assert isinstance(task, Task)
    assert float(loss.num_targets) == 3 * LENGTH
    assert float(loss.loss_sum) == pytest.approx(expected.sum(), rel=1e-5)
    hits, weight = loss.parts["accuracy"]
    assert float(hits) == (logits.argmax(-1) == targets).sum()
    assert float(weight) == 3 * LENGTH


def test_padding_rows_count_for_nothing_and_get_no_gradient(task, model):
    rows = batch(4, [1, 0, 1, 0])
    real = {"tokens": rows["tokens"][::2], "weight": np.ones(2, np.float32)}
    graph, params = nnx.split(model)

    @jax.jit
    def loss_and_gradient(params, rows):
        loss = task.loss(nnx.merge(graph, params), rows)
        return loss, jax.grad(lambda p: task.loss(nnx.merge(graph, p), rows).loss_sum)(params)

    padded, alone = loss_and_gradient(params, rows), loss_and_gradient(params, real)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), padded, alone)
    assert float(padded[0].num_targets) == 2 * LENGTH


def test_flops_of_a_token_are_those_of_its_matrix_products(task):
    # Per token, forward: 2 per weight of a matrix, and 2 products of the attended positions (half of T) with width D.
    width, mlp, layers = 32, 48, 2
    weights = layers * (2 * width * width + 2 * width * width // 2 + 3 * width * mlp) + 256 * width
    attention = layers * 2 * 2 * (LENGTH / 2) * width
    assert task.flops_per_token(weights) == 3 * (2 * weights + attention)
    assert task.tokens_per_example == LENGTH
    untied = dataclasses.replace(task.arguments, model=dataclasses.replace(task.arguments.model, tie_embeddings=False))
    assert CausalLMTask(untied).flops_per_token(weights + 256 * width) == task.flops_per_token(weights)


@jax.jit
def likeliest_at_each_place(model, tokens):
    return jnp.argmax(model(tokens[None])[0], -1)


def likeliest_next(model, text):
    tokens = np.zeros(LENGTH, np.int32)
    tokens[: len(text)] = list(text)
    return int(likeliest_at_each_place(model, tokens)[len(text) - 1])


def test_the_likeliest_continuation_is_that_of_the_model_called_token_by_token(model):
    text = list(b"ab")
    new = generate(model, b"ab", 15, temperature=0.0, seed=0, window=LENGTH)
    assert new[:2] == b"ab"
    assert len(new) == 2 + 15
    for token in new[2:]:
        # Past the window, the oldest tokens are forgotten.
        assert token == likeliest_next(model, text[-LENGTH:])
        text.append(token)


def test_a_prompt_longer_than_the_window_is_cut_at_its_start(model):
    prompt = bytes(range(97, 97 + 20))
    token = generate(model, prompt, 15, temperature=0.0, seed=0, window=LENGTH)[20]
    assert token == likeliest_next(model, prompt[-LENGTH:])


def test_sampling_depends_on_the_seed_and_nothing_else(task, model):
    def sample(seed):
        return generate(model, b"def ", 15, temperature=1.0, seed=seed, window=LENGTH)

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert isinstance(task.sample(model, "def ", 15, 1.0, seed=1), str)


def test_samples_follow_the_models_probabilities():
    class Coin(nnx.Module):
        def __call__(self, tokens):
            probabilities = jnp.full(256, 1e-9).at[:2].set(jnp.array([0.2, 0.8]))
            return jnp.broadcast_to(jnp.log(probabilities), (*tokens.shape, 256))

    ones = sum(generate(Coin(), b"x", 2000, temperature=1.0, seed=0, window=4)[1:]) / 2000
    assert ones == pytest.approx(0.8, abs=0.04)
    colder = sum(generate(Coin(), b"x", 2000, temperature=0.5, seed=0, window=4)[1:]) / 2000
    assert colder == pytest.approx(0.8**2 / (0.8**2 + 0.2**2), abs=0.03)


def test_an_empty_prompt_is_an_error(task, model):
    with pytest.raises(UsageError, match=r"sample\.prompt is empty: expected at least one character to continue from"):
        task.sample(model, "", 3, 1.0, seed=0)
