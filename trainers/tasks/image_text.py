"""The task of predicting the next token of texts with images."""

from __future__ import annotations

from typing import Any, cast

import jax
from flax import nnx

from gangway.errors import UsageError
from trainers.config.arguments import TrainingArguments
from trainers.models.decoder import Hidden
from trainers.models.vlm import ImageTextModel
from trainers.protocol import Batch, Loss
from trainers.tasks.causal_lm import CausalLMTask


class _OfText(CausalLMTask):
    reads = CausalLMTask.reads | {"images"}


class ImageTextTask:
    """Predicts each next token, as `CausalLMTask` does, by the encoder of `vision` before the decoder of `model`.

    `batch` also has {"images": float[B, I, height, width, colours]}: the images of each row, in the order of their tokens
    (`trainers.models.vlm.ImageTextModel`). A `token_weight` should be 0 for the tokens of images: they are no targets.

    It has no `encode` and `decode`, so there are no previews. `python -m trainers.generate` continues texts with images.
    """

    def __init__(self, arguments: TrainingArguments):
        if arguments.vision is None:
            raise UsageError("vision = null: the task reads images by an encoder; set vision: {family: siglip, ...}")
        self.arguments, self.vision, self._of_text = arguments, arguments.vision, _OfText(arguments)

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        arguments = self.arguments
        types: dict[str, Any] = {"dtype": arguments.dtype, "param_dtype": arguments.param_dtype}
        return ImageTextModel(self.vision, arguments.model, rngs=rngs, **types)

    def loss(self, model: ImageTextModel, batch: Batch) -> Loss:
        return self._of_text.loss(cast(nnx.Module, _Seeing(model, batch["images"])), batch)

    @property
    def tokens_per_example(self) -> int:
        return self._of_text.tokens_per_example

    def flops_per_token(self, num_parameters: int) -> float:
        """Returns those of a decoder of so many parameters: as if every token of a text met those of the encoder, too."""
        return self._of_text.flops_per_token(num_parameters)


class _Seeing:
    """The model with the images of a batch: one that needs the tokens alone."""

    def __init__(self, model: ImageTextModel, images_BIHWC: jax.Array):
        self.model, self.images_BIHWC = model, images_BIHWC

    def hidden(self, tokens_BT: jax.Array) -> Hidden:
        return self.model.hidden(tokens_BT, self.images_BIHWC)
