"""Brings what a task's loss function may return into one form that adds up over micro-batches and hosts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from gangway.errors import UsageError
from trainers.config.frozen import BASE
from trainers.models.batch_norm import tell_rows
from trainers.protocol import METRIC, SKIPPED, Batch, Last, Loss, Max, Min, PerExample, Sum, Task
from trainers.step.rest_of_model import Rest, state_after
from trainers.step.state import ModelParts

EXPECTED = (
    "expected the loss of each example, as an array [batch] or a trainers.protocol.PerExample; sums over the batch, as a "
    "trainers.protocol.Loss or a pair (loss_sum, num_targets), where num_targets may be None for a mean over the batch; "
    "or a dict of these by name"
)

Scales = Sequence[jax.Array]
"""One factor for each term of a loss, in their order: the number of targets of the first term divided by that of this term,
both over the whole global batch."""

NO_REST = Rest()
"""Of a model that has parameters alone."""


def weighted(value: Any, weight: jax.Array) -> Any:
    """Returns what a task's loss returned, with the losses of single examples added up by their weights [B], also those in a
    dict. Raises UsageError if they are not one number for each example."""
    if isinstance(value, Mapping):
        return {name: weighted(part, weight) for name, part in value.items()}
    if isinstance(value, jax.Array) and value.ndim > 0:
        value = PerExample(value)
    if not isinstance(value, PerExample):
        return value
    targets = jnp.ones_like(weight) if value.num_targets is None else value.num_targets
    arrays = {"losses": value.losses, "num_targets": targets, **value.metrics}
    if wrong := [f"{name} {list(jnp.shape(array))}" for name, array in arrays.items() if jnp.shape(array) != weight.shape]:
        raise UsageError(f"the task's loss returned {', '.join(wrong)}: expected {list(weight.shape)}, a number for each example")
    # Not by a product alone: a NaN in a row that only fills up the batch would make the whole loss NaN.
    rows = {name: jnp.where(weight > 0, weight * array, 0.0) for name, array in arrays.items()}
    losses, targets = rows.pop("losses"), rows.pop("num_targets")
    num_targets = jnp.sum(targets)
    # By the targets themselves, and not by their weights: an example of weight 0.1 has all of its tokens.
    tokens = arrays["num_targets"] if value.num_tokens is None else value.num_tokens
    row_tokens = jnp.where(weight > 0, tokens, 0)
    parts = {name: (jnp.sum(row), num_targets) for name, row in rows.items()}
    return Loss(jnp.sum(losses), num_targets, parts, jnp.sum(row_tokens), rows=(losses, targets, row_tokens))


def as_loss(value: Any, scales: Scales | None = None) -> Loss:
    """Converts what a task's loss returned, `weighted`, to a `Loss`. Raises UsageError if it cannot be one.

    The pairs of a dict are its *terms*. The total is the sum of their means, each over its own targets in the whole global
    batch (`scales`; default: in this batch), and each term is a metric under its name. A `Sum`, `Max`, `Min` or `Last` in the
    dict is only a metric.
    """
    if isinstance(value, Loss):
        return value
    if isinstance(value, Mapping):
        return _total(value, scales)
    if isinstance(value, tuple) and len(value) == 2:
        loss, num_targets = value
        # One target for each micro-batch: dividing the sum by the targets then gives the mean of their means.
        return Loss(loss, jnp.ones((), jnp.float32) if num_targets is None else num_targets)
    raise UsageError(f"the task's loss returned {type(value).__name__}: {EXPECTED}")


def terms_of(value: Any) -> dict[str, Loss]:
    """Returns the terms of a loss that is a dict; an empty dict for any other loss."""
    if not isinstance(value, Mapping):
        return {}
    terms = {name: as_loss(part) for name, part in value.items() if not isinstance(part, Sum | Max | Min | Last)}
    if not terms:
        raise UsageError(f"the task's loss returned a dict without a loss ({', '.join(value) or 'empty'}): {EXPECTED}")
    if "loss" in terms:
        raise UsageError("the task's loss returned a dict with the name 'loss', which is that of the total: use another name")
    return terms


def targets_of(value: Any) -> dict[str, jax.Array]:
    """Returns the number of targets of each term."""
    return {name: jnp.asarray(term.num_targets) for name, term in terms_of(value).items()}


def with_row_metrics(loss: Loss, batch: Batch) -> Loss:
    """Returns `loss` with the leaves `metric/NAME` of the batch as parts: means over its rows, by the rows' weights."""
    rows = {name.removeprefix(METRIC): leaf for name, leaf in batch.items() if name.startswith(METRIC)}
    row_metrics = {name: (jnp.sum(leaf * batch["weight"]), jnp.sum(batch["weight"])) for name, leaf in rows.items()}
    if taken := row_metrics.keys() & loss.parts.keys():
        names = ", ".join(sorted(taken))
        raise UsageError(f"preprocess_batch or prepare_batch returned metrics that the loss has too: {names}; rename them")
    # By the rows themselves, and not by their weights, which are 0.
    skipped = {"total_skipped_examples": Sum(jnp.sum(batch[SKIPPED]))} if SKIPPED in batch else {}
    added = {**row_metrics, **skipped}
    return loss._replace(parts={**loss.parts, **added}) if added else loss


