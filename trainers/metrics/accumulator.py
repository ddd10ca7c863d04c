"""Metric sums: metrics summed on the device by the steps of an interval, in one small array that is fetched once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gangway.config.section import did_you_mean
from gangway.errors import UsageError
from trainers.parallel.platform import wait_for_device
from trainers.protocol import Last, Loss, Max, Min, Sum

MetricSums = jax.Array
"""float32[num_metrics, 2]: (value, weight) pairs since the last publish, in the order of the layout's names. A row of weight 0
has no value."""


class Kind(StrEnum):
    """How two (value, weight) pairs are combined. The weights add up."""

    MEAN = "mean"
    """The values are weighted sums: they add up, and are divided by the weight when they are read."""
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"
    """The newer value."""
    TOTAL = "total"
    """A sum over micro-batches. Over steps the newer value: the step itself makes it the sum since the run began."""
    COUNT = "count"
    """An integer counted since the run began, exact where float32 is not: (n // 2^24, n % 2^24 + 1). The newer value."""


COUNT_BASE = 1 << 24
"""Both halves of a count are exact in float32 up to 2^48 - 1."""

KINDS = {Sum: Kind.SUM, Max: Kind.MAX, Min: Kind.MIN, Last: Kind.LAST}


@dataclass(frozen=True)
class Layout:
    """The names of the metrics in the sums, and how each is combined."""

    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    terms: tuple[str, ...] = ()
    """The terms of a loss that is a dict; they add up to `loss`."""
    means: tuple[str, ...] = ()
    """The metrics NAME whose mean since the run began is the metric `mean_NAME`."""
    of_tokens: bool = True
    """Whether the loss is one of tokens, and so has a perplexity; that of a class, or of a number, has none."""

    @classmethod
    def of(cls, loss: Loss, **others: Kind) -> Layout:
        """Returns the layout for a loss (its shapes suffice) and further metrics."""
        parts = {name: _kind(name, part) for name, part in loss.parts.items()}
        if taken := parts.keys() & {"loss", *others}:
            raise UsageError(f"the task's loss has parts named {', '.join(sorted(taken))}, which the step measures: rename them")
        kinds = {"loss": Kind.MEAN, **parts, **others}
        return cls(tuple(kinds), tuple(kinds.values()))

    def with_means(self, means: tuple[str, ...]) -> Layout:
        """Returns the layout with the running means of these metrics. Raises UsageError if one of them is no weighted mean."""
        allowed = [name for name, kind in _kinds(self) if kind is Kind.MEAN]
        if unknown := [name for name in means if name not in allowed]:
            near = did_you_mean(unknown[0], allowed)
            raise UsageError(
                f"metrics.running_means: {unknown[0]!r} is no metric that is published as a weighted mean: expected some of "
                f"{', '.join(allowed)}{near}"
            )
        return replace(self, means=means)

    def __len__(self) -> int:
        return len(self.names)

    def with_others(self, others: Mapping[str, Kind]) -> Layout:
        """Returns the layout with further metrics at its end."""
        return replace(self, names=(*self.names, *others), kinds=(*self.kinds, *others.values()))

    def zeros(self) -> np.ndarray:
        return np.zeros((len(self), 2), np.float32)

    def pairs(self, values: Mapping[str, Any]) -> MetricSums:
        """Returns the sums of one batch. A name that `values` lacks gets weight 0."""
        return jnp.stack([_pair(values.get(name, (0.0, 0.0))) for name in self.names])

    def combine(self, metric_sums: MetricSums, new: MetricSums, *, steps: bool = True) -> MetricSums:
        """Returns `metric_sums` followed by `new`, over steps or (`steps=False`) over the micro-batches of one step."""
        # All are [num_metrics].
        (value, weight), (new_value, new_weight) = metric_sums.T, new.T
        has_new, has_old = new_weight > 0, weight > 0
        newer = jnp.where(has_new, new_value, value)
        rules = {
            # A row of weight 0 holds 0, which is no value: it must not be the maximum of negative ones.
            Kind.MAX: jnp.where(has_new & has_old, jnp.maximum(value, new_value), newer),
            Kind.MIN: jnp.where(has_new & has_old, jnp.minimum(value, new_value), newer),
            Kind.LAST: newer,
        }
        if steps:
            # Micro-batches add up to a step; of two steps the newer value contains the older one.
            rules[Kind.TOTAL] = rules[Kind.COUNT] = rules[Kind.LAST]
        values, weights = value + new_value, weight + new_weight
        # Sorted: the order of a set of names differs between processes, and with it the compiled program would.
        for kind in sorted(set(self.kinds) & rules.keys()):
            values = jnp.where(np.array([row_kind is kind for row_kind in self.kinds]), rules[kind], values)
        if steps and Kind.COUNT in self.kinds:
            # The weight of a count is half of its number: it is replaced with the value, and not added up.
            is_count = np.array([row_kind is Kind.COUNT for row_kind in self.kinds])
            weights = jnp.where(is_count, jnp.where(has_new, new_weight, weight), weights)
        return jnp.stack([values, weights], axis=1)

    def read(self, metric_sums: np.ndarray) -> dict[str, float]:
        """Returns the values by name; rows of weight 0 are left out."""
        rows = zip(self.names, self.kinds, metric_sums.tolist(), strict=True)
        return {name: _read(kind, value, weight) for name, kind, (value, weight) in rows if weight}

    def weight(self, metric_sums: np.ndarray, name: str) -> float:
        return float(metric_sums[self.names.index(name), 1])


class Scalar:
    """A metric of one step that is still on the device. `float()` of it waits for the step; using it in `jax.numpy` does not."""

    __slots__ = ("_kind", "_metric_sums", "_row")

    def __init__(self, metric_sums: MetricSums, row: int, kind: Kind):
        self._metric_sums, self._row, self._kind = metric_sums, row, kind

    def __jax_array__(self) -> jax.Array:
        return _read(self._kind, *self._metric_sums[self._row])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(float(self), dtype)

    def __float__(self) -> float:
        value, weight = wait_for_device(self._metric_sums)[self._row].tolist()
        return float(_read(self._kind, value, weight)) if weight else math.nan

    def __repr__(self) -> str:
        return "Scalar(on the device; float() waits for it)"


def scalars(layout: Layout, step_metrics: MetricSums) -> dict[str, Scalar]:
    """Returns the metrics of one step by name, without waiting for it."""
    return {name: Scalar(step_metrics, row, kind) for row, (name, kind) in enumerate(_kinds(layout))}


def _kinds(layout: Layout) -> Iterator[tuple[str, Kind]]:
    return zip(layout.names, layout.kinds, strict=True)


def _read(kind: Kind, value: Any, weight: Any) -> Any:
    if kind is Kind.COUNT:
        return value * COUNT_BASE + (weight - 1)
    return value / weight if kind is Kind.MEAN else value


def _kind(name: str, part: Any) -> Kind:
    kind = KINDS.get(type(part), Kind.MEAN)
    return Kind.TOTAL if kind is Kind.SUM and name.startswith("total_") else kind


def count(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the pair of a COUNT, from a (high, low) pair of uint32. The 1 that is added keeps its weight above 0."""
    high, low = words
    # n // 2**24 and n % 2**24 + 1: both are exact in float32.
    return (high << 8) | (low >> 24), (low & jnp.uint32(COUNT_BASE - 1)) + 1


def _pair(value: Any) -> jax.Array:
    if isinstance(value, Sum | Max | Min | Last):
        # A value of weight 0 may be NaN, which would spoil every later sum.
        value = (jnp.where(jnp.asarray(value.weight) > 0, value.value, 0.0), value.weight)
    return jnp.stack([jnp.asarray(part, jnp.float32) for part in value])
