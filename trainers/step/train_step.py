"""The mathematics of one training step and one evaluation step: pure functions, jitted by their caller."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gangway.errors import UsageError
from trainers.config import ParameterGroup
from trainers.config.arguments import TrainingArguments
from trainers.metrics import histograms
from trainers.metrics.accumulator import Kind, Layout, MetricSums, count
from trainers.metrics.histograms import parameter_names, parameter_norms
from trainers.optim.optimizers import group_rates, parameters_to_evaluate
from trainers.optim.param_groups import apply_updates, completed, rate_names, trainable, with_zeros
from trainers.optim.precision import any_narrow, share_lost
from trainers.protocol import Batch, Loss, Pruner
from trainers.step import rest_of_model
from trainers.step.finite import any_not_finite
from trainers.step.host_flags import REDUCED, UpdateStatus, reduce_flags, update_stats, with_look
from trainers.step.loss import LossFunction, safe_divisor, scales_of
from trainers.step.loss_scale import overflow, update_scaler
from trainers.step.offloaded_update import offloaded_update
from trainers.step.rest_of_model import Rest, stays_finite
from trainers.step.sample_digest import count_samples
from trainers.step.state import ModelParts, TrainState, add_sums

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
"""The metrics of the step itself; they follow those of the task's loss. `skipped_batches` counts updates that were not applied;
all others cover only updates that were."""

ForwardBackward = Callable[[Callable[[Any, Batch], tuple[jax.Array, Loss]], Any, Batch], tuple[tuple[jax.Array, Loss], Any]]
"""(objective, parameters, micro-batch) -> ((value, loss), gradients), like `jax.value_and_grad(objective, has_aux=True)`."""

Frozen = Mapping[str, Any]
NOTHING: Frozen = MappingProxyType({})

EVALUATION_COUNTS = {"counted/tokens": Kind.SUM, "counted/samples": Kind.SUM}
"""What an evaluation counts beside the metrics of the loss, for its rates."""

MicroStepHook = Callable[[Loss, Any, Batch], tuple[Loss, Any]]
"""(loss, gradients, micro-batch) -> (loss, gradients): sums over the micro-batch's targets. Pure and traced."""


def step_metrics(params: Any, arguments: TrainingArguments, param_groups: Sequence[ParameterGroup]) -> dict[str, Kind]:
    """Returns STEP_METRICS, those that the arguments ask for, and the learning rates of the groups."""
    norms = parameter_names(params) if arguments.metrics.per_parameter_grad_norm else ()
    scale = {"loss_scale": Kind.LAST} if arguments.dtype == "float16" else {}
    lost = {"lost_updates": Kind.MEAN} if arguments.optimizer.master_weights == "none" and any_narrow(params) else {}
    means = {f"mean_{name}": Kind.LAST for name in arguments.metrics.running_means}
    return {
        **STEP_METRICS,
        **scale,
        **lost,
        **means,
        **dict.fromkeys(rate_names(param_groups), Kind.LAST),
        **{f"grad_norm/{name}": Kind.MEAN for name in norms},
    }


class StepOutput(NamedTuple):
    state: TrainState
    metric_sums: MetricSums
    reduced: jax.Array
    """int32[len(REDUCED)]: the result of this step for all hosts."""
    step_metrics: MetricSums
    """What this step added to the metric sums."""
    distributions: jax.Array | None = None
    """The result of `histograms.measure`; None if histograms are off."""


class Sums(NamedTuple):
    """Sums over the micro-batches of a step."""

    loss_sum: jax.Array
    num_targets: jax.Array
    num_tokens: jax.Array
    """uint32: an integer, because float32 counts exactly to 2**24 only."""
    rest_of_tokens: jax.Array
    """float32: what is less than 1 in the tokens of each micro-batch: sums of weights, where a loss gives no number of tokens."""
    metric_sums: MetricSums
    gradients: Any
    model_state: Any
    """No sum, but the state after the last micro-batch."""


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """What a train step is made of."""

    loss: LossFunction
    layout: Layout
    """Of the loss's metrics and STEP_METRICS."""
    optimizer: optax.GradientTransformation
    """From `trainers.optim.param_groups.freezing`."""
    schedule: optax.Schedule
    arguments: TrainingArguments
    param_groups: Sequence[ParameterGroup] = ()
    """Frozen parameters have no gradients."""
    pruner: Pruner | None = None
    on_micro_step: MicroStepHook | None = None
    forward_backward: ForwardBackward | None = None


