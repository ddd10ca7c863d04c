"""The first rows of the data, before a machine is taken.

They are read and collated: what the first steps would raise is raised here. Then the loss of a small real batch is computed on
the CPU of this machine, with parameters of step 0, in evaluation mode: rows that only fill up a batch (weight 0) must change
neither the loss nor a metric, also of a task that adds up its batch itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gangway.errors import DataError, UsageError
from trainers.data.loader import RandomAccess
from trainers.loop.hooks import overrides
from trainers.metrics.accumulator import Kind, Layout
from trainers.step.loss import LossFunction
from trainers.step.state import initial_model
from trainers.tasks.causal_lm import CausalLMTask
from trainers.trainer.base_trainer import BaseTrainer

MAX_ROWS = 32
"""How many examples are read of each dataset, of those of the first micro-batch."""


def checks(trainer: BaseTrainer) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields a name and a check for each dataset of the run. A check raises what reading or collating its first rows raises."""
    # Loaders of a trainer's own need not read its datasets, nor collate them alike.
    if trainer.dataset_train is None or overrides(trainer, "configure_dataloaders"):
        return
    train = trainer.dataset_train
    yield "data", lambda: collated(trainer, train)
    if trainer.dataset_eval is not None and len(trainer.dataset_eval):
        held_out = trainer.dataset_eval
        yield "held-out data", lambda: collated(trainer, held_out, len(held_out))
    for name in trainer.arguments.evaluation.units:
        yield f"evaluation.units.{name}.dataset", lambda name=name: unit_collated(trainer, name)  # type: ignore[misc]


def unit_collated(trainer: BaseTrainer, name: str) -> Any:
    """Collates the first rows of a validation unit that has data of its own."""
    dataset = trainer.batching.datasets_of_units.get(name)
    return None if dataset is None else collated(trainer, dataset, len(dataset))


def collated(trainer: BaseTrainer, dataset: RandomAccess, num_examples: int | None = None) -> dict[str, np.ndarray]:
    """Returns the first rows of a dataset as a batch [rows, ...]. Raises DataError if a row alone has another form."""
    indices = range(min(MAX_ROWS, trainer.arguments.micro_batch_size, num_examples or MAX_ROWS))
    if (available := getattr(dataset, "available", None)) is not None:
        indices = range(available(len(indices)))
    if not indices:
        raise DataError(f"the data ({type(dataset).__name__}) has no examples: give it some")
    batch = trainer.batching.rows_of(dataset, indices)
    rows, alone = forms(batch), forms(trainer.batching.rows_of(dataset, indices[:1]))
    if wrong := [name for name in {**rows, **alone} if alone.get(name) != rows.get(name)]:
        detail = "; ".join(f"{name} {alone.get(name)} for one, {rows.get(name)} for {len(indices)}" for name in wrong)
        raise DataError(
            f"the shapes or types of a batch depend on its examples ({detail}): each host collates some rows of a batch alone, "
            "so pad to a fixed length in data.collator"
        )
    return batch


def forms(batch: dict[str, np.ndarray]) -> dict[str, str]:
    """Returns the type and the shape of a row of each column."""
    return {name: f"{leaf.dtype}{list(leaf.shape[1:])}" for name, leaf in batch.items()}


NUM_ROWS = 3
"""Rows that count. Few: one more then changes a count by a third."""
MAX_PARAMETERS, MAX_FLOPS = 20_000_000, 5e10
"""Of what is computed here, by a CPU, while a user waits."""
NUM_FILLERS = 6
SAME_PROGRAM = 1e-5
"""The relative difference that rounding may make in one program, whose rows of weight 0 have other values."""
OTHER_SHAPE = 0.02
"""The same between programs of other shapes, in which a low precision may round each row otherwise."""

TOKENS = "number of targets"
CHECKED = "a row of weight 0 changes neither the loss nor a metric"
LEFT_OUT = "whether rows of weight 0 count was not tried"


