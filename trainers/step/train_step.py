"""The mathematics of one training step and one evaluation step: pure functions, jitted by `compile.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trainers.config import ParameterGroup
from trainers.config.arguments import TrainingArguments
from trainers.metrics import histograms as distributions
from trainers.metrics.accumulator import Kind, Layout, MetricSums, count
from trainers.metrics.histograms import parameter_names, parameter_norms
from trainers.optim import param_groups as groups
from trainers.optim.optimizers import parameters_to_evaluate
from trainers.protocol import Batch, Loss
from trainers.step.host_flags import REDUCED, UpdateStatus, reduce_flags, update_stats
from trainers.step.loss import LossFunction, scales_of
from trainers.step.loss_scale import overflow, update_scaler
from trainers.step.sample_digest import count_samples
from trainers.step.state import TrainState, add_sums

STEP_METRICS = {
    "grad_norm": Kind.MEAN,
    "learning_rate": Kind.LAST,
    "skipped_batches": Kind.SUM,
    "mean_loss": Kind.LAST,
    "tokens": Kind.SUM,
    "samples": Kind.SUM,
    "total_tokens": Kind.COUNT,
    "total_samples": Kind.COUNT,
}
"""Of the step itself, after those of the task's loss. `skipped_batches` counts updates that were not applied; all others are of
updates that were."""

MicroStepHook = Callable[[Loss, Any, Batch], tuple[Loss, Any]]
"""(loss, gradients, micro-batch) -> (loss, gradients): sums over the micro-batch's targets. Pure and traced."""


def step_metrics(params: Any, arguments: TrainingArguments) -> dict[str, Kind]:
    """STEP_METRICS, and those that were asked for."""
    norms = parameter_names(params) if arguments.metrics.per_parameter_grad_norm else ()
    scale = {"loss_scale": Kind.LAST} if arguments.dtype == "float16" else {}
    return {**STEP_METRICS, **scale, **{f"grad_norm/{name}": Kind.MEAN for name in norms}}


class StepOutput(NamedTuple):
    state: TrainState
    metric_sums: MetricSums
    reduced: jax.Array
    """int32[len(REDUCED)]: what all hosts get of this step."""
    measured: MetricSums
    """What this step added to the metric sums."""
    distributions: jax.Array | None = None
    """Of `histograms.measure`; None if they are off."""


class Sums(NamedTuple):
    """Over the micro-batches of a step."""

    loss_sum: jax.Array
    num_targets: jax.Array
    num_tokens: jax.Array
    """uint32"""
    metric_sums: MetricSums
    gradients: Any


def make_train_step(
    loss_function: LossFunction,
    layout: Layout,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    arguments: TrainingArguments,
    on_micro_step: MicroStepHook | None = None,
    param_groups: Sequence[ParameterGroup] = (),
) -> Callable[[TrainState, MetricSums, Batch, jax.Array], StepOutput]:
    """The function (state, metric_sums, batch, flags) -> StepOutput. `layout` is that of the loss's metrics and STEP_METRICS.

    `batch` leaves are [accumulation_steps, micro_batch, ...]. Gradients are sums over targets, divided once by the number of
    targets of the whole global batch: exact for ragged targets at any accumulation and on any number of hosts.
    `flags` is int32[num_devices, len(FLAGS)], a host's in the rows of its devices; every host gets `reduced` (REDUCED), so that
    all take the same decision at the same step without a collective of their own.
    With any status but APPLIED all of the state but `batch_index` stays as it was, whatever was computed: to skip a batch on
    order is, bit for bit, to find it bad. Such a batch is counted in the metric sums, and adds
    nothing else to them. Only an overflow of
    float16 also changes the scale of the loss.
    Of frozen parameters (`param_groups`) there are no gradients; `optimizer` is one that `groups.freezing` gives.
    """

    def train_step(state: TrainState, metric_sums: MetricSums, batch: Batch, flags: jax.Array) -> StepOutput:
        sums = accumulate(loss_function, layout, on_micro_step, state, batch, param_groups)
        num_targets = jnp.maximum(sums.num_targets, 1.0)
        mean_loss = sums.loss_sum / num_targets
        gradients = jax.tree.map(lambda g: g / num_targets.astype(g.dtype), sums.gradients)
        norm = optax.tree.norm(gradients)
        # Of the gradients as they are before they are clipped, like the norm of all.
        norms = parameter_norms(gradients) if arguments.metrics.per_parameter_grad_norm else {}
        whole = groups.with_zeros(gradients, state.params)
        measured_arrays = distributions.measure(state.params, whole, state.batch_index, arguments.distributions)
        clipped = clip(gradients, norm, arguments.optimizer.max_grad_norm)
        updates, opt_state = optimizer.update(clipped, state.opt_state, state.params)
        finite, overflowed = jnp.isfinite(mean_loss), overflow(state.scaler, norm, arguments.loss_scale)
        if overflowed is None:
            finite &= jnp.isfinite(norm)
        reduced = reduce_flags(flags, mean_loss, finite, state.loss_stats, arguments.anomalies, overflowed)
        verdict = reduced[REDUCED.index("verdict")]
        applied, scaler = verdict == UpdateStatus.APPLIED, update_scaler(state.scaler, verdict, arguments.loss_scale)
        totals = count_samples(state.totals, state.batch_index, batch, sums.num_tokens, arguments.micro_batch_size)
        loss_stats = update_stats(state.loss_stats, mean_loss, arguments.anomalies.spike_decay)
        scalars = {"grad_norm": norm, "learning_rate": schedule(state.step), "mean_loss": loss_stats["mean"], **norms}
        step_metrics, new_sums = measure_step(layout, state, sums, batch, totals, scalars, applied)
        new_state = TrainState(
            step=state.step + 1,
            batch_index=state.batch_index,
            params=groups.apply_updates(state.params, updates),
            opt_state=opt_state,
            totals=totals,
            sums=new_sums,
            loss_stats=loss_stats,
            scaler=dict(state.scaler),
        )
        kept = dataclasses.replace(keep_unless(applied, new_state, state), batch_index=state.batch_index + 1, scaler=scaler)
        return StepOutput(kept, layout.combine(metric_sums, step_metrics), reduced, step_metrics, measured_arrays)

    return train_step


