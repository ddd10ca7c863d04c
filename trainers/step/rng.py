"""Random keys: every random number of a run is a function of (seed, name, step), whatever hosts and devices there are."""

from __future__ import annotations

import zlib

import jax


def key(seed: int | jax.Array, name: str, step: int | jax.Array) -> jax.Array:
    """Returns the key for what `name` draws at `step`; seed and step may be traced. Different names or steps are independent."""
    # CRC32 and not `hash`, which differs between processes.
    named = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
    return jax.random.fold_in(named, step)
