"""The mathematics of one training step and one evaluation step: pure functions, jitted by `compile.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainers.protocol import Batch, Loss, Task
from trainers.state import ModelParts, TrainState, add_wide

Bag = jax.Array
"""Metrics on the device: float32[num_metrics, 2], (sum, weight) pairs in the order of their names, since the last publish."""

STEP_METRICS = ("grad_norm", "learning_rate", "non_finite")
"""Of the step itself, after those of the task's loss."""


def make_train_step(
    task: Task,
    parts: ModelParts,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    names: Sequence[str],
    max_grad_norm: float | None,
) -> Callable[[TrainState, Bag, Batch, jax.Array], tuple[TrainState, Bag, jax.Array]]:
    """The function (state, bag, batch, flags) -> (state, bag, flags of all hosts).

    `batch` leaves are [accumulation_steps, micro_batch, ...]. Gradients are sums over targets, divided once by the number of
    targets of the whole global batch: exact for ragged targets at any accumulation and on any number of hosts.
    `flags` is int32[num_devices, num_flags], a host's wishes in the rows of its devices; every host gets their maximum, so that
    all take the same decision at the same step without a collective of their own.
    An update with a non-finite loss or gradient is not applied; it is counted in the bag.
    """

    def loss_sum(params: Any, batch: Batch) -> tuple[jax.Array, Loss]:
        loss = task.loss(parts.merge(params), batch)
        return loss.loss_sum.astype(jnp.float32), loss

    def train_step(state: TrainState, bag: Bag, batch: Batch, flags: jax.Array) -> tuple[TrainState, Bag, jax.Array]:
        loss, gradients = accumulate(jax.value_and_grad(loss_sum, has_aux=True), state.params, batch)
        num_targets = jnp.maximum(loss.num_targets.astype(jnp.float32), 1.0)
        gradients = jax.tree.map(lambda g: g / num_targets.astype(g.dtype), gradients)
        norm = optax.tree.norm(gradients)
        if max_grad_norm is not None:
            scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-6))
            gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss.loss_sum)
        params, opt_state = keep_unless(
            finite, (optax.apply_updates(state.params, updates), opt_state), (state.params, state.opt_state)
        )
        one = jnp.ones((), jnp.float32)
        bag = bag + pairs(
            names,
            {
                "loss": (loss.loss_sum, loss.num_targets),
                **loss.parts,
                "grad_norm": (norm, one),
                "learning_rate": (schedule(state.step), one),
                "non_finite": ((~finite).astype(jnp.float32), one),
            },
        )
        new_state = TrainState(
            step=state.step + finite.astype(jnp.int32),
            batch_index=state.batch_index + 1,
            params=params,
            opt_state=opt_state,
            totals=count_samples(state.totals, state.batch_index, batch, loss.num_targets),
        )
        return new_state, bag, jnp.max(flags, axis=0)

    return train_step


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


def count_samples(totals: dict[str, jax.Array], batch_index: jax.Array, batch: Batch, num_targets: Any) -> dict[str, jax.Array]:
    ids, weight = batch["sample_id"], batch["weight"]
    real = (weight > 0).astype(jnp.uint32)
    hashes = sample_hash(batch_index, jnp.arange(ids.size, dtype=jnp.uint32).reshape(ids.shape), ids) * real[None]
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