def measure_step(
    layout: Layout,
    state: TrainState,
    sums: Sums,
    batch: Batch,
    totals: Mapping[str, jax.Array],
    scalars: Mapping[str, jax.Array],
    applied: jax.Array,
) -> tuple[MetricSums, dict[str, Any]]:
    """The metrics of one step, and the sums that its state keeps (`totals` are those after it). Of an update that was not
    applied, the metrics say only that it was not."""
    counts = {"skipped_batches": 0.0, "tokens": sums.num_tokens, "samples": jnp.sum(batch["weight"] > 0)}
    totalled = {f"total_{name}": count(totals[name]) for name in ("tokens", "samples")}
    scale_used = {"loss_scale": (state.scaler["scale"], 1.0)} if state.scaler else {}
    pairs = layout.pairs({name: (value, 1.0) for name, value in {**scalars, **counts}.items()} | totalled | scale_used)
    step_metrics, new_sums = add_sums(state.sums, layout, sums.metric_sums + pairs)
    left_out = layout.pairs({"skipped_batches": (1.0, 1.0), **scale_used})
    return jnp.where(applied, step_metrics, left_out), new_sums


def make_eval_step(loss_function: LossFunction, layout: Layout) -> Callable[[TrainState, MetricSums, Batch], MetricSums]:
    """The function (state, metric_sums, batch) -> metric_sums, of the loss's metrics alone. Nothing but the sums is donated."""

    def eval_step(state: TrainState, metric_sums: MetricSums, batch: Batch) -> MetricSums:
        params = parameters_to_evaluate(state.opt_state, state.params)
        loss = loss_function(params, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch), state.step)
        return layout.combine(metric_sums, loss_pairs(layout, loss), steps=False)

    return eval_step


def accumulate(
    loss_function: LossFunction,
    layout: Layout,
    on_micro_step: MicroStepHook | None,
    state: TrainState,
    batch: Batch,
    param_groups: Sequence[ParameterGroup] = (),
) -> Sums:
    """Over the micro-batches (first dimension of every leaf). In the place of the gradients of frozen parameters is None."""
    first = jax.tree.map(lambda leaf: leaf[0], batch)
    scales = None
    if jax.eval_shape(loss_function.term_targets, state.params, first, state.step):
        counts = _scan_sums(lambda one: loss_function.term_targets(state.params, one, state.step), _add, batch)
        scales = scales_of(counts)

    trained, loss_scale = groups.trainable(param_groups, state.params), state.scaler.get("scale", 1.0)

    def objective(trained: Any, micro_batch: Batch) -> tuple[jax.Array, Loss]:
        loss = loss_function(groups.completed(trained, state.params), micro_batch, state.step, scales)
        return loss.loss_sum.astype(jnp.float32) * loss_scale, loss

    def micro(micro_batch: Batch) -> Sums:
        (_, loss), gradients = jax.value_and_grad(objective, has_aux=True)(trained, micro_batch)
        gradients = jax.tree.map(lambda g: g / loss_scale, gradients) if state.scaler else gradients
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
        return _add(one, other)._replace(metric_sums=layout.combine(one.metric_sums, other.metric_sums, steps=False))

    sums = _scan_sums(micro, add, batch)
    return sums._replace(metric_sums=_weighed(layout, sums)) if scales else sums


def _weighed(layout: Layout, sums: Sums) -> MetricSums:
    """The total of a loss that is a dict weighs as much as its first term has targets: 1, if only other terms have any."""
    row = layout.names.index("loss")
    weight = jnp.where(sums.num_targets > 0, sums.num_targets, (sums.loss_sum != 0).astype(jnp.float32))
    return sums.metric_sums.at[row, 1].set(weight)


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


def loss_pairs(layout: Layout, loss: Loss) -> MetricSums:
    return layout.pairs({"loss": (loss.loss_sum, loss.num_targets), **loss.parts})


def clip(gradients: Any, norm: jax.Array, max_norm: float | None) -> Any:
    """Scaled down to a global norm of `max_norm`, if theirs is greater."""
    if max_norm is None:
        return gradients
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-6))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)


def keep_unless(apply: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(apply, a, b), new, old)


def _add(one: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, one, other)
