"""Attention behind one function."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from trainers.parallel.platform import kind_of_host


def attend(
    query_BTHC: jax.Array,
    key_BSKC: jax.Array,
    value_BSKC: jax.Array,
    mask_BTS: jax.Array | None,
    *,
    scale: float,
    softcap: float | None = None,
) -> jax.Array:
    """Returns softmax(scale * query key^T) value, [B, T, H, C], of grouped-query attention (Ainslie et al., 2023): H query heads
    share K key and value heads. Token t attends to slot s where the mask is true; None: where s <= t. `softcap` keeps the scores
    within +-softcap (Gemma 2)."""
    if softcap is None:
        # The mask is the same for all heads: [B, 1, T, S].
        mask = None if mask_BTS is None else mask_BTS[:, None]
        return dot_product(query_BTHC, key_BSKC, value_BSKC, mask=mask, scale=scale, is_causal=mask is None)
    batch, time, heads, channels = query_BTHC.shape
    slots, kv_heads = key_BSKC.shape[1:3]
    if mask_BTS is None:
        mask_BTS = (jnp.arange(time)[:, None] >= jnp.arange(slots))[None]
    grouped = query_BTHC.reshape(batch, time, kv_heads, heads // kv_heads, channels)
    scores = jnp.einsum("btkgc,bskc->bkgts", grouped, key_BSKC, preferred_element_type=jnp.float32) * scale
    scores = soft_capped(scores, softcap)
    # Not -inf: a row of filling that attends to nothing has no NaN.
    weights = jax.nn.softmax(jnp.where(mask_BTS[:, None, None], scores, jnp.finfo(scores.dtype).min), -1)
    mixed = jnp.einsum("bkgts,bskc->btkgc", weights.astype(value_BSKC.dtype), value_BSKC)
    return mixed.reshape(query_BTHC.shape)


def dot_product(query_BTHC: jax.Array, key_BSKC: jax.Array, value_BSKC: jax.Array, **settings: Any) -> jax.Array:
    """Returns what `jax.nn.dot_product_attention` does; of float16 also where XLA has no such
    product (on CPUs and TPUs)."""
    dtype = query_BTHC.dtype
    if dtype == jnp.float16 and kind_of_host() != "gpu":
        query_BTHC, key_BSKC, value_BSKC = (x.astype(jnp.float32) for x in (query_BTHC, key_BSKC, value_BSKC))
    return jax.nn.dot_product_attention(query_BTHC, key_BSKC, value_BSKC, **settings).astype(dtype)


def soft_capped(x: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(x / cap)


def causal_mask(segments_BT: jax.Array | None, time: int) -> jax.Array:
    """Returns bool[B or 1, T, T]: a token attends to itself and to those before it; of packed rows only within its segment."""
    slots = jnp.arange(time)
    mask_BTS = (slots[:, None] >= slots)[None]
    return mask_BTS if segments_BT is None else mask_BTS & (segments_BT[:, :, None] == segments_BT[:, None, :])


def same_block(blocks_BT: jax.Array) -> jax.Array:
    """Returns bool[B, T, T]: both tokens are of the block with the same number, which is not 0."""
    return (blocks_BT[:, :, None] == blocks_BT[:, None]) & (blocks_BT != 0)[:, None]


def within(mask_BTS: jax.Array | None, near_TS: jax.Array | None, local: jax.Array | None) -> jax.Array | None:
    """Returns the mask of a layer: with the window if the model has one and this layer is local (traced; None: all are)."""
    if mask_BTS is None or near_TS is None:
        return mask_BTS
    return mask_BTS & (near_TS if local is None else near_TS | ~local)
