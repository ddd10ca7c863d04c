"""The keys and values of the tokens so far, layer by layer. A layer with a window keeps those of its window alone.

Shape suffixes are those of `trainers.models.decoder`; R: the slots that a layer has. Of a layer without a window these are all
slots. Of one with a window they form a ring: the token of slot s is at s % R, in the place of one that nobody sees any more.

A model whose layers are all alike has one stack. Of Gemma, where every n-th layer sees all tokens, the stacks are: `wide`
[groups, B, S, K, C], `near` [groups, n - 1, B, R, K, C], and `rest` for the layers after the last whole group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from trainers.config import ModelConfig

Slots = dict[str, jax.Array]
"""`key` and `value` of one layer, or of a stack of layers: [..., B, R, K, C] each."""
Cache = dict[str, Slots]
"""The stacks by name."""
Body = Callable[[jax.Array, Any, bool, Slots], tuple[jax.Array, Slots]]
"""(x, the weights of a layer, whether it has a window, its slots) -> (x, its new slots)."""


def empty(config: ModelConfig, batch: int, length: int, dtype: Any) -> Cache:
    """Returns the cache for `length` tokens in each of `batch` rows."""
    ring = length if config.window is None else min(config.window, length)

    def slots(stack: tuple[int, ...], number: int) -> Slots:
        shape = (*stack, batch, number, config.num_kv_heads, config.channels)
        return {name: jnp.zeros(shape, dtype) for name in ("key", "value")}

    local = config.local_layers
    if not any(local):
        return {"wide": slots((len(local),), length)}
    if all(local):
        return {"rest": slots((len(local),), ring)}
    groups, every = local.count(False), local.index(False) + 1
    rest = len(local) - groups * every
    stacks = {"wide": slots((groups,), length), "near": slots((groups, every - 1), ring)}
    return stacks | ({"rest": slots((rest,), ring)} if rest else {})


def over_layers(body: Body, x: jax.Array, weights: Any, cache: Cache) -> tuple[jax.Array, Cache]:
    """Runs `body` over the layers in their order, as loops: the program does not grow with depth. `weights` are stacked, one
    slice for each layer. Returns (x, the new cache)."""

    def run(x: jax.Array, numbers: jax.Array, slots: Slots, *, local: bool) -> tuple[jax.Array, Slots]:
        def one(x: jax.Array, xs: tuple[jax.Array, Slots]) -> tuple[jax.Array, Slots]:
            # Taken by number: stacks of their own for the kinds of layers would be copies of the weights.
            layer = jax.tree.map(lambda stack: jax.lax.dynamic_index_in_dim(stack, xs[0], 0, keepdims=False), weights)
            return body(x, layer, local, xs[1])

        return jax.lax.scan(one, x, (numbers, slots))

    new: Cache = {}
    first = 0
    if "near" in cache:
        groups, near = cache["near"]["key"].shape[:2]

        def group(x: jax.Array, xs: tuple[jax.Array, Slots, Slots]) -> tuple[jax.Array, tuple[Slots, Slots]]:
            start, nears, wide = xs
            x, nears = run(x, start + jnp.arange(near), nears, local=True)
            x, wide = run(x, (start + near)[None], jax.tree.map(lambda slots: slots[None], wide), local=False)
            return x, (nears, jax.tree.map(lambda slots: slots[0], wide))

        starts = jnp.arange(groups) * (near + 1)
        x, (new["near"], new["wide"]) = jax.lax.scan(group, x, (starts, cache["near"], cache["wide"]))
        first = groups * (near + 1)
    elif "wide" in cache:
        x, new["wide"] = run(x, jnp.arange(cache["wide"]["key"].shape[0]), cache["wide"], local=False)
    if "rest" in cache:
        x, new["rest"] = run(x, first + jnp.arange(cache["rest"]["key"].shape[0]), cache["rest"], local=True)
    return x, new


def added(old: Slots, new: Mapping[str, jax.Array], mask_BTS: jax.Array, slot: jax.Array | int) -> tuple[Slots, Slots, jax.Array]:
    """Returns (the slots of a layer with T new tokens from `slot` on, the keys and values that these attend to, the mask for
    them). `new` are the key and value of the T tokens, [B, T, K, C] each; `mask_BTS` is over all S slots. Several tokens at once
    are the first ones, from slot 0 on, if the layer has fewer slots than S."""
    ring, time = old["key"].shape[1], new["key"].shape[1]
    if ring == mask_BTS.shape[-1]:
        kept = {name: jax.lax.dynamic_update_slice_in_dim(old[name], new[name], slot, 1) for name in old}
        return kept, kept, mask_BTS
    if time == 1:
        kept = {name: jax.lax.dynamic_update_slice_in_dim(old[name], new[name], slot % ring, 1) for name in old}
        # The slot of the newest token in each place of the ring: negative where there was none yet.
        newest_R = slot - (slot - jnp.arange(ring)) % ring
        seen_BTR = jnp.take(mask_BTS, jnp.maximum(newest_R, 0), axis=-1) & (newest_R >= 0)
        return kept, kept, seen_BTR
    # Of a prompt only its end stays; its own tokens see each other as they are.
    last = {name: value[:, -ring:] for name, value in new.items()}
    first = max(0, time - ring)
    kept = {name: jnp.roll(jax.lax.dynamic_update_slice_in_dim(old[name], last[name], 0, 1), first % ring, 1) for name in old}
    return kept, dict(new), mask_BTS[:, :, :time]
