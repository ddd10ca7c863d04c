"""A classifier of handwritten digits with batch normalization and dropout, on the images that come with scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from trainers.protocol import PerExample

SIDE, LABELS, NUM_TEST = 8, 10, 360


def digits(arguments):
    """Training data and test data: 1797 images with 17 shades of grey, in an order that is always the same."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    pixels = (images[order].reshape(-1, SIDE, SIDE, 1) / 16).astype(np.float32)
    parts = slice(NUM_TEST, None), slice(NUM_TEST)
    return tuple({"pixels": pixels[part], "label": labels[order][part].astype(np.int32)} for part in parts)


class Classifier(nnx.Module):
    def __init__(self, width, rngs):
        self.first = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.first_norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.second = nnx.Conv(width, 2 * width, (3, 3), rngs=rngs)
        self.second_norm = nnx.BatchNorm(2 * width, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(2 * width * (SIDE // 4) ** 2, LABELS, rngs=rngs)

    def __call__(self, pixels):
        """[B, 8, 8, 1] -> [B, 10]"""
        x = nnx.max_pool(jax.nn.relu(self.first_norm(self.first(pixels))), (2, 2), (2, 2))
        x = nnx.max_pool(jax.nn.relu(self.second_norm(self.second(x))), (2, 2), (2, 2))
        return self.out(self.dropout(x.reshape(len(x), -1)))


class DigitsTask:
    tokens_per_example = 1

    def __init__(self, arguments):
        self.arguments = arguments

    def build_model(self, rngs):
        return Classifier(self.arguments.model.width, rngs)

    def loss(self, model, batch):
        logits = model(batch["pixels"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return PerExample(losses, {"accuracy": jnp.argmax(logits, -1) == batch["label"]})

    def flops_per_token(self, num_parameters):
        return 6.0 * num_parameters
