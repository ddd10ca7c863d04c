"""A small classifier with batch normalization and dropout, on vectors made from numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from trainers.config.arguments import TrainingArguments
from trainers.protocol import PerExample

WIDTH, LABELS = 6, 3
MOMENTUM = 0.9


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.3):
        self.inner = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=MOMENTUM, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.late_dropout = nnx.Dropout(rate, rngs=rngs)
        self.out = nnx.Linear(16, LABELS, rngs=rngs)

    def __call__(self, x):
        return self.out(self.late_dropout(jnp.tanh(self.dropout(self.norm(self.inner(x))))))


class NormedTask:
    tokens_per_example = 1

    def __init__(self, arguments: TrainingArguments):
        self.arguments = arguments

    def build_model(self, rngs):
        return Normed(rngs)

    def loss(self, model, batch):
        logits = model(batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return PerExample(losses, {"accuracy": jnp.argmax(logits, -1) == batch["label"]})

    def flops_per_token(self, num_parameters):
        return 6.0 * num_parameters


def vector(number):
    return (3 * np.sin(np.arange(1, WIDTH + 1) * (number + 1)) + 1).astype(np.float32)


class Vectors:
    """Example i is a vector that i decides, and its label."""

    takes_any_index = True

    def __init__(self, num_examples: int):
        self.num_examples = num_examples

    def __len__(self):
        return self.num_examples

    def __getitem__(self, index):
        sample = index % self.num_examples
        x = vector(sample)
        return {"x": x, "label": np.int32(np.argmax(x[:LABELS])), "sample_id": np.int32(sample)}


def vectors(arguments: TrainingArguments):
    return Vectors(96), Vectors(21)


def settings(**changes):
    """Of 27 rows, which eight devices cannot share evenly, nor four the nine of three micro-batches."""
    return {
        "name": "run",
        "task": "tests.programs.normed:NormedTask",
        "data": {"dataset": "tests.programs.normed:vectors"},
        "global_batch_size": 27,
        "max_num_steps": 6,
        "publish_every_steps": 1,
        "optimizer": {"name": "adamw", "learning_rate": 0.01, "schedule": {"name": "constant"}},
        **changes,
    }


def real_rows(batch_index, global_batch_size=27):
    start = batch_index * global_batch_size
    return np.stack([vector((start + row) % 96) for row in range(global_batch_size)])


def running_statistics(inner, stretches):
    """What `nnx.BatchNorm` keeps of the rows [n, WIDTH] of each micro-batch in order, computed in NumPy. `inner` is the layer
    before it, which must not have changed meanwhile."""
    kernel, bias = (np.asarray(jax.device_get(inner[name]), np.float64) for name in ("kernel", "bias"))
    mean, var = np.zeros(16), np.ones(16)
    for rows in stretches:
        values = rows @ kernel + bias
        mean = MOMENTUM * mean + (1 - MOMENTUM) * values.mean(0)
        var = MOMENTUM * var + (1 - MOMENTUM) * values.var(0)
    return mean, var
