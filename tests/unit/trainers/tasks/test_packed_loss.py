"""The loss of packed rows is that of their documents, each in a row of its own."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from gangway.errors import UsageError
from tests.programs.packed import InMemory
from trainers.config import DataConfig, LossConfig, ModelConfig
from trainers.config.arguments import TrainingArguments
from trainers.data.collate import stack
from trainers.data.sources.packed import rows_of
from trainers.tasks import cross_entropy
from trainers.tasks.causal_lm import CausalLMTask, packing_of

LENGTH = 16
LENGTHS = {"fit": [3, 9, 2, 14, 6, 17, 5, 11, 4], "concat": [17, 8, 8, 3, 13, 2, 14]}
"""Of `concat`: each window ends where a document ends, for what a border has cut off does not see what came before."""
MODEL = ModelConfig(width=16, num_layers=1, num_heads=2, num_kv_heads=1, mlp_width=24)
EXPERTS = {"family": "mixtral", "num_experts": 4, "experts_per_token": 2}


def task_of(loss=None, **model):
    made = dataclasses.replace(MODEL, **model)
    return CausalLMTask(TrainingArguments(name="t", max_num_steps=1, model=made, loss=loss or LossConfig()))


def rows(lengths, packing):
    data = DataConfig(sequence_length=LENGTH, eval_fraction=0.0, packing=packing, shuffle=False)
    made, _ = rows_of([InMemory(lengths)], TrainingArguments(name="t", max_num_steps=1, data=data))
    return [made[index] for index in range(len(made))]


def batch_of(rows):
    return stack(rows, [True] * len(rows))


def loss_and_gradients(task, batch):
    graph, shapes = nnx.split(nnx.eval_shape(lambda: task.build_model(nnx.Rngs(0))))
    numbers = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: 0.2 * numbers.standard_normal(leaf.shape, np.float32), shapes)

    def loss_sum(params):
        loss = task.loss(nnx.merge(graph, params), batch)
        return loss.loss_sum, loss

    (_, loss), gradients = jax.jit(jax.value_and_grad(loss_sum, has_aux=True))(params)
    return loss, jax.tree.leaves(gradients)


@pytest.mark.parametrize(
    ("model", "loss", "max_logits"),
    [
        ({}, LossConfig(), None),
        ({"family": "mistral", "window": 5, "attention": "blockwise"}, LossConfig(z_loss_weight=1e-3), 300),
        ({"family": "gpt2", "num_positions": LENGTH, "num_kv_heads": 2}, LossConfig(), None),
        (EXPERTS, LossConfig(load_balancing_weight=0.01, router_z_loss_weight=0.01), None),
    ],
    ids=["dense", "blockwise-in-parts", "positions", "experts"],
)
@pytest.mark.slow("compiles several steps")
def test_packed_loss_and_gradients_are_those_of_each_document_alone(monkeypatch, model, loss, max_logits):
    if max_logits is not None:
        monkeypatch.setattr(cross_entropy, "MAX_LOGITS", max_logits)
    task = task_of(loss, **model)
    packed = batch_of([row for packing, lengths in LENGTHS.items() for row in rows(lengths, packing)])
    alone = batch_of([row for lengths in LENGTHS.values() for row in rows(lengths, None)])
    assert len(packed["tokens"]) < len(alone["tokens"])
    (found, gradients), (expected, expected_gradients) = (loss_and_gradients(task, batch) for batch in (packed, alone))
    assert float(found.num_targets) == float(expected.num_targets) > 0
    np.testing.assert_allclose(found.loss_sum, expected.loss_sum, rtol=1e-5)
    for name, (value, _) in expected.parts.items():
        np.testing.assert_allclose(found.parts[name][0], value, rtol=1e-5, err_msg=name)
    # Some gradients are zero but for rounding, such as that of the bias of the keys.
    largest = max(float(np.abs(gradient).max()) for gradient in expected_gradients)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6 * largest)


def test_a_row_of_padding_and_a_token_of_a_prompt_are_no_targets():
    task, batch = task_of(), batch_of(rows(LENGTHS["fit"], "fit"))
    documents = InMemory(LENGTHS["fit"])
    expected = sum(float(np.ones(length)[1:].sum()) for length in documents.lengths)
    prompts = sum(max(0, length // 2 - 1) for index, length in enumerate(documents.lengths) if index % 3 == 0)
    loss, _ = loss_and_gradients(task, batch)
    assert float(loss.num_targets) == expected - prompts
    half = {**batch, "weight": np.arange(len(batch["weight"])) % 2 * np.float32(1)}
    assert float(loss_and_gradients(task, half)[0].num_targets) == float(np.sum(loss.rows[1][1::2]))


def test_filling_is_no_target_whatever_the_weights_of_its_tokens():
    task, batch = task_of(), batch_of(rows(LENGTHS["fit"], "fit"))
    batch["token_weight"] = np.ones_like(batch["token_weight"])
    loss, _ = loss_and_gradients(task, batch)
    assert float(loss.num_targets) == sum(length - 1 for length in LENGTHS["fit"])


class Logits(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(jax.numpy.zeros((256, 256)))

    def __call__(self, tokens):
        return self.table[...][tokens]


class LogitsTask(CausalLMTask):
    def build_model(self, rngs):
        return Logits(rngs)


def test_a_model_that_cannot_keep_documents_apart_is_refused():
    task = LogitsTask(task_of().arguments)
    with pytest.raises(UsageError, match=r"the rows are packed .* and Logits cannot keep their documents apart"):
        loss_and_gradients(task, batch_of(rows(LENGTHS["fit"], "fit")))


def test_packed_rows_without_the_positions_of_their_tokens_are_refused():
    with pytest.raises(UsageError, match=r"a leaf `segments` and no `positions`: expected both"):
        packing_of({"tokens": np.ones((1, 4), np.int32), "segments": np.ones((1, 4), np.int32)})
