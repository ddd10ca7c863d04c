"""What a task's loss function may return, brought into one form that adds up over micro-batches and hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from trainers.errors import UsageError
from trainers.protocol import METRIC, Batch, Last, Loss, Max, Min, Sum, Task
from trainers.step.per_source import with_sources

EXPECTED = (
    "expected a trainers.protocol.Loss, a pair (loss_sum, num_targets), where num_targets may be None for a mean over the batch, "
    "or a dict of such pairs by name"
)

Scales = Sequence[jax.Array]
"""Of the terms of a loss, in their order: the targets of the first of them over those of each, in the whole global batch."""


def as_loss(value: Any, scales: Scales | None = None) -> Loss:
    """What a task's loss returned, as a `Loss`. Raises UsageError if it is none.

    Of a dict of pairs, its *terms*, the total is the sum of their means, each over its own targets in the whole global batch
    (`scales`; default: in this batch); each is a metric under its name. What is a `Sum`, `Max`, `Min` or `Last` is a metric only.
    """
    if isinstance(value, Loss):
        return value
    if isinstance(value, Mapping):
        return _total(value, scales)
    if isinstance(value, tuple) and len(value) == 2:
        loss, num_targets = value
        return Loss(loss, jnp.ones((), jnp.float32) if num_targets is None else num_targets)
    raise UsageError(f"the task's loss returned {type(value).__name__}: {EXPECTED}")


def terms_of(value: Any) -> dict[str, Loss]:
    """The terms of a loss that is a dict; empty if it is none."""
    if not isinstance(value, Mapping):
        return {}
    terms = {name: as_loss(part) for name, part in value.items() if not isinstance(part, Sum | Max | Min | Last)}
    if not terms:
        raise UsageError(f"the task's loss returned a dict without a loss ({', '.join(value) or 'empty'}): {EXPECTED}")
    if "loss" in terms:
        raise UsageError("the task's loss returned a dict with the name 'loss', which is that of the total: use another name")
    return terms


def targets_of(value: Any) -> dict[str, jax.Array]:
    """How many targets each term has."""
    return {name: jnp.asarray(term.num_targets) for name, term in terms_of(value).items()}


def with_row_metrics(loss: Loss, batch: Batch) -> Loss:
    """`loss`, with the leaves `metric/NAME` of the batch as parts: means over its rows, by their weights."""
    rows = {name.removeprefix(METRIC): leaf for name, leaf in batch.items() if name.startswith(METRIC)}
    own = {name: (jnp.sum(leaf * batch["weight"]), jnp.sum(batch["weight"])) for name, leaf in rows.items()}
    if taken := own.keys() & loss.parts.keys():
        raise UsageError(f"preprocess_batch returned metrics that the loss has too: {', '.join(sorted(taken))}; rename them")
    return loss._replace(parts={**loss.parts, **own}) if own else loss


def scales_of(num_targets: Sequence[jax.Array]) -> Scales:
    """From the targets of each term in the global batch. A term without any adds nothing, and takes nothing from the others."""
    counts = [jnp.maximum(count.astype(jnp.float32), 1.0) for count in num_targets]
    return [counts[0] / count for count in counts]


def _total(parts: Mapping[str, Any], scales: Scales | None) -> Loss:
    terms = terms_of(parts)
    scales = scales or scales_of([*targets_of(parts).values()])
    total = sum(term.loss_sum * scale for term, scale in zip(terms.values(), scales, strict=True))
    pairs = {name: (term.loss_sum, term.num_targets) for name, term in terms.items()}
    metrics = {name: part for name, part in parts.items() if name not in terms}
    return Loss(jnp.asarray(total), next(iter(terms.values())).num_targets, {**pairs, **metrics})


@dataclass(frozen=True)
class LossFunction:
    """The loss of a task's model as a function of its parameters. Pure and traced."""

    task: Task
    merge: Callable[[Any], Any]
    """From parameters to the model."""
    preforward: Callable[[Batch], Batch] = lambda batch: batch
    postforward: Callable[[Loss, Batch], Loss] = lambda loss, batch: loss
    sources: tuple[str, ...] = ()
    """`data.sources`"""

    def __call__(self, params: Any, batch: Batch, step: Any, scales: Scales | None = None) -> Loss:
        """`step`: the number of updates, for a task that wants to be told (`set_step_nr`)."""
        return self.with_terms(params, batch, step, scales)[0]

    def term_targets(self, params: Any, batch: Batch, step: Any) -> tuple[jax.Array, ...]:
        """How many targets each term of a loss that is a dict has in this batch, in their order, which the names would lose on
        their way through JAX; empty if it is none. The compiler drops all of the model that the numbers do not depend on."""
        return tuple(targets_of(self._asked(params, batch, step)[0]).values())

    def with_terms(self, params: Any, batch: Batch, step: Any, scales: Scales | None = None) -> tuple[Loss, dict[str, jax.Array]]:
        """(the loss, `term_targets` by name): the task is asked once for both."""
        raw, seen = self._asked(params, batch, step)
        loss = with_sources(as_loss(raw, scales), seen, self.sources)
        return self.postforward(with_row_metrics(loss, batch), seen), targets_of(raw)

    def _asked(self, params: Any, batch: Batch, step: Any) -> tuple[Any, Batch]:
        """(what the task's loss returned, the batch that it was given)"""
        if (tell := getattr(self.task, "set_step_nr", None)) is not None:
            tell(step)
        seen = self.preforward(batch)
        return self.task.loss(self.merge(params), seen), seen
