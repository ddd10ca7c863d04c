"""Examples that share a row: each is a segment of it (`trainers.data.packed_examples`), and counts as one.

Dimensions: B rows of a batch, S segments of a row, N lines, P or T places of a line. Segments have numbers from 1 on; 0 is
filling.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from trainers.protocol import Batch, PerExample


def lines_of(batch: Batch) -> dict[str, jax.Array]:
    """Returns the leaves of the texts of a batch, [N, P] each: the lines of all rows, where a row has several."""
    names = ("tokens", "token_weight", "segments", "positions")
    return {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in names if name in batch}


def sums(values_NT: jax.Array, segments_NT: jax.Array, num_segments: int) -> jax.Array:
    """Returns the sum of the values of each segment, [N, S]. Not by scattering, whose order of adding is not fixed on GPUs."""
    is_of_NTS = segments_NT[:, :, None] == jnp.arange(1, num_segments + 1)
    return jnp.sum(jnp.where(is_of_NTS, values_NT[:, :, None], 0), axis=1)


def per_example(batch: Batch, losses: jax.Array, metrics: Mapping[str, jax.Array], num_tokens_B: jax.Array) -> PerExample:
    """Returns the losses and metrics of a batch, [B]; or of packed rows, whose are [B, S], the sums over the examples of each
    row, and how many these are: so what is published and trained on is the mean over examples, however they are packed. Segments
    of weight 0, which a row has not, do not count."""
    if "example_weight" not in batch:
        return PerExample(losses, metrics, num_tokens=num_tokens_B)
    example_weight_BS = batch["example_weight"]

    def summed(values_BS: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(example_weight_BS > 0, values_BS * example_weight_BS, 0), axis=1)

    metrics = {name: summed(values) for name, values in metrics.items()}
    return PerExample(summed(losses), metrics, jnp.sum(example_weight_BS, axis=1), num_tokens_B)
