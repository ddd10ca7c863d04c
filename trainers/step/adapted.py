"""Train and eval steps of a user's own, `(state, batch) -> (state, metrics)` and `(state, batch) -> metrics`, as the loop needs
them. Pure and traced.

The user's step gets leaves [rows of the global batch, ...], and makes the update: gradients, clipping, optimizer. What it
returns is checked like any update: by the rules of `anomalies`, a batch is left out, and the state stays as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gangway.errors import UsageError
from trainers.config import OptimizerConfig
from trainers.config.arguments import TrainingArguments
from trainers.metrics.accumulator import Kind, Layout, MetricSums
from trainers.optim.precision import any_narrow
from trainers.overrides import check_hooks
from trainers.protocol import Batch
from trainers.step.finite import any_not_finite
from trainers.step.host_flags import REDUCED, UpdateStatus, reduce_flags, update_stats, with_look
from trainers.step.sample_digest import count_samples
from trainers.step.state import TrainState
from trainers.step.train_step import STEP_METRICS, StepOutput, keep_unless, totals_so_far

UserStep = Callable[[Any, Batch], Any]


def check_settings(arguments: TrainingArguments, *, prunes: bool = False, freezes: bool = False, params: Any = ()) -> None:
    """Raises UsageError with all settings that only the built-in train step knows. `prunes`: the trainer has a pruner; `freezes`:
    some of its parameters, `params`, are frozen."""
    if problems := list(_problems(arguments, prunes, freezes, params)):
        raise UsageError("configure_functions returned a train step (state, batch) of its own:\n  " + "\n  ".join(problems))


def check_hooks_of(trainer: object) -> None:
    """Raises UsageError for hooks of the trainer that only the built-in train step calls."""
    own = "configure_functions returns a step (state, batch) of your own: call it there"
    check_hooks(trainer, dict.fromkeys(("forward_backward", "on_micro_step"), (False, own)))


def _problems(arguments: TrainingArguments, prunes: bool, freezes: bool, params: Any) -> Iterator[str]:
    if arguments.accumulation_steps > 1:
        steps = arguments.accumulation_steps
        yield f"accumulation_steps = {steps}: expected 1, for the step gets the whole global batch and may divide it itself"
    if arguments.dtype == "float16":
        yield "dtype = 'float16': only the built-in step scales the loss; use bfloat16 or float32"
    for name in ("lora", "frozen"):
        if getattr(arguments, name):
            yield f"{name}: only the built-in step has frozen weights among its arguments; leave it out"
    if arguments.optimizer.max_grad_norm not in (None, OptimizerConfig.max_grad_norm):
        yield f"optimizer.max_grad_norm = {arguments.optimizer.max_grad_norm}: only the built-in step clips; clip in yours"
    if arguments.optimizer.master_weights != "none" and any_narrow(params):
        yield f"optimizer.master_weights = {arguments.optimizer.master_weights!r}: only the built-in step has them; set none"
    if freezes:
        yield "freeze_module (optimizer.groups): only the built-in step leaves out frozen parameters; leave it out"
    if arguments.pruning.pattern is not None:
        yield f"pruning.pattern = {arguments.pruning.pattern!r}: only the built-in step prunes; leave it out"
    elif prunes:
        yield "build_pruner (pruning.pruner): only the built-in step calls a pruner; leave it out"
    if arguments.metrics.per_parameter_grad_norm:
        yield "metrics.per_parameter_grad_norm = true: only the built-in step has the gradients; return such metrics"
    if arguments.distributions.pattern is not None:
        yield "distributions.pattern: only the built-in step measures distributions; leave it out"


def train_layout(step: UserStep, state: Any, batch: Mapping[str, Any]) -> Layout:
    """Returns the layout of the metrics of a user's train step: theirs, then those of the step. Shapes suffice."""
    new_state, metrics = jax.eval_shape(lambda state, batch: _call(step, state, batch), state, batch)
    _check_state(new_state, state)
    names = [name for name in metrics if name not in STEP_METRICS]
    kinds = {**dict.fromkeys(names, Kind.MEAN), **STEP_METRICS}
    return _layout(kinds)


def eval_layout(step: UserStep, state: Any, batch: Mapping[str, Any]) -> Layout:
    metrics = jax.eval_shape(lambda state, batch: scalar_metrics(step(state, flat(batch)), "eval_step_fn"), state, batch)
    return _layout(dict.fromkeys(metrics, Kind.MEAN))


def _layout(kinds: Mapping[str, Kind]) -> Layout:
    # What its loss is, only the user's step knows: exp of a squared error is no perplexity.
    return Layout(tuple(kinds), tuple(kinds.values()), of_tokens=False)


