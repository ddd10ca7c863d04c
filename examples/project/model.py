"""The model, and what it learns: the task. Put your own in their place."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from trainers.protocol import PerExample


class Classifier(nnx.Module):
    def __init__(self, width, rngs):
        self.first = nnx.Linear(2, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.out = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, point):
        """[B, 2] -> [B, 2], a number for each label"""
        return self.out(jax.nn.relu(self.second(jax.nn.relu(self.first(3 * point)))))


class SpiralsTask:
    tokens_per_example = 1

    def __init__(self, arguments):
        self.arguments = arguments

    def build_model(self, rngs):
        return Classifier(self.arguments.model.width, rngs)

    def loss(self, model, batch):
        """The loss of each example, and its metrics. The trainer takes the means."""
        numbers = model(batch["point"])
        losses = optax.softmax_cross_entropy_with_integer_labels(numbers, batch["label"])
        return PerExample(losses, {"accuracy": jnp.argmax(numbers, -1) == batch["label"]})

    def flops_per_token(self, num_parameters):
        return 6.0 * num_parameters
