"""The mathematics of one training step and one evaluation step: pure functions, jitted by `compile.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trainers.anomalies import Verdict
from trainers.arguments import TrainingArguments
from trainers.bag import Bag, Kind, Layout
from trainers.loss import LossFunction, scales_of
from trainers.protocol import Batch, Loss
from trainers.samples import count_samples
from trainers.state import TrainState, add_sums
from trainers.verdict import REDUCED, reduce_flags, update_stats

STEP_METRICS = {"grad_norm": Kind.MEAN, "learning_rate": Kind.LAST, "skipped_batches": Kind.SUM}
"""Of the step itself, after those of the task's loss. `skipped_batches` counts updates that were not applied; all others are of
updates that were."""

MicroStepHook = Callable[[Loss, Any, Batch], tuple[Loss, Any]]
"""(loss, gradients, micro-batch) -> (loss, gradients): sums over the micro-batch's targets. Pure and traced."""


class StepOutput(NamedTuple):
    state: TrainState
    bag: Bag
    reduced: jax.Array
    """int32[len(REDUCED)]: what all hosts get of this step."""
    measured: Bag
    """What this step added to the bag."""


class Sums(NamedTuple):
    """Over the micro-batches of a step."""

    loss_sum: jax.Array
    num_targets: jax.Array
    num_tokens: jax.Array
    """uint32"""
    bag: Bag
    gradients: Any


def make_train_step(
    loss_function: LossFunction,
    layout: Layout,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    arguments: TrainingArguments,
    on_micro_step: MicroStepHook | None = None,
) -> Callable[[TrainState, Bag, Batch, jax.Array], StepOutput]:
    """The function (state, bag, batch, flags) -> StepOutput. `layout` is that of the loss's metrics and STEP_METRICS.

    `batch` leaves are [accumulation_steps, micro_batch, ...]. Gradients are sums over targets, divided once by the number of
    targets of the whole global batch: exact for ragged targets at any accumulation and on any number of hosts.
    `flags` is int32[num_devices, len(FLAGS)], a host's in the rows of its devices; every host gets `reduced` (REDUCED), so that
    all take the same decision at the same step without a collective of their own.
    With any verdict but APPLIED all of the state but `batch_index` stays as it was, whatever was computed: to skip a batch on
    order is, bit for bit, to find it bad. Such a batch is counted in the bag, and adds nothing else to it.
    """
    max_grad_norm = arguments.optimizer.max_grad_norm

    def train_step(state: TrainState, bag: Bag, batch: Batch, flags: jax.Array) -> StepOutput:
        sums = accumulate(loss_function, layout, on_micro_step, state, batch)
        num_targets = jnp.maximum(sums.num_targets, 1.0)
        mean_loss = sums.loss_sum / num_targets
        gradients = jax.tree.map(lambda g: g / num_targets.astype(g.dtype), sums.gradients)
        norm = optax.tree.norm(gradients)
        if max_grad_norm is not None:
            scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-6))
            gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        finite = jnp.isfinite(norm) & jnp.isfinite(mean_loss)
        reduced = reduce_flags(flags, mean_loss, finite, state.loss_stats, arguments.anomalies)
        applied = reduced[REDUCED.index("verdict")] == Verdict.APPLIED
        own = {"grad_norm": (norm, 1.0), "learning_rate": (schedule(state.step), 1.0), "skipped_batches": (0.0, 1.0)}
        measured, new_sums = add_sums(state.sums, layout, sums.bag + layout.pairs(own))
        measured = jnp.where(applied, measured, layout.pairs({"skipped_batches": (1.0, 1.0)}))
        new_state = TrainState(
            step=state.step + 1,
            batch_index=state.batch_index,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            totals=count_samples(state.totals, state.batch_index, batch, sums.num_tokens, arguments.micro_batch_size),
            sums=new_sums,
            loss_stats=update_stats(state.loss_stats, mean_loss, arguments.anomalies.spike_decay),
        )
        kept = dataclasses.replace(keep_unless(applied, new_state, state), batch_index=state.batch_index + 1)
        return StepOutput(kept, layout.combine(bag, measured), reduced, measured)

    return train_step


def make_eval_step(loss_function: LossFunction, layout: Layout) -> Callable[[TrainState, Bag, Batch], Bag]:
    """The function (state, bag, batch) -> bag, of the loss's metrics alone. Nothing is donated but the bag."""

    def eval_step(state: TrainState, bag: Bag, batch: Batch) -> Bag:
        loss = loss_function(state.params, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch), state.step)
        return layout.combine(bag, loss_pairs(layout, loss))

    return eval_step


def accumulate(
    loss_function: LossFunction, layout: Layout, on_micro_step: MicroStepHook | None, state: TrainState, batch: Batch
) -> Sums:
    """Over the micro-batches (first dimension of every leaf)."""
    first = jax.tree.map(lambda leaf: leaf[0], batch)
    scales = None
    if jax.eval_shape(loss_function.term_targets, state.params, first, state.step):
        counts = _scan_sums(lambda one: loss_function.term_targets(state.params, one, state.step), _add, batch)
        scales = scales_of(counts)

    def objective(params: Any, micro_batch: Batch) -> tuple[jax.Array, Loss]:
        loss = loss_function(params, micro_batch, state.step, scales)
        return loss.loss_sum.astype(jnp.float32), loss

    def micro(micro_batch: Batch) -> Sums:
        (_, loss), gradients = jax.value_and_grad(objective, has_aux=True)(state.params, micro_batch)
        if on_micro_step is not None:
            loss, gradients = on_micro_step(loss, gradients, micro_batch)
        num_targets = jnp.asarray(loss.num_targets)
        tokens = num_targets if loss.num_tokens is None else jnp.asarray(loss.num_tokens)
        return Sums(
            loss.loss_sum.astype(jnp.float32),
            num_targets.astype(jnp.float32),
            tokens.astype(jnp.uint32),
            loss_pairs(layout, loss),
            gradients,
        )

    def add(one: Sums, other: Sums) -> Sums:
        return _add(one, other)._replace(bag=layout.combine(one.bag, other.bag, steps=False))

    return _scan_sums(micro, add, batch)


def _scan_sums(function: Callable, add: Callable, batch: Batch) -> Any:
    """`add` of what `function` gives for each micro-batch, in order; floating-point sums in float32 at least."""
    first = jax.tree.map(lambda leaf: leaf[0], batch)
    if jax.tree.leaves(batch)[0].shape[0] == 1:
        return function(first)

    def wide(leaf: Any) -> Any:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32) if floating else leaf.dtype)

    zeros = jax.tree.map(wide, jax.eval_shape(function, first))
    total, _ = jax.lax.scan(lambda sums, one: (add(sums, function(one)), None), zeros, batch)
    return total


def loss_pairs(layout: Layout, loss: Loss) -> Bag:
    return layout.pairs({"loss": (loss.loss_sum, loss.num_targets), **loss.parts})


def keep_unless(apply: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(apply, a, b), new, old)


def _add(one: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, one, other)
