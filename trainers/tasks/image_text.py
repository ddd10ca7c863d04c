"""The task of predicting the next token of texts with images."""

from __future__ import annotations

from typing import cast

import jax
from flax import nnx

from trainers.config.arguments import TrainingArguments
from trainers.errors import UsageError
from trainers.models.decoder import Hidden
from trainers.models.vlm import ImageTextModel
from trainers.protocol import Batch, Loss
from trainers.tasks.causal_lm import CausalLMTask


class ImageTextTask(CausalLMTask):
    """Predicts each next token, as `CausalLMTask` does, by the encoder of `vision` before the decoder of `model`.

    `batch` also has {"images": float[B, I, height, width, colours]}: the images of each row, in the order of their tokens
    (`trainers.models.vlm.ImageTextModel`). A `token_weight` should be 0 for the tokens of images: they are no targets.

    Its FLOPs are those of a model in which every parameter meets every token of a text.
    """

    def __init__(self, arguments: TrainingArguments):
        super().__init__(arguments)
        if arguments.previews.prompts:
            raise UsageError("previews.prompts: a model with images generates nothing yet; set previews: {prompts: []}")

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        arguments = self.arguments
        if arguments.vision is None:
            raise UsageError("vision = null: the task reads images by an encoder; set vision: {family: siglip, ...}")
        types = {"dtype": arguments.dtype, "param_dtype": arguments.param_dtype}
        return ImageTextModel(arguments.vision, arguments.model, rngs=rngs, **types)

    def loss(self, model: nnx.Module, batch: Batch) -> Loss:
        seeing = _Seeing(cast(ImageTextModel, model), batch["images"])
        return super().loss(cast(nnx.Module, seeing), batch)


class _Seeing:
    """The model with the images of a batch: one that needs the tokens alone."""

    def __init__(self, model: ImageTextModel, images_BIHWC: jax.Array):
        self.model, self.images_BIHWC = model, images_BIHWC

    def hidden(self, tokens_BT: jax.Array) -> Hidden:
        return self.model.hidden(tokens_BT, self.images_BIHWC)