def make_train_step(spec: StepSpec) -> Callable[..., StepOutput]:
    """Returns the function (state, metric_sums, batch, flags, frozen) -> StepOutput. `frozen` are the weights that the step only
    reads (`Rest.frozen`); it may be left out where there are none.

    `batch` leaves are [accumulation_steps, micro_batch, ...]. Gradients are sums over targets, divided once by the number of
    targets of the whole global batch. This is exact for ragged targets, at any accumulation and on any number of hosts.

    `flags` is int32[num_devices, len(FLAGS)]: a host fills the rows of its devices. Every host gets the same `reduced`
    (REDUCED), so that all take the same decision at the same step without a further collective.

    With any status but APPLIED the whole state except `batch_index` stays as it was, whatever was computed. Skipping a batch on
    order is therefore, bit for bit, the same as finding it bad. Such a batch is counted in the metric sums, and adds nothing
    else to them. Only an overflow of float16 also changes the scale of the loss.

    The model's other state, such as batch statistics, goes from micro-batch to micro-batch: each one updates it once, from its
    rows of all hosts. An update that makes a value of it infinite or NaN counts as not finite.
    """
    arguments, param_groups, pruner = spec.arguments, spec.param_groups, spec.pruner
    rates_of_groups = group_rates(arguments.optimizer, spec.schedule, param_groups)

    def train_step(
        state: TrainState, metric_sums: MetricSums, batch: Batch, flags: jax.Array, frozen: Frozen = NOTHING
    ) -> StepOutput:
        seen = dataclasses.replace(state, params=parameters_seen(pruner, param_groups, state))
        sums = accumulate(spec, seen, batch, frozen)
        mean_loss, gradients = means(sums)
        # Before clipping: this is the norm that is published and checked.
        norm = optax.tree.norm(gradients)
        norms = parameter_norms(gradients) if arguments.metrics.per_parameter_grad_norm else {}
        all_gradients = with_zeros(gradients, state.params)
        # Parameters before the update, gradients before clipping: both as this step's loss has seen them.
        bins = histograms.measure(state.params, all_gradients, state.batch_index, arguments.distributions)
        clipped = clip(gradients, norm, arguments.optimizer.max_grad_norm)
        finite, overflowed = jnp.isfinite(mean_loss), overflow(state.scaler, norm, arguments.loss_scale)
        if sums.model_state:  # it may not be finite though the loss is: an infinite variance makes zeros
            finite &= stays_finite(sums.model_state, state.model_state)
        if overflowed is None:
            finite &= jnp.isfinite(norm)  # with a scaled loss, a norm that is not finite is an overflow, and no anomaly
        reduced = reduce_flags(flags, mean_loss, finite, state.loss_stats, arguments.anomalies, overflowed)
        status = reduced[REDUCED.index("status")]
        applied, scaler = status == UpdateStatus.APPLIED, update_scaler(state.scaler, status, arguments.loss_scale)
        updates, opt_state = offloaded_update(spec.optimizer, applied, clipped, state.opt_state, state.params)
        # Counted for every batch; `keep_unless` takes it back if the update is not applied.
        totals = count_samples(state.totals, state.batch_index, batch, sums.num_tokens, arguments.micro_batch_size)
        loss_stats = update_stats(state.loss_stats, mean_loss, arguments.anomalies.spike_decay)
        # By `state.step`, not by the batch index: batches that were skipped do not move the schedule.
        rates = {name: rate(state.step) for name, rate in {"learning_rate": spec.schedule, **rates_of_groups}.items()}
        scalars = {"grad_norm": norm, **rates, "mean_loss": loss_stats["mean"], **norms}
        if "lost_updates" in spec.layout.names:
            scalars["lost_updates"] = share_lost(trainable(param_groups, state.params), updates)
        step_metrics, new_sums = measure_step(spec.layout, state, sums, batch, totals, scalars, applied)
        params, pruner_state = pruned(pruner, param_groups, state, apply_updates(state.params, updates))
        new_state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            opt_state=(),
            totals=totals,
            sums=new_sums,
            loss_stats=loss_stats,
            model_state=sums.model_state,
            pruner_state=pruner_state,
        )
        kept = keep_unless(applied, new_state, dataclasses.replace(state, opt_state=()))
        # The batch counts as drawn, and the scaler changes, with any status: otherwise the next step would draw it again.
        kept = dataclasses.replace(kept, opt_state=opt_state, batch_index=state.batch_index + 1, scaler=scaler)
        # Of the parameters themselves, and not only of loss and gradient: an optimizer may divide by zero.
        reduced = with_look(reduced, any_not_finite(kept.params))
        return StepOutput(kept, spec.layout.combine(metric_sums, step_metrics), reduced, step_metrics, bins)

    return train_step


