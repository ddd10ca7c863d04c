"""What becomes of an update, decided in the step: what the hosts wish, and whether its loss can be trusted. Pure and traced."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import jax
import jax.numpy as jnp

from trainers.config import AnomalyConfig

RUN_AHEAD_STEPS = 2


class UpdateStatus(IntEnum):
    """Of the train step on its own update, which is applied only if there is nothing against it."""

    APPLIED = 0
    ORDERED = 1
    """The batch is one of those to skip."""
    NON_FINITE = 2
    LOSS_SPIKE = 3
    OUT_OF_STEP = 4
    """The hosts came with different batches."""
    OVERFLOW = 5
    """Of float16, by the scale of the loss, which is smaller from now on. No anomaly: it happens now and then."""
    SCALE_EXHAUSTED = 6
    """The same, and the scale is as small as it may be."""


FLAGS = ("stop", "saves", "skip", "batch_index")
"""What each host gives to a step, as int32, in this order: its wishes, and which batch it takes the step with."""

REDUCED = ("stop", "saves", "verdict", "batch_index", "newest_batch_index", "loss", "expected_loss")
"""What every host gets of a step, in this order: int32, the losses as the bits of a float32."""

MIN_RELATIVE_DEVIATION = 0.01
"""The least standard deviation that spikes are measured by, as a part of the mean: where losses hardly vary, chance leaps."""


def reduce_flags(
    flags: jax.Array,
    loss: jax.Array,
    finite: jax.Array,
    stats: Mapping[str, jax.Array],
    config: AnomalyConfig,
    overflow: jax.Array | None = None,
) -> jax.Array:
    """int32[len(REDUCED)]: the maximum of what hosts wish, and the verdict on the update. `overflow`: that of the scaled loss."""
    # The least index too, by one maximum: a collective of its own would cost as much again.
    stop, saves, skip, newest, least = jnp.max(jnp.concatenate([flags, -flags[:, -1:]], axis=1), axis=0)
    spike = is_spike(stats, loss, config) if config.loss_spike != "off" else jnp.zeros((), jnp.bool_)
    overflow = jnp.int32(UpdateStatus.APPLIED) if overflow is None else overflow
    others = [
        jnp.int32(v) for v in (UpdateStatus.OUT_OF_STEP, UpdateStatus.ORDERED, UpdateStatus.NON_FINITE, UpdateStatus.LOSS_SPIKE)
    ]
    verdict = jnp.select(
        [-least != newest, skip > 0, ~finite, overflow != UpdateStatus.APPLIED, spike],
        [*others[:3], overflow, others[3]],
        jnp.int32(UpdateStatus.APPLIED),
    )
    expected = jnp.where(stats["count"] > 0, stats["mean"], jnp.nan)
    loss_bits, expected_bits = (jax.lax.bitcast_convert_type(value, jnp.int32) for value in (loss, expected))
    return jnp.stack([stop, saves, verdict, -least, newest, loss_bits, expected_bits])


def is_spike(stats: Mapping[str, jax.Array], loss: jax.Array, config: AnomalyConfig) -> jax.Array:
    deviation = jnp.maximum(jnp.sqrt(stats["variance"]), MIN_RELATIVE_DEVIATION * jnp.abs(stats["mean"]))
    return (stats["count"] >= config.spike_warmup_steps) & (loss > stats["mean"] + config.spike_zscore * deviation)


def update_stats(stats: Mapping[str, jax.Array], loss: jax.Array, decay: float) -> dict[str, jax.Array]:
    """Exponentially weighted mean and variance (Finch, 2009, "Incremental calculation of weighted mean and variance", eq. 143);
    of the first losses the plain ones, so that they do not lean towards 0."""
    count = stats["count"] + 1
    weight = jnp.maximum(1.0 - decay, 1.0 / count.astype(jnp.float32))
    difference = loss - stats["mean"]
    return {
        "count": count,
        "mean": stats["mean"] + weight * difference,
        "variance": (1.0 - weight) * (stats["variance"] + weight * difference * difference),
    }