def adapted_train_step(
    step: UserStep, layout: Layout, arguments: TrainingArguments, schedule: optax.Schedule, tokens_per_example: int
) -> Callable[[TrainState, MetricSums, Batch, jax.Array], StepOutput]:
    """Returns the function that `make_train_step` would return, around a user's step."""

    def train_step(state: TrainState, metric_sums: MetricSums, batch: Batch, flags: jax.Array) -> StepOutput:
        new_state, metrics = _call(step, state, batch)
        loss = metrics["loss"]
        reduced = reduce_flags(flags, loss, jnp.isfinite(loss), state.loss_stats, arguments.anomalies)
        applied = reduced[REDUCED.index("status")] == UpdateStatus.APPLIED
        num_samples = jnp.sum(batch["weight"] > 0)
        num_tokens = (num_samples * tokens_per_example).astype(jnp.uint32)
        totals = count_samples(state.totals, state.batch_index, batch, num_tokens, arguments.micro_batch_size)
        loss_stats = update_stats(state.loss_stats, loss, arguments.anomalies.spike_decay)
        # The counters are the loop's: the user's step need not know them.
        new_state = dataclasses.replace(
            new_state, step=state.step + 1, totals=totals, loss_stats=loss_stats, sums=state.sums, scaler=state.scaler
        )
        counts = {"skipped_batches": 0.0, "tokens": num_tokens, "samples": num_samples, "mean_loss": loss_stats["mean"]}
        values = {"learning_rate": schedule(state.step), **counts, **metrics}
        rows = {name: (value, 1.0) for name, value in values.items()} | totals_so_far(totals)
        step_metrics = jnp.where(applied, layout.pairs(rows), layout.pairs({"skipped_batches": (1.0, 1.0)}))
        # The batch counts as drawn with any status: otherwise the next step would draw it again.
        kept = dataclasses.replace(keep_unless(applied, new_state, state), batch_index=state.batch_index + 1)
        reduced = with_look(reduced, any_not_finite(kept.params))
        return StepOutput(kept, layout.combine(metric_sums, step_metrics), reduced, step_metrics)

    return train_step


def adapted_eval_step(step: UserStep, layout: Layout) -> Callable[[TrainState, MetricSums, Batch], MetricSums]:
    """Returns the function that `make_eval_step` would return. The means of a batch count by its rows: the last may be ragged."""

    def eval_step(state: TrainState, metric_sums: MetricSums, batch: Batch) -> MetricSums:
        metrics, rows = scalar_metrics(step(state, flat(batch)), "eval_step_fn"), jnp.sum(batch["weight"])
        values: dict[str, Any] = {name: (jnp.where(rows > 0, value * rows, 0.0), rows) for name, value in metrics.items()}
        # For the rate of samples; how many tokens there are only the user's step knows.
        values["counted/samples"] = (jnp.sum(batch["weight"] > 0), 1.0)
        return layout.combine(metric_sums, layout.pairs(values), steps=False)

    return eval_step


def flat(batch: Batch) -> dict[str, jax.Array]:
    """[micro-batches, rows, ...] -> [rows of the global batch, ...]"""
    return {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in batch.items()}


def _call(step: UserStep, state: Any, batch: Batch) -> tuple[Any, dict[str, jax.Array]]:
    returned = step(state, flat(batch))
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise UsageError(f"train_step_fn returned {type(returned).__name__}: expected a pair (state, metrics)")
    return returned[0], scalar_metrics(returned[1], "train_step_fn")


def scalar_metrics(metrics: Any, function: str) -> dict[str, jax.Array]:
    """Returns the metrics of a dict, or of an object with attributes, as float32 by name. Those that are None are left out.
    Raises UsageError."""
    if hasattr(metrics, "_asdict"):
        metrics = metrics._asdict()
    named = metrics if isinstance(metrics, Mapping) else getattr(metrics, "__dict__", {})
    values = {name: value for name, value in named.items() if value is not None and not name.startswith("_")}
    wrong = [f"{name} {np.shape(value)}" for name, value in values.items() if np.shape(value) != ()]
    if wrong or "loss" not in values:
        problem = f"{', '.join(wrong)} among the metrics" if wrong else f"no `loss` ({type(metrics).__name__})"
        raise UsageError(f"{function} returned {problem}: expected scalars by name, `loss` among them")
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}


def _check_state(new: Any, old: Any) -> None:
    def described(state: Any) -> dict[str, str]:
        return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in jax.tree.leaves_with_path(state)}

    before, after = described(old), described(new)
    changed = [f"{k}: {before.get(k)} -> {after.get(k)}" for k in {**before, **after} if before.get(k) != after.get(k)]
    if not isinstance(new, TrainState) or changed:
        found = "; ".join(changed[:5]) or type(new).__name__
        raise UsageError(f"train_step_fn returned another state ({found}): expected the one it got, with new values")