def parameters_seen(pruner: Pruner | None, param_groups: Sequence[ParameterGroup], state: TrainState) -> Any:
    """Returns the parameters that the loss of a train step sees."""
    if pruner is None:
        return state.params
    return completed(pruner.pre_forward(trainable(param_groups, state.params), state.pruner_state, state.step), state.params)


def pruned(pruner: Pruner | None, param_groups: Sequence[ParameterGroup], state: TrainState, params: Any) -> tuple[Any, Any]:
    """Returns the parameters after the update of `state` as the pruner wants them, and its new state."""
    if pruner is None:
        return params, state.pruner_state
    # After the update, and not in it: added to a parameter, an update rounds, and a 0 must be exactly 0.
    trained, pruner_state = pruner.post_gradient(trainable(param_groups, params), state.pruner_state, state.step)
    return completed(trained, params), pruner_state


def means(sums: Sums) -> tuple[jax.Array, Any]:
    """Returns the mean loss and the mean gradients over the targets of the global batch."""
    # A batch of padding alone must give a loss of 0, and not NaN.
    num_targets = safe_divisor(sums.num_targets)
    # In float32: in bfloat16 2049 targets would be 2048.
    return sums.loss_sum / num_targets, jax.tree.map(lambda g: _wide(g) / num_targets, sums.gradients)


def measure_step(
    layout: Layout,
    state: TrainState,
    sums: Sums,
    batch: Batch,
    totals: Mapping[str, jax.Array],
    scalars: Mapping[str, jax.Array],
    applied: jax.Array,
) -> tuple[MetricSums, dict[str, Any]]:
    """Returns the metrics of one step, and the totals for its state (`totals` are those after the step). If the update was not
    applied, the metrics say only that."""
    counts = {"skipped_batches": 0.0, "tokens": sums.num_tokens, "samples": jnp.sum(batch["weight"] > 0)}
    scale_used = {"loss_scale": (state.scaler["scale"], 1.0)} if state.scaler else {}
    values = {name: (value, 1.0) for name, value in {**scalars, **counts}.items()}
    pairs = layout.pairs(values | totals_so_far(totals) | scale_used)
    step_metrics, new_sums = add_sums(state.sums, layout, sums.metric_sums + pairs)
    left_out = layout.pairs({"skipped_batches": (1.0, 1.0), **scale_used})
    # Both are [num_metrics, 2].
    return jnp.where(applied, step_metrics, left_out), new_sums


def totals_so_far(totals: Mapping[str, jax.Array]) -> dict[str, tuple[jax.Array, jax.Array]]:
    return {f"total_{name}": count(totals[name]) for name in ("tokens", "samples")}


