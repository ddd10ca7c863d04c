"""Attention in memory that grows with the length of a sequence, and not with its square. On every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trainers.models.attention import attend

BLOCK_TOKENS = 256
"""Queries whose scores are in memory at a time. Fewer: more passes over the keys; more: more memory."""


def blockwise(
    query_BTHC: jax.Array,
    key_BTKC: jax.Array,
    value_BTKC: jax.Array,
    *,
    segments_BT: jax.Array | None,
    window: int | None,
    scale: float,
    softcap: float | None,
    block_tokens: int = BLOCK_TOKENS,
) -> jax.Array:
    """Returns causal attention [B, T, H, C], one block of queries after the other; the backward pass computes the scores again.
    With a window, a block reads only the keys that are near it."""
    time = query_BTHC.shape[1]
    block = min(block_tokens, time)
    num_blocks = -(-time // block)
    padded = num_blocks * block
    # The keys that a block may attend to: those before it within the window, and its own.
    span = padded if window is None else min(padded, block + window - 1)
    query, key, value = (_filled(x, padded) for x in (query_BTHC, key_BTKC, value_BTKC))
    segments = None if segments_BT is None else _filled(segments_BT, padded)

    # Checkpointed: else the scores of all blocks would be kept for the backward pass, [B, H, T, T] together.
    @jax.checkpoint
    def of_block(index: jax.Array) -> jax.Array:
        first = index * block
        begin = jnp.maximum(first + block - span, 0)
        part = jax.lax.dynamic_slice_in_dim
        back_TS = (first + jnp.arange(block))[:, None] - (begin + jnp.arange(span))
        mask_BTS = ((back_TS >= 0) if window is None else (back_TS >= 0) & (back_TS < window))[None]
        if segments is not None:
            mask_BTS &= part(segments, first, block, 1)[:, :, None] == part(segments, begin, span, 1)[:, None]
        near_key, near_value = part(key, begin, span, 1), part(value, begin, span, 1)
        return attend(part(query, first, block, 1), near_key, near_value, mask_BTS, scale=scale, softcap=softcap)

    # [num_blocks, B, block, H, C] -> [B, T, H, C]
    blocks = jax.lax.map(of_block, jnp.arange(num_blocks))
    return jnp.moveaxis(blocks, 0, 1).reshape(query.shape)[:, :time]


def _filled(x_BT: jax.Array, time: int) -> jax.Array:
    """Returns x with zeros at its end, `time` tokens in all. No token before them attends to what is filled in."""
    return jnp.pad(x_BT, [(0, 0), (0, time - x_BT.shape[1])] + [(0, 0)] * (x_BT.ndim - 2))
