"""A decoder that gives scores of a whole text in place of the logits of its tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainers.config import ModelConfig
from trainers.models.decoder import TABLE_SCALE, Decoder
from trainers.models.layers import parameter

OWN_PARAMETERS = ("^head$", "^unembed$")
"""Patterns of the parameters in which it differs from a decoder: it has a head, and no table for logits."""


class ScoringDecoder(Decoder):
    """A decoder with a linear head on the last token of each text."""

    def __init__(self, config: ModelConfig, num_scores: int, *, rngs: nnx.Rngs, dtype: Any, param_dtype: Any):
        super().__init__(config, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        if not config.tie_embeddings:
            del self.unembed
        self.head = parameter(rngs, ("embed", None), (config.width, num_scores), TABLE_SCALE, param_dtype)

    def scores(self, tokens_BT: jax.Array, token_weight_BT: jax.Array) -> jax.Array:
        """Returns float32[B, scores], from the last token of each row whose weight is more than 0."""
        x_BTD = self.hidden(tokens_BT).x_BTD
        # The first one from the right.
        last_B = tokens_BT.shape[1] - 1 - jnp.argmax(token_weight_BT[:, ::-1] > 0, axis=1)
        x_BD = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)[:, 0]
        return x_BD.astype(jnp.float32) @ self.head[...].astype(jnp.float32)

    def _table(self) -> jax.Array:
        # Nothing is multiplied by it.
        return self.embed[...].T