def make_eval_step(loss_function: LossFunction, layout: Layout, *, predicts: bool = False) -> Callable[..., Any]:
    """Returns the function (state, metric_sums, batch, frozen) -> metric_sums, for the loss's metrics alone. It donates only the
    sums.

    With `predicts` it returns (metric_sums, (predictions, rows)): the task's predictions, and the rows of the batch that they
    are of, with leaves [rows, ...].
    """

    def eval_step(state: TrainState, metric_sums: MetricSums, batch: Batch, frozen: Frozen = NOTHING) -> Any:
        params = parameters_to_evaluate(state.opt_state, state.params)
        # [accumulation_steps, rows, ...] -> [rows, ...]: without gradients there is nothing to accumulate.
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
        rest = loss_function.rest(state.model_state, rows, frozen=frozen)
        loss = loss_function(params, rows, state.step, rest=rest)
        num_tokens = loss.num_targets if loss.num_tokens is None else loss.num_tokens
        counts = {"counted/tokens": (num_tokens, 1.0), "counted/samples": (jnp.sum(rows["weight"] > 0), 1.0)}
        pairs = layout.pairs({"loss": (loss.loss_sum, loss.num_targets), **loss.parts, **counts})
        metric_sums = layout.combine(metric_sums, pairs, steps=False)
        if not predicts:
            return metric_sums
        # In the same program as the loss: the compiler computes the model once for both.
        return metric_sums, (loss_function.predictions(params, rows, state.step, rest), rows)

    return eval_step


def accumulate(spec: StepSpec, state: TrainState, batch: Batch, frozen: Frozen = NOTHING) -> Sums:
    """Returns the sums over the micro-batches (the first dimension of every leaf). Frozen parameters have None in place of a
    gradient."""
    loss_function, layout = spec.loss, spec.layout
    first = jax.tree.map(lambda leaf: leaf[0], batch)
    scales = None

    def rest_of(model_state: Any, micro_batch: Batch, number: Any) -> Rest:
        return loss_function.rest(model_state, micro_batch, state.batch_index, number, frozen)

    def targets(model_state: Any, micro_batch: Batch, number: Any) -> tuple[Any, Any]:
        rest = rest_of(model_state, micro_batch, number)
        return loss_function.term_targets(state.params, micro_batch, state.step, rest), model_state

    # By shapes alone: asking whether the loss has terms computes nothing.
    if jax.eval_shape(targets, state.model_state, first, 0)[0]:
        # A pass before the gradients: each term's mean is over the whole global batch, of which a micro-batch is a part.
        scales = scales_of(_scan_sums(targets, _add, batch, state.model_state, loss_function.parts)[0])

    trained, loss_scale = trainable(spec.param_groups, state.params), state.scaler.get("scale", 1.0)

    def micro(model_state: Any, micro_batch: Batch, number: Any) -> tuple[Sums, Any]:
        rest = rest_of(model_state, micro_batch, number)

        def objective(trained: Any, micro_batch: Batch) -> tuple[jax.Array, Loss]:
            loss = loss_function(completed(trained, state.params), micro_batch, state.step, scales, rest)
            # float32 before the scale: a scaled sum of many losses would overflow float16.
            return loss.loss_sum.astype(jnp.float32) * loss_scale, loss

        # By the trained parameters alone: for frozen ones no gradient is computed.
        if spec.forward_backward is None:
            (_, loss), gradients = jax.value_and_grad(objective, has_aux=True)(trained, micro_batch)
        else:
            (_, loss), gradients = spec.forward_backward(objective, trained, micro_batch)
        # Before the user's hook, which may return a loss of its own.
        model_state = _same_names(loss.model_state, model_state)
        # Before the user's hook and before the sum: both work with gradients of the true size.
        gradients = jax.tree.map(lambda g: g / loss_scale, gradients) if state.scaler else gradients
        if spec.on_micro_step is not None:
            loss, gradients = spec.on_micro_step(loss, gradients, micro_batch)
        num_targets = jnp.asarray(loss.num_targets)
        tokens = num_targets if loss.num_tokens is None else jnp.asarray(loss.num_tokens)
        whole_tokens = jnp.floor(tokens)
        sums = Sums(
            # float32 in any case: the carry of the scan must keep its types.
            loss.loss_sum.astype(jnp.float32),
            num_targets.astype(jnp.float32),
            whole_tokens.astype(jnp.uint32),
            (tokens - whole_tokens).astype(jnp.float32),
            loss_pairs(layout, loss),
            gradients,
            {},
        )
        return sums, model_state

    def add(total: Sums, addend: Sums) -> Sums:
        # Metrics are not all sums: some are maxima, or the newest value.
        metric_sums = layout.combine(total.metric_sums, addend.metric_sums, steps=False)
        return _add(total, addend)._replace(metric_sums=metric_sums)

    sums, model_state = _scan_sums(micro, add, batch, state.model_state, loss_function.parts)
    sums = sums._replace(model_state=model_state, num_tokens=sums.num_tokens + _rounded_up(sums.rest_of_tokens))
    return sums._replace(metric_sums=_with_loss_weight(layout, sums)) if scales else sums


