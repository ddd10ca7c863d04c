"""Generates tokens with a cache: greedy or sampled, compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from trainers.config import PreviewConfig


class Decoder(Protocol):
    """What a model must have to generate. `trainers.models.decoder.Decoder` has it."""

    def init_cache(self, batch: int, length: int) -> Any:
        """Returns an empty cache for the keys and values of `length` tokens: leaves [layers, batch, length, heads, channels]."""

    def decode_step(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, mask_BTS: jax.Array, cache: Any, slot: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Returns (float32 logits [B, V] for the token after the last, the cache with these tokens in the slots from `slot`
        on). Token t attends to slot s where the mask is true."""


def decode(
    model: Decoder,
    tokens_BP: jax.Array,
    lengths_B: jax.Array,
    key: jax.Array,
    *,
    config: PreviewConfig,
    window: int,
    place: Callable[[Any], Any] = lambda cache: cache,
) -> jax.Array:
    """Returns int32[B, num_tokens]: the tokens that follow each prompt. Traced. Greedy decoding gives exactly what the model
    without a cache gives.

    Prompts are aligned at the right of `tokens_BP`, with `lengths_B` tokens each. A token attends to the last `window` tokens,
    including itself. `place` sets the sharding of the cache.
    """
    batch, prompt = tokens_BP.shape
    # The slot of each prompt's first token: [B].
    first_B = prompt - lengths_B
    slots_S = jnp.arange(prompt + config.num_tokens)

    def step(tokens_BT: jax.Array, slots_T: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        back_TS = slots_T[:, None] - slots_S
        # [B, T, S]
        mask_BTS = ((back_TS >= 0) & (back_TS < window)) & (slots_S >= first_B[:, None])[:, None]
        # Nothing attends to the slots left of a prompt: any position will do there.
        positions_BT = jnp.maximum(slots_T - first_B[:, None], 0)
        logits_BV, cache = model.decode_step(tokens_BT, positions_BT, mask_BTS, cache, slots_T[0])
        return logits_BV, place(cache)

    def generate_token(carry: tuple[jax.Array, Any], i: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
        logits_BV, cache = carry
        tokens_B = pick(logits_BV, jax.random.fold_in(key, i), config)
        return step(tokens_B[:, None], prompt + i[None], cache), tokens_B

    prefilled = step(tokens_BP, jnp.arange(prompt), place(model.init_cache(batch, len(slots_S))))
    # The scan stacks the tokens as [num_tokens, B].
    return jax.lax.scan(generate_token, prefilled, jnp.arange(config.num_tokens))[1].T


def pick(logits_BV: jax.Array, key: jax.Array, config: PreviewConfig) -> jax.Array:
    """Returns int32[B]: the likeliest token, or one drawn from softmax(logits / temperature), of the `top_k` likeliest, and of
    the likeliest that together have the probability `top_p` (Holtzman et al., 2020). A row's draw does not depend on the other
    rows."""
    if config.greedy or config.temperature == 0:
        return jnp.argmax(logits_BV, -1).astype(jnp.int32)
    logits_BV = logits_BV / config.temperature
    if config.top_k is not None:
        best_BK, _ = jax.lax.top_k(logits_BV, min(config.top_k, logits_BV.shape[-1]))
        logits_BV = jnp.where(logits_BV < best_BK[:, -1:], -jnp.inf, logits_BV)
    if config.top_p is not None:
        sorted_BV = jnp.sort(logits_BV, descending=True)
        p_BV = jax.nn.softmax(sorted_BV)
        within_BV = jnp.cumsum(p_BV, -1) - p_BV < config.top_p  # the token that crosses top_p is included
        least_B = jnp.min(jnp.where(within_BV, sorted_BV, jnp.inf), -1)
        logits_BV = jnp.where(logits_BV < least_B[:, None], -jnp.inf, logits_BV)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(logits_BV.shape[0]))
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
