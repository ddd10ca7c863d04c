"""Validation units: held-out data, each with a reader of its own, and what is measured on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from trainers.metrics.accumulator import Layout, MetricSums
from trainers.metrics.publisher import with_perplexity
from trainers.parallel import mesh as meshes
from trainers.protocol import Batch
from trainers.runtime.device import wait_for_device
from trainers.step.state import TrainState

DEFAULT_UNIT = "eval"
"""The held-out data of `data.dataset`."""


@dataclass(frozen=True)
class ValidationUnit:
    """All hosts must call its methods alike."""

    loader: Any
    """`epoch()` iterates over all batches, the same number of them on all hosts: leaves [1, rows, ...], sharded as in training;
    rows of `weight` 0, such as those that fill up the last batch, do not count."""
    step: Callable[[TrainState, MetricSums, Batch], MetricSums]
    layout: Layout
    mesh: Mesh
    max_batches: int | None = None
    """Default: all."""

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Means over all examples, each counted once: sums and counts are added up on the devices, and divided at the end."""
        metric_sums = self._zeros()
        for batch in self._batches():
            metric_sums = self.step(state, metric_sums, batch)
        return self._read(metric_sums)

    def eval(self, state: TrainState) -> Iterator[dict[str, float]]:
        """The metrics of each batch."""
        return (self._read(self.step(state, self._zeros(), batch)) for batch in self._batches())

    def _batches(self) -> Iterator[Batch]:
        return itertools.islice(self.loader.epoch(), self.max_batches)

    def _zeros(self) -> MetricSums:
        return meshes.put_everywhere(self.mesh, self.layout.zeros())

    def _read(self, metric_sums: MetricSums) -> dict[str, float]:
        metrics = self.layout.read(wait_for_device(metric_sums))
        if self.layout.terms and "loss" in metrics:
            # Of their means over all batches, not a mean of the batches' totals.
            metrics["loss"] = sum(metrics.get(name, 0.0) for name in self.layout.terms)
        return with_perplexity(metrics)


def shapes_of_rows(batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Those of a batch as a loss sees them: leaves [rows, ...]."""
    return {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in batch.items()}
