"""A recipe for labels of single frames, as for speech: the examples have different lengths, and each frame is a target."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from trainers.base import BaseTrainer
from trainers.data.collate import CollateInfo
from trainers.protocol import Loss, Sum

NUM_FEATURES, NUM_LABELS, MAX_FRAMES = 8, 5, 24


def frames(arguments):
    rng, mixing = np.random.default_rng(1), np.random.default_rng(2).normal(size=(NUM_LABELS, NUM_FEATURES))
    examples = []
    for length in rng.integers(4, MAX_FRAMES + 1, size=1100):
        labels = np.repeat(rng.integers(NUM_LABELS, size=length), 3)[:length]  # a sound lasts for a few frames
        features = mixing[labels] + 0.5 * rng.normal(size=(length, NUM_FEATURES))
        examples.append({"features": features.astype(np.float32), "labels": labels.astype(np.int32)})
    return examples[:1000], examples[1000:]  # the training reader, the validation reader


class Tagger(nnx.Module):
    def __init__(self, width, rngs):
        self.convolution = nnx.Conv(NUM_FEATURES, width, kernel_size=5, rngs=rngs)
        self.projection = nnx.Linear(width, NUM_LABELS, rngs=rngs)

    def __call__(self, features):
        return self.projection(jax.nn.gelu(self.convolution(features)))


class TaggingUnit:
    """The train unit, and the evaluation unit: both have the same criterion here."""

    tokens_per_example = MAX_FRAMES

    def __init__(self, arguments):
        self.arguments = arguments

    def build_model(self, rngs):
        return Tagger(self.arguments.model.width, rngs)

    def loss(self, model, batch):
        logits = model(batch["features"])
        is_target = batch["is_frame"] * batch["weight"][:, None]
        targets = optax.smooth_labels(jax.nn.one_hot(batch["labels"], NUM_LABELS), self.arguments.loss.label_smoothing)
        num_targets = jnp.sum(is_target)
        errors = jnp.sum((jnp.argmax(logits, -1) != batch["labels"]) * is_target)
        metrics = {"error": (errors, num_targets), "total_frames": Sum(num_targets)}
        return Loss(jnp.sum(optax.softmax_cross_entropy(logits, targets) * is_target), num_targets, metrics)

    def flops_per_token(self, num_parameters):
        return 6.0 * num_parameters


class Recipe(BaseTrainer):
    def build_data_collate_info(self):
        return {"features": CollateInfo(MAX_FRAMES, mask="is_frame"), "labels": CollateInfo(MAX_FRAMES)}
