"""The mathematics of one training step and one evaluation step: pure functions, jitted by `compile.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainers.anomalies import Verdict
from trainers.arguments import TrainingArguments
from trainers.protocol import Batch, Loss, Task
from trainers.sections import AnomalyConfig
from trainers.state import ModelParts, TrainState, add_wide

Bag = jax.Array
"""Metrics on the device: float32[num_metrics, 2], (sum, weight) pairs in the order of their names, since the last publish."""

STEP_METRICS = ("grad_norm", "learning_rate", "skipped_batches")
"""Of the step itself, after those of the task's loss. The last one counts; all others are means over updates applied."""

FLAGS = ("stop", "saves", "skip", "batch_index")
"""What each host gives to a step, as int32, in this order: its wishes, and which batch it takes the step with."""

REDUCED = ("stop", "saves", "verdict", "batch_index", "newest_batch_index", "loss", "expected_loss")
"""What every host gets of a step, in this order: int32, the losses as the bits of a float32."""

MIN_RELATIVE_DEVIATION = 0.01
"""The least standard deviation that spikes are measured by, as a part of the mean: where losses hardly vary, chance leaps."""


def make_train_step(
    task: Task,
    parts: ModelParts,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    names: Sequence[str],
    arguments: TrainingArguments,
) -> Callable[[TrainState, Bag, Batch, jax.Array], tuple[TrainState, Bag, jax.Array]]:
    """The function (state, bag, batch, flags) -> (state, bag, reduced).

    `batch` leaves are [accumulation_steps, micro_batch, ...]. Gradients are sums over targets, divided once by the number of
    targets of the whole global batch: exact for ragged targets at any accumulation and on any number of hosts.
    `flags` is int32[num_devices, len(FLAGS)], a host's in the rows of its devices; every host gets `reduced` (REDUCED), so that
    all take the same decision at the same step without a collective of their own.
    With any verdict but APPLIED all of the state but `batch_index` stays as it was, whatever was computed: to skip a batch on
    order is, bit for bit, to find it bad. Such a batch is counted in the bag, and adds nothing else to it.
    """
    max_grad_norm = arguments.optimizer.max_grad_norm

    def loss_sum(params: Any, batch: Batch) -> tuple[jax.Array, Loss]:
        loss = task.loss(parts.merge(params), batch)
        return loss.loss_sum.astype(jnp.float32), loss

    def train_step(state: TrainState, bag: Bag, batch: Batch, flags: jax.Array) -> tuple[TrainState, Bag, jax.Array]:
        loss, gradients = accumulate(jax.value_and_grad(loss_sum, has_aux=True), state.params, batch)
        num_targets = jnp.maximum(loss.num_targets.astype(jnp.float32), 1.0)
        mean_loss = loss.loss_sum.astype(jnp.float32) / num_targets
        gradients = jax.tree.map(lambda g: g / num_targets.astype(g.dtype), gradients)
        norm = optax.tree.norm(gradients)
        if max_grad_norm is not None:
            scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-6))
            gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        finite = jnp.isfinite(norm) & jnp.isfinite(mean_loss)
        reduced = reduce_flags(flags, mean_loss, finite, state.loss_stats, arguments.anomalies)
        applied = reduced[REDUCED.index("verdict")] == Verdict.APPLIED
        one, none = jnp.ones((), jnp.float32), jnp.zeros((), jnp.float32)
        measured = {
            "loss": (loss.loss_sum, loss.num_targets),
            **loss.parts,
            "grad_norm": (norm, one),
            "learning_rate": (schedule(state.step), one),
            "skipped_batches": (none, one),
        }
        skipped = {**dict.fromkeys(names, (none, none)), "skipped_batches": (one, one)}
        bag = bag + jnp.where(applied, pairs(names, measured), pairs(names, skipped))
        new_state = TrainState(
            step=state.step + 1,
            batch_index=state.batch_index,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            totals=count_samples(state.totals, state.batch_index, batch, loss.num_targets, arguments.micro_batch_size),
            loss_stats=update_stats(state.loss_stats, mean_loss, arguments.anomalies.spike_decay),
        )
        kept = keep_unless(applied, new_state, state)
        return dataclasses.replace(kept, batch_index=state.batch_index + 1), bag, reduced

    return train_step


