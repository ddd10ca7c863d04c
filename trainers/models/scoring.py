"""A decoder that gives scores of a whole text in place of the logits of its tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trainers.config import ModelConfig
from trainers.models.decoder import TABLE_SCALE, Decoder
from trainers.models.layers import parameter
from trainers.parallel.sequence import filled_up

OWN_PARAMETERS = ("^head$", "^unembed$")
"""Patterns of the parameters in which it differs from a decoder: it has a head, and no table for logits."""


class Segments(NamedTuple):
    """The texts that share rows, as `Decoder.hidden` takes them. A row has at most `number` of them."""

    segments_BT: jax.Array
    positions_BT: jax.Array
    number: int


class ScoringDecoder(Decoder):
    """A decoder with a linear head on the last token of each text."""

    def __init__(self, config: ModelConfig, num_scores: int, *, rngs: nnx.Rngs, dtype: Any, param_dtype: Any):
        super().__init__(config, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        if not config.tie_embeddings:
            del self.unembed
        self.head = parameter(rngs, ("embed", None), (config.width, num_scores), TABLE_SCALE, param_dtype)

    def scores(self, tokens_BT: jax.Array, token_weight_BT: jax.Array, of: Segments | None = None) -> jax.Array:
        """Returns float32[B, scores], from the last token of each row whose weight is more than 0; or with segments
        float32[B, S, scores], from the last such token of each segment. A segment that a row has not has no meaningful score."""
        # Rows of pairs have a token more than `data.sequence_length`, which is checked.
        tokens_BT, token_weight_BT = filled_up(tokens_BT), filled_up(token_weight_BT)
        of = None if of is None else Segments(filled_up(of.segments_BT), filled_up(of.positions_BT), of.number)
        counted_BTS = (token_weight_BT > 0)[:, :, None]
        positions_BT, segments_BT = (None, None) if of is None else (of.positions_BT, of.segments_BT)
        if of is not None:
            counted_BTS &= of.segments_BT[:, :, None] == jnp.arange(1, of.number + 1)
        x_BTD = self.hidden(tokens_BT, positions_BT, segments_BT).x_BTD
        last_BS = jnp.max(jnp.where(counted_BTS, jnp.arange(tokens_BT.shape[1])[:, None], 0), axis=1)
        x_BSD = jnp.take_along_axis(x_BTD, last_BS[:, :, None], axis=1)
        scores = x_BSD.astype(jnp.float32) @ self.head[...].astype(jnp.float32)
        return scores[:, 0] if of is None else scores

    def _table(self) -> jax.Array:
        # Nothing is multiplied by it.
        return self.embed[...].T
