"""Decides inside the step what becomes of an update: what the hosts ask for, and whether its loss can be trusted. Pure and
traced."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import jax
import jax.numpy as jnp

from trainers.config import AnomalyConfig

RUN_AHEAD_STEPS = 2
"""How many steps may be in flight when the host dispatches another."""


class UpdateStatus(IntEnum):
    """What the train step decided about its own update. The update is applied only with the status APPLIED."""

    APPLIED = 0
    ORDERED = 1
    """The batch is one of those that are to be skipped."""
    NON_FINITE = 2
    LOSS_SPIKE = 3
    OUT_OF_STEP = 4
    """The hosts came with different batches."""
    OVERFLOW = 5
    """The gradients overflowed float16; the scale of the loss is smaller from now on. This is no anomaly: it happens now and
    then."""
    SCALE_EXHAUSTED = 6
    """The gradients overflowed float16, and the scale of the loss is already at its minimum."""
    BROKE_STATE = 7
    """The update was applied, and has made values of the state infinite or NaN. The loop finds this by `not_finite` of
    REDUCED, and before a save: the step does not keep the old state, which would be a second one in memory."""


FLAGS = ("stop", "saves", "skip", "data_wait_us", "batch_index")
"""The input of each host to a step, as int32 in this order: its requests, how long it waited for its batch, and the index of the
batch. With snapshots each host also says which is the newest that is whole in its memory."""

REDUCED = ("stop", "saves", "status", "data_wait_us", "batch_index", "newest_batch_index", "not_finite", "loss", "expected_loss")
"""The result of a step for every host, as int32 in this order; the losses are the bits of a float32. `not_finite`: 1
if a parameter is infinite or NaN after the step. With snapshots comes which is the newest that is whole on every host."""

MIN_RELATIVE_DEVIATION = 0.01
"""The least standard deviation for the detection of spikes, relative to the mean: where losses hardly vary, a small chance
change would look like a spike."""


def reduce_flags(
    flags: jax.Array,
    loss: jax.Array,
    finite: jax.Array,
    stats: Mapping[str, jax.Array],
    config: AnomalyConfig,
    overflow: jax.Array | None = None,
) -> jax.Array:
    """Returns int32[len(REDUCED)]: the maximum of the hosts' requests and waits, and the `UpdateStatus`. `overflow` is the status
    by the scale of the loss; None where losses are not scaled. `not_finite` is 0: `with_look` sets it after the update."""
    # The least batch index too, as the maximum of its negative: a second collective would cost as much again.
    stop, saves, skip, data_wait_us, newest, *more = jnp.max(jnp.concatenate([flags, -flags[:, 4:]], axis=1), axis=0)
    least, *whole = more[flags.shape[1] - len(FLAGS) :]
    spike = is_spike(stats, loss, config) if config.loss_spike != "off" else jnp.zeros((), jnp.bool_)
    overflow = jnp.int32(UpdateStatus.APPLIED) if overflow is None else overflow
    # The first condition that holds wins. OUT_OF_STEP comes first: the hosts computed with different batches. ORDERED comes
    # before the anomalies: a batch that is skipped on purpose must not be acted on again when it is replayed.
    conditions = [-least != newest, skip > 0, ~finite, overflow != UpdateStatus.APPLIED, spike]
    statuses = [
        jnp.int32(UpdateStatus.OUT_OF_STEP),
        jnp.int32(UpdateStatus.ORDERED),
        jnp.int32(UpdateStatus.NON_FINITE),
        overflow,
        jnp.int32(UpdateStatus.LOSS_SPIKE),
    ]
    status = jnp.select(conditions, statuses, jnp.int32(UpdateStatus.APPLIED))
    # NaN, not 0: "no loss yet" must not read as an expected loss of 0.
    expected = jnp.where(stats["count"] > 0, stats["mean"], jnp.nan)
    # As bits: one int32 array for everything is one transfer to the host, and no conversion rounds the losses.
    loss_bits, expected_bits = (jax.lax.bitcast_convert_type(value, jnp.int32) for value in (loss, expected))
    return jnp.stack(
        [stop, saves, status, data_wait_us, -least, newest, jnp.int32(0), loss_bits, expected_bits, *(-one for one in whole)]
    )


def with_look(reduced: jax.Array, not_finite: jax.Array) -> jax.Array:
    """Returns `reduced` with what the look at the parameters after the update has found (int32)."""
    return reduced.at[REDUCED.index("not_finite")].set(not_finite)


def is_spike(stats: Mapping[str, jax.Array], loss: jax.Array, config: AnomalyConfig) -> jax.Array:
    """Returns whether `loss` lies more than `spike_zscore` standard deviations above the running mean."""
    deviation = jnp.maximum(jnp.sqrt(stats["variance"]), MIN_RELATIVE_DEVIATION * jnp.abs(stats["mean"]))
    return (stats["count"] >= config.spike_warmup_steps) & (loss > stats["mean"] + config.spike_zscore * deviation)


def update_stats(stats: Mapping[str, jax.Array], loss: jax.Array, decay: float) -> dict[str, jax.Array]:
    """Returns the exponentially weighted mean and variance (Finch, 2009, "Incremental calculation of weighted mean and
    variance", eq. 143). For the first losses they are the plain mean and variance, which are not biased towards 0."""
    count = stats["count"] + 1
    weight = jnp.maximum(1.0 - decay, 1.0 / count.astype(jnp.float32))
    difference = loss - stats["mean"]
    return {
        "count": count,
        "mean": stats["mean"] + weight * difference,
        "variance": (1.0 - weight) * (stats["variance"] + weight * difference * difference),
    }
