"""The task of saying which of some classes an image is of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from trainers.config.arguments import TrainingArguments
from trainers.models.encoder import Encoder, classifier
from trainers.protocol import Batch, PerExample


class ImageClassificationTask:
    """Classifies images by the encoder of the section `vision`. `batch` is {"image": float[B, height, width, colours], "label":
    int32[B]}."""

    def __init__(self, arguments: TrainingArguments):
        self.arguments = arguments
        self.config = classifier(arguments.vision)

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        return Encoder(self.config, rngs=rngs, dtype=self.arguments.dtype, param_dtype=self.arguments.param_dtype)

    def loss(self, model: Encoder, batch: Batch) -> PerExample:
        logits, labels = model(batch["image"]), batch["label"]
        targets = jax.nn.one_hot(labels, logits.shape[-1])
        # A label that is no class has a row of zeros, and the loss would be 0.
        targets = jnp.where((labels >= 0) & (labels < logits.shape[-1]), targets.T, jnp.nan).T
        smoothed = optax.smooth_labels(targets, self.arguments.loss.label_smoothing)
        losses = optax.softmax_cross_entropy(logits, smoothed)
        return PerExample(losses, {"accuracy": jnp.argmax(logits, -1) == labels})

    def predictions(self, model: Encoder, batch: Batch) -> dict[str, jax.Array]:
        """Returns the likeliest class of each image, for the metrics of a validation unit."""
        return {"label": jnp.argmax(model(batch["image"]), -1)}

    @property
    def tokens_per_example(self) -> int:
        return self.config.num_tokens

    def flops_per_token(self, num_parameters: int) -> float:
        """Returns 6 N + 12 A D over the layers (Chowdhery et al., 2022, appendix B): every token attends to all A of them."""
        config = self.config
        looked_up = config.num_tokens * config.width
        return 6.0 * (num_parameters - looked_up) + 12.0 * config.num_layers * config.num_tokens * config.width