def reduce_flags(
    flags: jax.Array, loss: jax.Array, finite: jax.Array, stats: Mapping[str, jax.Array], config: AnomalyConfig
) -> jax.Array:
    """int32[len(REDUCED)]: the maximum of what hosts wish, and the verdict on the update."""
    # The least index too, by one maximum: a collective of its own would cost as much again.
    stop, saves, skip, newest, least = jnp.max(jnp.concatenate([flags, -flags[:, -1:]], axis=1), axis=0)
    spike = is_spike(stats, loss, config) if config.loss_spike != "off" else jnp.zeros((), jnp.bool_)
    verdict = jnp.select(
        [-least != newest, skip > 0, ~finite, spike],
        [jnp.int32(v) for v in (Verdict.OUT_OF_STEP, Verdict.ORDERED, Verdict.NON_FINITE, Verdict.LOSS_SPIKE)],
        jnp.int32(Verdict.APPLIED),
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


def make_eval_step(task: Task, parts: ModelParts, names: Sequence[str]) -> Callable[[Any, Bag, Batch], Bag]:
    """The function (params, bag, batch) -> bag, of the loss's metrics alone. Nothing is donated but the bag."""

    def eval_step(params: Any, bag: Bag, batch: Batch) -> Bag:
        model = parts.merge(params)
        loss = task.loss(model, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch))
        return bag + pairs(names, {"loss": (loss.loss_sum, loss.num_targets), **loss.parts})

    return eval_step


def accumulate(value_and_grad: Callable, params: Any, batch: Batch) -> tuple[Loss, Any]:
    """Sums of loss, targets, parts and gradients over the micro-batches (first dimension of every leaf)."""
    num_micro_batches = jax.tree.leaves(batch)[0].shape[0]

    def micro(micro_batch: Batch) -> tuple[Loss, Any]:
        (_, loss), gradients = value_and_grad(params, micro_batch)
        return loss, gradients

    if num_micro_batches == 1:
        return micro(jax.tree.map(lambda leaf: leaf[0], batch))
    shapes = jax.eval_shape(micro, jax.tree.map(lambda leaf: leaf[0], batch))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), shapes)
    total, _ = jax.lax.scan(lambda sums, one: (jax.tree.map(jnp.add, sums, micro(one)), None), zeros, batch)
    return total


def keep_unless(apply: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(apply, a, b), new, old)


def pairs(names: Sequence[str], values: Mapping[str, tuple[Any, Any]]) -> Bag:
    """What one batch adds to the bag."""
    return jnp.stack([jnp.stack([jnp.asarray(part, jnp.float32) for part in values[name]]) for name in names])


def count_samples(
    totals: dict[str, jax.Array], batch_index: jax.Array, batch: Batch, num_targets: Any, micro_batch_size: int
) -> dict[str, jax.Array]:
    """`micro_batch_size` is without the padding, which differs with the number of hosts: a sample's row must not."""
    ids, weight = batch["sample_id"], batch["weight"]
    real = (weight > 0).astype(jnp.uint32)
    micro, place = (jax.lax.broadcasted_iota(jnp.uint32, ids.shape, dimension) for dimension in (0, 1))
    hashes = sample_hash(batch_index, micro * jnp.uint32(micro_batch_size) + place, ids) * real[None]
    return {
        "tokens": add_wide(totals["tokens"], jnp.asarray(num_targets).astype(jnp.uint32)),
        "samples": add_wide(totals["samples"], jnp.sum(real, dtype=jnp.uint32)),
        "samples_digest": totals["samples_digest"] + jnp.sum(hashes, axis=tuple(range(1, hashes.ndim)), dtype=jnp.uint32),
    }


def sample_hash(batch_index: jax.Array, row: jax.Array, sample_id: jax.Array) -> jax.Array:
    """uint32[2, ...]: two independent mixes (the finalizer of MurmurHash3) of where a sample was trained on."""

    def mix(h: jax.Array) -> jax.Array:
        h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
        return h ^ (h >> 16)

    def lane(seed: int) -> jax.Array:
        h = mix(jnp.asarray(batch_index).astype(jnp.uint32) + jnp.uint32(seed))
        return mix(mix(h ^ row.astype(jnp.uint32)) ^ sample_id.astype(jnp.uint32))

    return jnp.stack([lane(0x9E3779B9), lane(0x7F4A7C15)])