def check_padding(trainer: BaseTrainer) -> str | None:
    """Returns what was tried, or why nothing was; None if there is nothing to try: the trainer adds up the rows. After
    `configure_model`. Raises UsageError if a row of weight 0 counts."""
    loss = trainer.design.eval_loss
    if is_own(loss.task) or overrides(trainer, "configure_functions") or overrides(trainer, "configure_dataloaders"):
        return None
    if why := out_of_reach(trainer):
        return f"{LEFT_OUT}: {why}"
    batches = list(batches_of(trainer))
    first = _on_device(batches[0])
    state_shapes, shapes = trainer.model.state_shapes, trainer.design.state.params
    if not loss.adds_up_itself(shapes, first, np.int32(0), loss.rest(state_shapes, first)):
        return None
    layout = trainer.design.loss_layout.with_others({TOKENS: Kind.SUM})
    try:
        found = sums(trainer, loss, layout, batches)
        # Read and compiled once more: what differs between two tries says nothing of the row.
        (again,) = map(layout.read, sums(trainer, loss, layout, [next(batches_of(trainer))]))
    except Exception as error:  # a kernel that this machine's CPU lacks, say: the machines that train may have it
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return f"{LEFT_OUT}: the loss cannot be computed on this machine ({why})"
    without, *padded = map(layout.read, found)
    if not all(_same(value, again[name], SAME_PROGRAM) for name, value in without.items()):
        return f"{LEFT_OUT}: the loss of the same examples is another each time (`python -m orchestrator.verify` says why)"
    if changes := differences(without, padded):
        raise UsageError(
            f"the loss of {type(loss.task).__name__} counts rows that only fill up a batch (batch['weight'] is 0): one such row "
            f"beside {NUM_ROWS} others changes {changes}; multiply each row by batch['weight'] in every sum and in every count, "
            "or return the loss of each example (trainers.protocol.PerExample), which the trainer weights"
        )
    return CHECKED


def batches_of(trainer: BaseTrainer) -> Iterator[dict[str, np.ndarray]]:
    """Yields a batch of NUM_ROWS examples, and others with one row more, of weight 0: first a repeated one, as the loader fills
    up, then other examples. These may not count either, and show more: the largest value among them changes a maximum."""
    dataset, num_examples = trainer.dataset_train, NUM_ROWS + NUM_FILLERS
    available = getattr(dataset, "available", lambda stop: stop)(num_examples)
    rows, fillers = tuple(range(min(NUM_ROWS, available))), range(min(NUM_ROWS, available), available)
    yield trainer.batching.rows_of(dataset, rows)  # type: ignore[arg-type]
    for filler in (0, *fillers):
        yield trainer.batching.rows_of(dataset, (*rows, filler), 1)  # type: ignore[arg-type]


def is_own(task: Any) -> bool:
    """Whether the loss is this project's own, whose tests try the same."""
    return isinstance(task, CausalLMTask) and type(task).loss is CausalLMTask.loss


def out_of_reach(trainer: BaseTrainer) -> str:
    """Returns why the loss is not computed here; empty if it can be."""
    parameters = trainer.design.num_parameters
    if parameters > MAX_PARAMETERS:
        return f"the model has {parameters:,} parameters, more than {MAX_PARAMETERS:,}"
    # Two thirds of a step's operations are backward.
    flops = trainer.task.flops_per_token(parameters) * trainer.task.tokens_per_example * NUM_ROWS * NUM_FILLERS / 3
    if flops > MAX_FLOPS:
        return f"it takes {flops:.1e} FLOP, more than {MAX_FLOPS:.0e}"
    if trainer.design.frozen_models:
        return "frozen weights are read on the hosts"
    if overrides(trainer, "prepare_batch"):
        return "prepare_batch needs the devices"
    return ""


def sums(trainer: BaseTrainer, loss: LossFunction, layout: Layout, batches: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
    """Returns the sums of the loss and the metrics of each batch."""
    params, model_state = jax.jit(lambda: initial_model(trainer.task, trainer.arguments.seed))()

    def of_batch(params: Any, model_state: Any, batch: Any) -> jax.Array:
        found = loss(params, batch, jnp.int32(0), rest=loss.rest(model_state, batch))
        tokens = found.num_targets if found.num_tokens is None else found.num_tokens
        return layout.pairs({"loss": (found.loss_sum, found.num_targets), **found.parts, TOKENS: (tokens, 1.0)})

    step = jax.jit(of_batch)
    return [np.asarray(step(params, model_state, _on_device(batch))) for batch in batches]


def differences(without: Mapping[str, float], padded: Sequence[Mapping[str, float]]) -> str:
    """Returns the metrics that a row of weight 0 changes, from what to what; empty if there are none. All of `padded` have one
    such row, each another one."""
    lines = []
    for name in dict.fromkeys(name for found in (without, *padded) for name in found):
        plain, *values = (found.get(name, math.nan) for found in (without, *padded))
        if _same(plain, values[0], OTHER_SHAPE) and all(_same(values[0], value, SAME_PROGRAM) for value in values):
            continue
        # The value that shows it best.
        changed = max(values, key=lambda value: abs(value - plain) if math.isfinite(value - plain) else math.inf)
        lines.append(f"{name} from {plain:.6g} to {changed:.6g}")
    return ", ".join(lines)


def _same(a: float, b: float, tolerance: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a == b or (math.isnan(a) and math.isnan(b))
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def _on_device(batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(leaf) for name, leaf in batch.items()}
