"""The smallest task that has everything: a table of bytes to logits, on random-access data made from numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from trainers.config.arguments import TrainingArguments
from trainers.protocol import Loss


class Table(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (256, width)) * 0.1)
        self.out = nnx.Param(jax.random.normal(rngs.params(), (width, 256)) * 0.1)

    def __call__(self, tokens):
        return jnp.tanh(self.embed[...][tokens]) @ self.out[...]


class TableTask:
    def __init__(self, arguments: TrainingArguments):
        self.arguments = arguments

    def build_model(self, rngs):
        return Table(16, rngs)

    def loss(self, model, batch):
        logits = model(batch["tokens"][:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
        weight = batch["weight"][:, None] * jnp.ones_like(losses)
        hits = (jnp.argmax(logits, -1) == batch["tokens"][:, 1:]) * weight
        return Loss(jnp.sum(losses * weight), jnp.sum(weight), {"accuracy": (jnp.sum(hits), jnp.sum(weight))})

    @property
    def tokens_per_example(self):
        return self.arguments.data.sequence_length

    def flops_per_token(self, num_parameters):
        return 6.0 * num_parameters


class Numbers:
    """Example i is a short arithmetic progression: learnable, and every example tells its id."""

    takes_any_index = True

    def __init__(self, num_examples: int, length: int):
        self.num_examples, self.length = num_examples, length

    def __len__(self):
        return self.num_examples

    def __getitem__(self, index):
        sample = index % self.num_examples
        tokens = (sample * 7 + np.arange(self.length + 1) * (1 + sample % 3)) % 256
        return {"tokens": tokens.astype(np.int32), "sample_id": np.int32(sample)}


def numbers(arguments: TrainingArguments):
    return Numbers(96, arguments.data.sequence_length), Numbers(21, arguments.data.sequence_length)