def safe_divisor(num_targets: jax.Array) -> jax.Array:
    """Returns what a sum over targets is divided by: their number, or 1 if there are none. No floor of 1: the weights of a
    batch may add up to less."""
    return jnp.where(num_targets <= 0, 1.0, num_targets)


def scales_of(num_targets: Sequence[jax.Array]) -> Scales:
    """Returns the scales from the number of targets of each term in the global batch. A term without targets adds nothing to
    the total, and changes nothing for the others."""
    counts = [safe_divisor(count.astype(jnp.float32)) for count in num_targets]
    return [counts[0] / count for count in counts]


def _total(parts: Mapping[str, Any], scales: Scales | None) -> Loss:
    terms = terms_of(parts)
    # Without scales this batch counts as the whole one. An evaluation adds up the terms' own means at its end.
    scales = scales or scales_of([*targets_of(parts).values()])
    # The step divides the total by the targets of the first term: the scales turn that into each term's own mean.
    total = sum(term.loss_sum * scale for term, scale in zip(terms.values(), scales, strict=True))
    pairs = {name: (term.loss_sum, term.num_targets) for name, term in terms.items()}
    metrics = {name: part for name, part in parts.items() if name not in terms}
    of_terms = {name: part for term in terms.values() for name, part in term.parts.items()}
    first = next(iter(terms.values()))
    return Loss(jnp.asarray(total), first.num_targets, {**pairs, **of_terms, **metrics}, first.num_tokens)


