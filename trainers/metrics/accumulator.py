"""Metric sums: metrics summed on the device by the steps of an interval, one small array, fetched once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainers.errors import UsageError
from trainers.protocol import Last, Loss, Max, Min, Sum
from trainers.runtime.device import wait_for_device

MetricSums = jax.Array
"""float32[num_metrics, 2]: (value, weight) pairs in the order of the layout's names, since the last publish. A row of weight 0
says nothing."""


class Kind(StrEnum):
    """How two (value, weight) pairs become one. The weights add up."""

    MEAN = "mean"
    """The values are weighted sums: they add up, and are divided by the weight when they are read."""
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"
    """The newer one."""
    TOTAL = "total"
    """A sum over micro-batches; over steps the newer one, for the step makes it the sum since the run began."""
    COUNT = "count"
    """An integer since the run began, exact where float32 is not: (n // 2^24, n % 2^24 + 1). The newer one."""


COUNT_BASE = 1 << 24
"""Both halves of a count are exact in float32 up to 2^48 - 1."""

KINDS = {Sum: Kind.SUM, Max: Kind.MAX, Min: Kind.MIN, Last: Kind.LAST}


@dataclass(frozen=True)
class Layout:
    """The names of the metrics in the sums, and how each is combined."""

    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    terms: tuple[str, ...] = ()
    """Of a loss that is a dict: what adds up to `loss`."""

    @classmethod
    def of(cls, loss: Loss, **others: Kind) -> Layout:
        """Of a loss (its shapes suffice), and further metrics."""
        parts = {name: _kind(name, part) for name, part in loss.parts.items()}
        if taken := parts.keys() & {"loss", *others}:
            raise UsageError(f"the task's loss has parts named {', '.join(sorted(taken))}, which the step measures: rename them")
        kinds = {"loss": Kind.MEAN, **parts, **others}
        return cls(tuple(kinds), tuple(kinds.values()))

    def __len__(self) -> int:
        return len(self.names)

    def zeros(self) -> np.ndarray:
        return np.zeros((len(self), 2), np.float32)

    def pairs(self, values: Mapping[str, Any]) -> MetricSums:
        """The sums of one batch. A name that `values` lacks gets weight 0."""
        return jnp.stack([_pair(values.get(name, (0.0, 0.0))) for name in self.names])

    def combine(self, metric_sums: MetricSums, new: MetricSums, *, steps: bool = True) -> MetricSums:
        """`metric_sums`, and then `new`: of steps, or of the micro-batches of one."""
        (value, weight), (new_value, new_weight) = metric_sums.T, new.T
        counts, known = new_weight > 0, weight > 0
        rules = {
            Kind.MAX: jnp.where(counts & known, jnp.maximum(value, new_value), jnp.where(counts, new_value, value)),
            Kind.MIN: jnp.where(counts & known, jnp.minimum(value, new_value), jnp.where(counts, new_value, value)),
            Kind.LAST: jnp.where(counts, new_value, value),
        }
        if steps:
            rules[Kind.TOTAL] = rules[Kind.COUNT] = rules[Kind.LAST]
        out, weights = value + new_value, weight + new_weight
        for kind in sorted(set(self.kinds) & rules.keys()):
            out = jnp.where(np.array([own is kind for own in self.kinds]), rules[kind], out)
        if steps and Kind.COUNT in self.kinds:
            whole = np.array([own is Kind.COUNT for own in self.kinds])
            weights = jnp.where(whole, jnp.where(counts, new_weight, weight), weights)
        return jnp.stack([out, weights], axis=1)

    def read(self, metric_sums: np.ndarray) -> dict[str, float]:
        """The values by name, of what there was any of."""
        rows = zip(self.names, self.kinds, metric_sums.tolist(), strict=True)
        return {name: _read(kind, value, weight) for name, kind, (value, weight) in rows if weight}

    def weight(self, metric_sums: np.ndarray, name: str) -> float:
        return float(metric_sums[self.names.index(name), 1])


class Scalar:
    """A metric of one step, still on the device: `float()` of it waits for the step, using it in `jax.numpy` does not."""

    __slots__ = ("_bag", "_kind", "_row")

    def __init__(self, metric_sums: MetricSums, row: int, kind: Kind):
        self._bag, self._row, self._kind = metric_sums, row, kind

    def __jax_array__(self) -> jax.Array:
        return _read(self._kind, *self._bag[self._row])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(float(self), dtype)

    def __float__(self) -> float:
        value, weight = wait_for_device(self._bag)[self._row].tolist()
        return float(_read(self._kind, value, weight)) if weight else math.nan

    def __repr__(self) -> str:
        return "Scalar(on the device; float() waits for it)"


def scalars(layout: Layout, measured: MetricSums) -> dict[str, Scalar]:
    """The metrics of one step by name, without waiting for it."""
    return {name: Scalar(measured, row, kind) for row, (name, kind) in enumerate(_kinds(layout))}


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
    """The pair of a COUNT, from a (high, low) pair of uint32."""
    high, low = words
    return (high << 8) | (low >> 24), (low & jnp.uint32(COUNT_BASE - 1)) + 1


def _pair(value: Any) -> jax.Array:
    if isinstance(value, Sum | Max | Min | Last):
        value = (jnp.where(jnp.asarray(value.weight) > 0, value.value, 0.0), value.weight)
    return jnp.stack([jnp.asarray(part, jnp.float32) for part in value])