def _rounded_up(rest: jax.Array) -> jax.Array:
    # Not by what rounding has added to a sum that is whole.
    return jnp.ceil(rest - 1e-3).astype(jnp.uint32)


def _same_names(after: Any, before: Any) -> Any:
    """Returns `after`. Raises UsageError if a user's `forward_backward` has lost the model's state."""
    if rest_of_model.described(after) != rest_of_model.described(before):
        raise UsageError(
            "forward_backward returned a Loss without the model's state: expected the one that the objective returned, or its "
            "_replace(...)"
        )
    return after


def _with_loss_weight(layout: Layout, sums: Sums) -> MetricSums:
    """Returns the metric sums with the weight of the total loss set to the targets of its first term. It is 1 if only other
    terms have targets."""
    row = layout.names.index("loss")
    weight = jnp.where(sums.num_targets > 0, sums.num_targets, (sums.loss_sum != 0).astype(jnp.float32))
    return sums.metric_sums.at[row, 1].set(weight)


def _scan_sums(function: Callable, add: Callable, batch: Batch, carried: Any, parts: ModelParts) -> tuple[Any, Any]:
    """Returns the sum (by `add`) of what `function` (carried, micro-batch, its number) returns first over the micro-batches, in
    order, and what it returns second for the last: each micro-batch gets that of the one before. Floating-point sums are float32
    at least."""
    num_micro_batches, first = jax.tree.leaves(batch)[0].shape[0], jax.tree.map(lambda leaf: leaf[0], batch)
    if num_micro_batches == 1:
        return function(carried, first, 0)  # a scan of one would only cost time to compile

    def wide(leaf: Any) -> Any:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32) if floating else leaf.dtype)

    def body(total: tuple[Any, Any], numbered: tuple[Batch, Any]) -> tuple[tuple[Any, Any], None]:
        sums, carried = total
        addend, carried = function(carried, *numbered)
        return (add(sums, addend), carried), None

    zeros = jax.tree.map(wide, jax.eval_shape(function, carried, first, 0)[0])
    # Only for random streams: other models need no number in the program.
    numbers = jnp.arange(num_micro_batches) if parts.stream_template else None
    # A scan and no Python loop: the program does not grow with the number of micro-batches.
    total, _ = jax.lax.scan(body, (zeros, carried), (batch, numbers))
    return total


def loss_pairs(layout: Layout, loss: Loss) -> MetricSums:
    return layout.pairs({"loss": (loss.loss_sum, loss.num_targets), **loss.parts})


def keep_unless(apply: jax.Array, new: Any, old: Any) -> Any:
    # `where`, not arithmetic: the new values may be NaN.
    return jax.tree.map(lambda a, b: jnp.where(apply, a, b), new, old)


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _add(left: Any, right: Any) -> Any:
    return jax.tree.map(jnp.add, left, right)


def clip(gradients: Any, norm: jax.Array, max_norm: float | None) -> Any:
    """Returns the gradients, scaled down to a global norm of `max_norm` if theirs is greater."""
    if max_norm is None:
        return gradients
    # 1e-6 only avoids a division by 0. A norm that is not finite needs no care here: that update is not applied.
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-6))
    # In the gradient's own type: a float32 scale would promote bfloat16 gradients to float32.
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