@dataclass(frozen=True)
class LossFunction:
    """The loss of a task's model as a function of its parameters. Pure and traced."""

    task: Task
    parts: ModelParts
    preforward: Callable[[Batch], Batch] = lambda batch: batch
    postforward: Callable[[Loss, Batch], Loss] = lambda loss, batch: loss
    sources: tuple[str, ...] = ()
    """`data.sources`"""
    training: bool = True
    """Whether it is the loss of the training, or that of an evaluation."""
    frozen_parts: Mapping[str, ModelParts] = field(default_factory=dict)
    """The models of the frozen weights, by name."""

    def __call__(self, params: Any, batch: Batch, step: Any, scales: Scales | None = None, rest: Rest = NO_REST) -> Loss:
        """Returns the loss of a batch. `step` is the number of updates; a task with a method `set_step_nr` gets it. `rest` is
        what the method `rest` returns."""
        return self.with_terms(params, batch, step, scales, rest)[0]

    def rest(
        self,
        model_state: Any,
        batch: Batch,
        batch_index: Any = 0,
        micro_batch: Any = 0,
        frozen: Mapping[str, Any] = MappingProxyType({}),
    ) -> Rest:
        """Returns what the model needs beside its parameters for micro-batch number `micro_batch` of the global batch
        `batch_index`. In an evaluation random streams depend on the examples alone: the same state gives the same numbers."""
        if self.training:
            return Rest(model_state, self.parts.streams("training", batch_index, micro_batch), dict(frozen))
        first_example = batch["sample_id"][0] if self.parts.stream_template else 0
        return Rest(model_state, self.parts.streams("evaluation", first_example, 0), dict(frozen))

    def term_targets(self, params: Any, batch: Batch, step: Any, rest: Rest = NO_REST) -> tuple[jax.Array, ...]:
        """Returns the number of targets of each term in this batch; empty if the loss is no dict. A tuple in the order of the
        terms, because JAX sorts the keys of a dict. The compiler drops all parts of the model that these numbers do not depend
        on."""
        return tuple(targets_of(self._call_task(params, batch, step, rest)[0]).values())

    def with_terms(
        self, params: Any, batch: Batch, step: Any, scales: Scales | None = None, rest: Rest = NO_REST
    ) -> tuple[Loss, dict[str, jax.Array]]:
        """Returns the loss, and `term_targets` by name, with one call of the task."""
        raw, inputs, model = self._call_task(params, batch, step, rest)
        loss = with_sources(as_loss(raw, scales), inputs, self.sources)
        # Metrics of the rows are taken from the original batch: `preforward` may have dropped or changed their leaves.
        loss = self.postforward(with_row_metrics(loss, batch), inputs)
        # The state that the model has after its call. An evaluation keeps none.
        if self.training and (after := state_after(model, rest.state)):
            counts = jnp.any(inputs["weight"] > 0)  # a batch without rows that count changes no state
            loss = loss._replace(model_state=jax.tree.map(lambda new, old: jnp.where(counts, new, old), after, rest.state))
        return loss, targets_of(raw)

    def predictions(self, params: Any, batch: Batch, step: Any, rest: Rest = NO_REST) -> Any:
        """Returns the task's predictions: leaves [rows, ...]. Raises UsageError for a leaf that has not as many rows."""
        model, inputs = self._inputs(params, batch, step, rest)
        outputs, num_rows = self.task.predictions(model, inputs), len(batch["weight"])  # type: ignore[attr-defined]
        for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
            if jnp.shape(leaf)[:1] != (num_rows,):
                raise UsageError(
                    f"predictions of {type(self.task).__name__} returned {jax.tree_util.keystr(path) or 'an array'} of shape "
                    f"{jnp.shape(leaf)}: expected [rows, ...] with the {num_rows} rows of the batch"
                )
        return outputs

    def _call_task(self, params: Any, batch: Batch, step: Any, rest: Rest) -> tuple[Any, Batch, Any]:
        """Returns what the task's loss returned, the batch that was passed to it, and the model."""
        model, inputs = self._inputs(params, batch, step, rest)
        return weighted(self._of_task(model, inputs, rest.frozen), inputs["weight"]), inputs, model

    def adds_up_itself(self, params: Any, batch: Batch, step: Any, rest: Rest = NO_REST) -> bool:
        """Returns whether the task gives sums over the batch, so that it must itself leave out rows of weight 0. Traces the loss;
        shapes suffice."""
        found: list[bool] = []

        def traced(params: Any, batch: Batch, step: Any, rest: Rest) -> None:
            found.append(_has_sums(self._of_task(*self._inputs(params, batch, step, rest), rest.frozen)))

        jax.eval_shape(traced, params, batch, jnp.asarray(step), rest)
        return found[0]

    def _of_task(self, model: Any, inputs: Batch, frozen: Mapping[str, Any]) -> Any:
        """Returns what the task's loss returns. An error gets a note with the columns of the batch."""
        # Static, and not traced: a task may choose with a plain `if`.
        extra: dict[str, Any] = {"training": self.training} if takes(self.task, "training") else {}
        if takes(self.task, "frozen"):
            extra["frozen"] = self._frozen_models(frozen)
        try:
            return self.task.loss(model, inputs, **extra)
        except Exception as error:
            error.add_note(note_on_batch(error, type(self.task).__name__, inputs))
            raise

    def _frozen_models(self, frozen: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the models of the frozen weights, in evaluation mode."""
        merged = {name: parts.merge(frozen[name]) for name, parts in self.frozen_parts.items()}
        return {name: in_mode(model, training=False) for name, model in merged.items()}

    def _inputs(self, params: Any, batch: Batch, step: Any, rest: Rest) -> tuple[Any, Batch]:
        """Returns the model and the batch that are passed to the task."""
        if (set_step_nr := getattr(self.task, "set_step_nr", None)) is not None:
            set_step_nr(step)
        inputs = self.preforward(batch)
        merged = self.parts.merge(params, rest.state, rest.streams, rest.frozen.get(BASE))
        model = in_mode(merged, training=self.training)
        if self.training:  # an evaluation takes no statistics
            tell_rows(model, inputs["weight"])
        return model, inputs


def note_on_batch(error: Exception, task: str, batch: Batch) -> str:
    """Returns what the batch was for which a task's loss raised `error`."""
    columns = ", ".join(f"{name} {leaf.dtype}{list(jnp.shape(leaf))}" for name, leaf in batch.items())
    detail = f"while the loss of {task} was traced with a batch of {columns}"
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(name, str) or name in batch:
        return detail
    return f"{detail}: it has no column {name!r}; give the examples of data.dataset one, or use another name in the loss"


def _has_sums(value: Any) -> bool:
    """Returns whether something in what a task's loss returned is no array or PerExample, which the trainer adds up."""
    if isinstance(value, Mapping):
        return any(map(_has_sums, value.values()))
    return not isinstance(value, PerExample) and not (isinstance(value, jax.Array) and value.ndim > 0)


def in_mode(model: Any, *, training: bool) -> Any:
    """Returns `model` after its `train()` or `eval()`, which set the modes of its modules (dropout, normalization); unchanged if
    it has no such method."""
    set_mode = getattr(model, "train" if training else "eval", None)
    if set_mode is not None:
        set_mode()
    return model


def takes(task: Task, name: str) -> bool:
    """Whether the loss of a task has a parameter of this name."""
    return name in inspect.signature(task.loss).parameters


def with_sources(loss: Loss, batch: Batch, names: tuple[str, ...]) -> Loss:
    """Returns `loss` with the parts `loss/NAME` and `total_tokens/NAME` of each source. Traced.

    `batch["source"]` (int32 for each row) is an index into `names`; `loss.rows` holds the loss and the targets of each row.
    """
    if not names:
        return loss
    if loss.rows is None or "source" not in batch:
        lacking = "the task's Loss has no `rows`" if loss.rows is None else f"its leaves are {', '.join(sorted(batch))}"
        raise UsageError(
            f"data.sources = {list(names)}: expected a batch with a leaf `source` and a task that tells the loss of each row; "
            f"{lacking}"
        )
    row_losses, row_targets, *others = loss.rows
    # A target of weight 0.5 is a token like any other.
    row_tokens = others[0] if others else row_targets
    parts = dict(loss.parts)
    for index, name in enumerate(names):
        # [rows]
        of_source = batch["source"] == index
        num_targets = jnp.sum(jnp.where(of_source, row_targets, 0))
        # `where`, not a product: a row of another source may have a loss that is not finite.
        parts[f"loss/{name}"] = (jnp.sum(jnp.where(of_source, row_losses, 0)), num_targets)
        parts[f"total_tokens/{name}"] = Sum(jnp.sum(jnp.where(of_source, row_tokens, 0)))
    return loss._replace(parts=parts)
