"""The attention of some tokens to some others of the same rows, in blocks, forward and backward by hand: what devices that share
a sequence compute of it.

A pair of blocks in which no token sees another is skipped. What a token gets of several parts of the keys can be joined
(`joined`), for the logarithm of the sum of its exponentials is kept beside it (Milakov & Gimelshein, 2018; Dao et al., 2022).

Shape suffixes: B rows, T queries, S keys, K key and value heads, G query heads of each, C channels; t and s: those of a block.
Blocks come first: [blocks, B, t, ...].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainers.models.attention import soft_capped

QUERIES, KEYS = 512, 1024
"""The tokens of a block. The scores of B x H x 512 x 1024 pairs are in memory at a time."""
NOTHING = -1e30
"""The logarithm of the sum of no exponentials. Finite: differences of it are no NaN."""
SEES_NOTHING, IS_SEEN_BY_NOTHING = -1, 1 << 30
"""Slots of what only fills up a block: of queries, and of keys."""


class Tokens(NamedTuple):
    """Where tokens are in their rows."""

    slots_T: jax.Array
    """int32: the place of each token in the whole row, in any order."""
    segments_BT: jax.Array | None
    """Of packed rows: the number of its document."""


class Score(NamedTuple):
    """How a score becomes a weight: the settings of `trainers.models.attention.attend`."""

    scale: float
    softcap: float | None
    queries: int = QUERIES
    keys: int = KEYS


class Part(NamedTuple):
    """What tokens get of a part of the keys, float32."""

    mixed_BTKGC: jax.Array
    """The mean of the values by the weights of this part."""
    log_sum_BTKG: jax.Array
    """The logarithm of the sum of the exponentials of its scores."""


class Gradients(NamedTuple):
    """float32, of queries, keys and values."""

    query_BTKGC: jax.Array
    key_BSKC: jax.Array
    value_BSKC: jax.Array


def joined(one: Part, other: Part) -> Part:
    """Returns what tokens get of both parts of the keys."""
    log_sum = jnp.logaddexp(one.log_sum_BTKG, other.log_sum_BTKG)
    mixed = sum(part.mixed_BTKGC * jnp.exp(part.log_sum_BTKG - log_sum)[..., None] for part in (one, other))
    return Part(jnp.asarray(mixed), log_sum)


def forward(
    score: Score,
    query_BTKGC: jax.Array,
    key_BSKC: jax.Array,
    value_BSKC: jax.Array,
    of_queries: Tokens,
    of_keys: Tokens,
    reach: jax.Array,
) -> Part:
    """Returns what the queries get of these keys. A token sees those of its segment in its own slot and in slots before it, less
    than `reach` away."""
    # All of what is computed of these depends on all of them, here and backward: in a loop over layers JAX would else compute
    # once, and keep, what depends on tokens alone: who sees whom, for all pairs of tokens.
    query_BTKGC, key_BSKC, value_BSKC, of_queries, of_keys, reach = jax.lax.optimization_barrier(
        (query_BTKGC, key_BSKC, value_BSKC, of_queries, of_keys, reach)
    )
    keys = _blocks(score.keys, (key_BSKC, value_BSKC), of_keys, IS_SEEN_BY_NOTHING)

    def of_block(block: Any) -> tuple[jax.Array, jax.Array]:
        query_BtKGC, tokens = block

        def add(so_far: tuple[jax.Array, ...], other: Any) -> tuple[tuple[jax.Array, ...], None]:
            (key_BsKC, value_BsKC), others = other
            seen = _seen(tokens, others, reach)

            def added() -> tuple[jax.Array, ...]:
                mixed, highest, total = so_far
                scores = jnp.where(seen, _scores(score, query_BtKGC, key_BsKC)[0], NOTHING)
                new = jnp.maximum(highest, jnp.max(scores, -1))
                weights = jnp.where(seen, jnp.exp(scores - new[..., None]), 0.0)
                kept = jnp.exp(highest - new)
                of_values = jnp.einsum(
                    "bkgts,bskc->bkgtc", weights.astype(value_BsKC.dtype), value_BsKC, preferred_element_type=jnp.float32
                )
                return mixed * kept[..., None] + of_values, new, total * kept + jnp.sum(weights, -1)

            return jax.lax.cond(jnp.any(seen), added, lambda: so_far), None

        batch, time, kv_heads, group, channels = query_BtKGC.shape
        shape = (batch, kv_heads, group, time)
        empty: tuple[jax.Array, ...] = (jnp.zeros((*shape, channels)), jnp.full(shape, NOTHING), jnp.zeros(shape))
        (mixed, highest, total), _ = jax.lax.scan(add, empty, keys)
        # What fills up sees nothing: 0, and no NaN.
        divisor = jnp.where(total > 0, total, 1.0)
        log_sum = jnp.where(total > 0, highest + jnp.log(divisor), NOTHING)
        return jnp.moveaxis(mixed / divisor[..., None], 3, 1), jnp.moveaxis(log_sum, 3, 1)

    found = jax.lax.map(of_block, _blocks(score.queries, query_BTKGC, of_queries, SEES_NOTHING))
    return Part(*_whole(found, query_BTKGC.shape[1]))


def backward(
    score: Score,
    query_BTKGC: jax.Array,
    key_BSKC: jax.Array,
    value_BSKC: jax.Array,
    of_queries: Tokens,
    of_keys: Tokens,
    reach: jax.Array,
    whole: Part,
    gradient_BTKGC: jax.Array,
) -> Gradients:
    """Returns the gradients by these queries, keys and values, given that of what the queries get of all keys. `whole` is what
    they get of all keys, of which these may be a part."""
    query_BTKGC, key_BSKC, value_BSKC, of_queries, of_keys, reach, gradient_BTKGC = jax.lax.optimization_barrier(
        (query_BTKGC, key_BSKC, value_BSKC, of_queries, of_keys, reach, gradient_BTKGC)
    )
    gradient = gradient_BTKGC.astype(jnp.float32)
    # What a weight's gradient is compared with: the mean by the weights (Dao et al., 2022, appendix B.4).
    mean_BTKG = jnp.sum(gradient * whole.mixed_BTKGC, -1)
    of_blocks = (query_BTKGC, gradient.astype(value_BSKC.dtype), whole.log_sum_BTKG, mean_BTKG)
    queries = _blocks(score.queries, of_blocks, of_queries, SEES_NOTHING)

    def of_keys_block(of_query: jax.Array, block: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        (key_BsKC, value_BsKC), others = block

        def add(so_far: tuple[jax.Array, ...], one: Any) -> tuple[tuple[jax.Array, ...], jax.Array]:
            ((query, gradient, log_sum, mean), tokens), of_query = one
            seen = _seen(tokens, others, reach)

            def added() -> tuple[jax.Array, ...]:
                scores, slope = _scores(score, query, key_BsKC)
                weights = jnp.where(seen, jnp.exp(scores - _per_score(log_sum)), 0.0)
                by_weight = jnp.einsum("btkgc,bskc->bkgts", gradient, value_BsKC, preferred_element_type=jnp.float32)
                by_score = weights * (by_weight - _per_score(mean)) * slope * score.scale
                weights, by_score = weights.astype(value_BsKC.dtype), by_score.astype(key_BsKC.dtype)
                return (
                    of_query + jnp.einsum("bkgts,bskc->btkgc", by_score, key_BsKC, preferred_element_type=jnp.float32),
                    so_far[0] + jnp.einsum("bkgts,btkgc->bskc", by_score, query, preferred_element_type=jnp.float32),
                    so_far[1] + jnp.einsum("bkgts,btkgc->bskc", weights, gradient, preferred_element_type=jnp.float32),
                )

            of_query, *of_pair = jax.lax.cond(jnp.any(seen), added, lambda: (of_query, *so_far))
            return tuple(of_pair), of_query

        zeros: tuple[jax.Array, ...] = tuple(jnp.zeros(x.shape, jnp.float32) for x in (key_BsKC, value_BsKC))
        of_pair, of_query = jax.lax.scan(add, zeros, (queries, of_query))
        return of_query, of_pair

    zeros = jnp.zeros(queries[0][0].shape, jnp.float32)
    keys = _blocks(score.keys, (key_BSKC, value_BSKC), of_keys, IS_SEEN_BY_NOTHING)
    of_query, of_pairs = jax.lax.scan(of_keys_block, zeros, keys)
    return Gradients(_whole(of_query, query_BTKGC.shape[1]), *_whole(of_pairs, key_BSKC.shape[1]))


def _seen(tokens: Tokens, others: Tokens, reach: jax.Array) -> jax.Array:
    """Returns bool[B or 1, 1, 1, t, s]: whether a token sees another."""
    back = tokens.slots_T[:, None] - others.slots_T
    seen = ((back >= 0) & (back < reach))[None]
    if tokens.segments_BT is not None and others.segments_BT is not None:
        seen &= tokens.segments_BT[:, :, None] == others.segments_BT[:, None]
    return seen[:, None, None]


def _scores(score: Score, query_BtKGC: jax.Array, key_BsKC: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """Returns float32[B, K, G, t, s], and the slope of the soft cap there."""
    products = jnp.einsum("btkgc,bskc->bkgts", query_BtKGC, key_BsKC, preferred_element_type=jnp.float32) * score.scale
    if score.softcap is None:
        return products, 1.0
    capped = soft_capped(products, score.softcap)
    return capped, 1.0 - (capped / score.softcap) ** 2


def _per_score(x_BtKG: jax.Array) -> jax.Array:
    return jnp.moveaxis(x_BtKG, 1, -1)[..., None]


def _blocks(length: int, arrays: Any, tokens: Tokens, filling: int) -> tuple[Any, Tokens]:
    """Returns the arrays [B, T, ...] and their tokens in blocks of `length` or fewer, filled up at the end with tokens in the
    slot `filling`."""
    time = tokens.slots_T.size
    length = min(length, time)
    number = -(-time // length)
    missing = number * length - time

    def split(x_BT: jax.Array) -> jax.Array:
        filled = jnp.pad(x_BT, [(0, 0), (0, missing)] + [(0, 0)] * (x_BT.ndim - 2))
        return jnp.moveaxis(filled.reshape(x_BT.shape[0], number, length, *x_BT.shape[2:]), 1, 0)

    slots = jnp.pad(tokens.slots_T, (0, missing), constant_values=filling).reshape(number, length)
    segments = None if tokens.segments_BT is None else split(tokens.segments_BT)
    return jax.tree.map(split, arrays), Tokens(slots, segments)


def _whole(blocks: Any, time: int) -> Any:
    """Returns arrays [B, T, ...] of their blocks."""

    def put_together(blocks: jax.Array) -> jax.Array:
        x = jnp.moveaxis(blocks, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :time]

    return jax.tree.map(put_together, blocks)
