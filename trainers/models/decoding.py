"""Generates tokens with a cache: greedy or sampled, compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from trainers.config import PreviewConfig


class Decoder(Protocol):
    """What a model must have to generate. `trainers.models.decoder.Decoder` has it."""

    def init_cache(self, batch: int, length: int) -> Any:
        """Returns an empty cache for the keys and values of `length` tokens: leaves [..., batch, slots, heads, channels]."""

    def decode_step(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, mask_BTS: jax.Array, cache: Any, slot: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Returns (float32 logits [B, V] for the token after the last, the cache with these tokens in the slots from `slot`
        on). Token t attends to slot s where the mask is true. Several tokens at once are the first ones. A model that reads
        images takes those of the first tokens as `images_BIHWC`."""


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
    step = _steps(model, lengths_B, prompt, prompt + config.num_tokens, window, place)

    def generate_token(carry: tuple[jax.Array, Any], i: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
        logits_BV, cache = carry
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, i), jnp.arange(batch))
        tokens_B = pick(logits_BV, keys_B, config)
        return step(tokens_B[:, None], prompt + i[None], cache), tokens_B

    prefilled = step(tokens_BP, jnp.arange(prompt), place(model.init_cache(batch, prompt + config.num_tokens)))
    # The scan stacks the tokens as [num_tokens, B].
    return jax.lax.scan(generate_token, prefilled, jnp.arange(config.num_tokens))[1].T


class Progress(NamedTuple):
    """A generation on its way, on the devices. N: the most tokens that a prompt may get."""

    tokens_BN: jax.Array
    num_B: jax.Array
    """How many of the tokens of a row are its own: the stop token, if it came, is the last of them."""
    done_B: jax.Array
    at: jax.Array
    """How many tokens were generated, of the rows that are not done."""
    logits_BV: jax.Array
    cache: Any


def begin(
    model: Decoder,
    tokens_BP: jax.Array,
    lengths_B: jax.Array,
    *,
    num_tokens: int,
    window: int,
    place: Callable[[Any], Any] = lambda cache: cache,
    images_BIHWC: jax.Array | None = None,
) -> Progress:
    """Returns the generation of at most `num_tokens` for prompts aligned at the right of `tokens_BP`, with the prompts read and
    no token generated. Traced. Rows without a prompt have the length 0, and are done. `images_BIHWC` are the images of each
    prompt, for a model that reads some (`trainers.models.vlm`)."""
    batch, prompt = tokens_BP.shape
    step = _steps(model, lengths_B, prompt, prompt + num_tokens, window, place)
    images = {} if images_BIHWC is None else {"images_BIHWC": images_BIHWC}
    logits_BV, cache = step(tokens_BP, jnp.arange(prompt), place(model.init_cache(batch, prompt + num_tokens)), **images)
    zeros_B = jnp.zeros(batch, jnp.int32)
    return Progress(jnp.zeros((batch, num_tokens), jnp.int32), zeros_B, lengths_B == 0, jnp.int32(0), logits_BV, cache)


def go_on(
    model: Decoder,
    progress: Progress,
    lengths_B: jax.Array,
    keys_B: jax.Array,
    until: jax.Array,
    *,
    prompt: int,
    config: PreviewConfig,
    stop_ids: Sequence[int],
    window: int,
    place: Callable[[Any], Any] = lambda cache: cache,
) -> Progress:
    """Returns the generation when `until` tokens are there, or all rows are done: each has its stop token. Traced. `prompt` is
    the P of `begin`. A token is drawn by the key of its row and its number alone: a prompt gets the same tokens in any batch."""
    num_tokens = progress.tokens_BN.shape[1]
    step = _steps(model, lengths_B, prompt, prompt + num_tokens, window, place)
    stops_K = jnp.asarray(stop_ids, jnp.int32)

    def unfinished(progress: Progress) -> jax.Array:
        return (progress.at < jnp.minimum(until, num_tokens)) & ~jnp.all(progress.done_B)

    def generate_token(progress: Progress) -> Progress:
        at = progress.at
        tokens_B = pick(progress.logits_BV, jax.vmap(jax.random.fold_in, (0, None))(keys_B, at), config)
        tokens_BN = jax.lax.dynamic_update_slice_in_dim(progress.tokens_BN, tokens_B[:, None], at, 1)
        num_B = jnp.where(progress.done_B, progress.num_B, at + 1)
        done_B = progress.done_B | jnp.any(tokens_B[:, None] == stops_K, -1)
        logits_BV, cache = step(tokens_B[:, None], prompt + at[None], progress.cache)
        return Progress(tokens_BN, num_B, done_B, at + 1, logits_BV, cache)

    return jax.lax.while_loop(unfinished, generate_token, progress)


def _steps(
    model: Decoder, lengths_B: jax.Array, prompt: int, slots: int, window: int, place: Callable[[Any], Any]
) -> Callable[..., tuple[jax.Array, Any]]:
    """Returns a function (tokens [B, T], their slots [T], cache, images of these tokens by name) -> (logits [B, V], cache), for
    prompts that end at slot `prompt` - 1."""
    # The slot of each prompt's first token: [B].
    first_B = prompt - lengths_B
    slots_S = jnp.arange(slots)

    def step(tokens_BT: jax.Array, slots_T: jax.Array, cache: Any, **images: jax.Array) -> tuple[jax.Array, Any]:
        back_TS = slots_T[:, None] - slots_S
        # [B, T, S]
        mask_BTS = ((back_TS >= 0) & (back_TS < window)) & (slots_S >= first_B[:, None])[:, None]
        # Nothing attends to the slots left of a prompt: any position will do there.
        positions_BT = jnp.maximum(slots_T - first_B[:, None], 0)
        logits_BV, cache = model.decode_step(tokens_BT, positions_BT, mask_BTS, cache, slots_T[0], **images)
        return logits_BV, place(cache)

    return step


def pick(logits_BV: jax.Array, keys_B: jax.Array, config: PreviewConfig) -> jax.Array:
    """Returns int32[B]: the likeliest token, or one drawn from softmax(logits / temperature), of the `top_k` likeliest, and of
    the likeliest that together have the probability `top_p` (Holtzman et al., 2020). A row's draw depends on its own key and
    logits alone."""
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
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
