"""Counts in the step which samples a run was trained on, and how often: exactly, on any number of hosts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trainers.protocol import Batch
from trainers.step.state import add_wide


def count_samples(
    totals: dict[str, jax.Array], batch_index: jax.Array, batch: Batch, num_tokens: jax.Array, micro_batch_size: int
) -> dict[str, jax.Array]:
    """Returns `totals` with the samples of this batch added. `micro_batch_size` is the one without padding: padding differs
    with the number of hosts, and the row of a sample must not."""
    # [accumulation_steps, rows] each.
    ids, weight = batch["sample_id"], batch["weight"]
    real = (weight > 0).astype(jnp.uint32)
    # uint32[accumulation_steps, rows] each.
    micro_batch, row = (jax.lax.broadcasted_iota(jnp.uint32, ids.shape, dimension) for dimension in (0, 1))
    # A sum of hashes (each word modulo 2**32): it does not depend on the order, and so not on how rows are spread over devices.
    hashes = sample_hash(batch_index, micro_batch * jnp.uint32(micro_batch_size) + row, ids) * real[None]
    return {
        "tokens": add_wide(totals["tokens"], num_tokens),
        "samples": add_wide(totals["samples"], jnp.sum(real, dtype=jnp.uint32)),
        # hashes: uint32[2, accumulation_steps, rows] -> [2].
        "samples_digest": totals["samples_digest"] + jnp.sum(hashes, axis=tuple(range(1, hashes.ndim)), dtype=jnp.uint32),
    }


def sample_hash(batch_index: jax.Array, row: jax.Array, sample_id: jax.Array) -> jax.Array:
    """Returns uint32[2, ...]: two independent hashes (by the finalizer of MurmurHash3) of where a sample was trained on."""

    def mix(h: jax.Array) -> jax.Array:
        h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
        return h ^ (h >> 16)

    # One 32-bit sum would miss a change too easily: the two lanes are the two words of the digest.
    def lane(seed: int) -> jax.Array:
        h = mix(jnp.asarray(batch_index).astype(jnp.uint32) + jnp.uint32(seed))
        return mix(mix(h ^ row.astype(jnp.uint32)) ^ sample_id.astype(jnp.uint32))

    return jnp.stack([lane(0x9E3779B9), lane(0x7F4A7C15)])
