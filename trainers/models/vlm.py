"""Gemma 3 with images: the encoder of SigLIP, a projection, and the decoder of Gemma 3 (Gemma Team, 2025).

Shape suffixes as in `trainers.models.decoder`; I images of a row, M tokens of an image, E the encoder's width.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gangway.errors import UsageError
from trainers.config import ModelConfig
from trainers.config.vision import VisionConfig
from trainers.models.attention import same_block
from trainers.models.decoder import Decoder, Hidden, rms_norm
from trainers.models.encoder import Encoder
from trainers.models.kv_cache import Cache
from trainers.models.layers import parameter


class ImageTextModel(nnx.Module):
    """A decoder that also reads images. In its rows, `vision.tokens_per_image` tokens `vision.image_token`, one after the other,
    stand for an image; the first image of a row for the first of them, and so on.

    The tokens of one image attend to each other in both directions. Its parameters are those of `vision`, `projector` and
    `decoder`.
    """

    def __init__(
        self,
        vision: VisionConfig,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
    ):
        if vision.tokens_per_image is None or vision.image_token is None:
            raise UsageError("vision.tokens_per_image = null: a decoder of images needs it, and vision.image_token; set both")
        if vision.image_token >= config.vocab_size:
            raise UsageError(
                f"vision.image_token = {vision.image_token}: expected a token of the vocabulary (model.vocab_size = "
                f"{config.vocab_size})"
            )
        if config.logit_softcap is not None:
            raise UsageError(f"model.logit_softcap = {config.logit_softcap}: {config.family} with images has none; leave it out")
        self.config, self.image_token, self.tokens_per_image = config, vision.image_token, vision.tokens_per_image
        self.vision = Encoder(vision, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.projector = Projector(vision, config.width, rngs=rngs, param_dtype=param_dtype)
        self.decoder = Decoder(config, rngs=rngs, dtype=dtype, param_dtype=param_dtype)

    def __call__(self, tokens_BT: jax.Array, images_BIHWC: jax.Array) -> jax.Array:
        """Returns the float32 logits [B, T, V]."""
        hidden = self.hidden(tokens_BT, images_BIHWC)
        return hidden.logits(hidden.x_BTD.reshape(-1, self.config.width)).reshape(*tokens_BT.shape, -1)

    def hidden(
        self,
        tokens_BT: jax.Array,
        images_BIHWC: jax.Array,
        positions_BT: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
    ) -> Hidden:
        """Returns what the logits are computed from (`trainers.models.decoder.Decoder.hidden`). `images_BIHWC` are the images of
        each row, in order; a row may have fewer, if arrays of any content are in place of the last ones. A row whose tokens ask
        for more images than there are gets NaN: it is an error of the data."""
        embedded_BTD, blocks_BT = self._embedded(tokens_BT, images_BIHWC, positions_BT, tokens_BT == self.image_token)
        return self.decoder.hidden(tokens_BT, positions_BT, segments_BT, embedded_BTD=embedded_BTD, blocks_BT=blocks_BT)

    def init_cache(self, batch: int, length: int) -> Cache:
        return self.decoder.init_cache(batch, length)

    def decode_step(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        mask_BTS: jax.Array,
        cache: Cache,
        slot: jax.Array | int,
        images_BIHWC: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Returns what `Decoder.decode_step` does. The first tokens may have images, as for `hidden`; without them, and later on,
        every token is one of text."""
        if images_BIHWC is None:
            return self.decoder.decode_step(tokens_BT, positions_BT, mask_BTS, cache, slot)
        # What fills up a row attends to nothing, and is no image, whichever token it is.
        own_BT = jnp.diagonal(mask_BTS, axis1=1, axis2=2)
        is_image_BT = (tokens_BT == self.image_token) & own_BT
        embedded_BTD, blocks_BT = self._embedded(tokens_BT, images_BIHWC, positions_BT, is_image_BT)
        later = mask_BTS.shape[-1] - tokens_BT.shape[1]
        mask_BTS |= jnp.pad(same_block(blocks_BT), ((0, 0), (0, 0), (0, later)))
        return self.decoder.decode_step(tokens_BT, positions_BT, mask_BTS, cache, slot, embedded_BTD=embedded_BTD)

    def _embedded(
        self, tokens_BT: jax.Array, images_BIHWC: jax.Array, positions_BT: jax.Array | None, is_image_BT: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (what the first layer reads of the tokens, [B, T, D], the number of each token's image, [B, T], from 1 on)."""
        # The place of a token among those of the row's images.
        place_BT = jnp.cumsum(is_image_BT, 1) - 1
        blocks_BT = jnp.where(is_image_BT, 1 + place_BT // self.tokens_per_image, 0)
        seen_BSD = self.embedded_images(images_BIHWC)
        of_token_BTD = jnp.take_along_axis(
            seen_BSD, jnp.where(is_image_BT, place_BT, 0)[..., None], 1, mode="fill", fill_value=jnp.nan
        )
        # Not scaled by sqrt(width), unlike those of text.
        return jnp.where(is_image_BT[..., None], of_token_BTD, self.decoder.embedded(tokens_BT, positions_BT)), blocks_BT

    def embedded_images(self, images_BIHWC: jax.Array) -> jax.Array:
        """Returns what the decoder reads of the images of each row, [B, I * M, D]."""
        batch = len(images_BIHWC)
        with jax.named_scope("vision"):
            hidden = self.vision.hidden(images_BIHWC.reshape(-1, *images_BIHWC.shape[2:]))
        with jax.named_scope("projector"):
            return self.projector(hidden, self.tokens_per_image).reshape(batch, -1, self.config.width)


class Projector(nnx.Module):
    """From the patches of an encoder to the tokens of a decoder: averaged, normed, and multiplied by a matrix."""

    def __init__(self, vision: VisionConfig, width: int, *, rngs: nnx.Rngs, param_dtype: Any):
        self.eps = vision.norm_eps
        self.norm = nnx.Param(jnp.zeros(vision.width, param_dtype), logical_axes=("embed",))
        self.out = parameter(rngs, ("embed", None), (vision.width, width), vision.width**-0.5, param_dtype)

    def __call__(self, hidden_BTE: jax.Array, num_tokens: int) -> jax.Array:
        """Returns [B, M, D]: token m is of the square m of the image, row by row."""
        pooled_BME = averaged(hidden_BTE, num_tokens)
        normed = rms_norm(pooled_BME, self.norm[...], self.eps, offset=True)
        return normed @ self.out[...].astype(hidden_BTE.dtype)


def averaged(x_BTE: jax.Array, num_tokens: int) -> jax.Array:
    """Returns the means [B, num_tokens, E] of the patches in each square of the image."""
    batch, patches, width = x_BTE.shape
    side, squares = math.isqrt(patches), math.isqrt(num_tokens)
    split = x_BTE.reshape(batch, squares, side // squares, squares, side // squares, width)
    return jnp.mean(split, (2, 4)).reshape(batch, num_tokens, width)
