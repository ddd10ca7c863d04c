"""A number per array that changes when any bit of it does, computed where the array lies, the same on any mesh."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp


def fingerprints(tree: Any) -> jax.Array:
    """uint32[num_leaves, 2], traced: for each leaf two sums, over its elements, of mixes of (bits, position)."""
    return jnp.stack([_leaf(leaf) for leaf in jax.tree.leaves(tree)])


def leaf_names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def digest(names: list[str], values: Any) -> str:
    """One short hexadecimal digest of named fingerprints."""
    rows = [[name, *map(int, row)] for name, row in zip(names, values, strict=True)]
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()[:16]


def _leaf(x: jax.Array) -> jax.Array:
    bits = _bits(x)
    position = jnp.zeros((), jnp.uint32)
    for dimension in range(bits.ndim):
        index = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dimension)
        position = position * jnp.uint32(2654435761) + index
    # Two independent odd multipliers: one lane alone would let one in 2**32 changes pass.
    return jnp.stack([_lane(bits, position, 0x9E3779B1), _lane(bits, position, 0xC2B2AE3D)])


def _lane(bits: jax.Array, position: jax.Array, multiplier: int) -> jax.Array:
    h = (bits ^ (position * jnp.uint32(multiplier))) * jnp.uint32(0x85EBCA6B)
    h ^= h >> 13
    h *= jnp.uint32(0xC2B2AE35)
    return jnp.sum(h ^ (h >> 16), dtype=jnp.uint32)


def _bits(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)
