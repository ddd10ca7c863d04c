"""Validation units: each has its own held-out data and its own measure, and tells how far it is."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from trainers import runtime
from trainers.config import EvaluationConfig
from trainers.evaluation.outputs import Collector
from trainers.metrics.accumulator import Layout, MetricSums
from trainers.metrics.publisher import with_perplexity
from trainers.parallel import mesh as meshes
from trainers.parallel.platform import wait_for_device
from trainers.protocol import Batch, EvaluationMetrics
from trainers.step.state import TrainState
from trainers.step.train_step import EVALUATION_COUNTS

DEFAULT_UNIT = "eval"
"""The name of the unit with the held-out data of `data.dataset`."""
NO_DATA = "there is no held-out data to evaluate on; set data.eval_fraction"


def lacks_data(config: EvaluationConfig) -> str:
    """Returns what is wrong with scheduled evaluations that have no held-out data; empty if none is scheduled."""
    scheduled = [name for name in ("every_steps", "every_epochs", "at_start") if getattr(config, name)]
    return f"evaluation.{scheduled[0]}: {NO_DATA}" if scheduled and not config.units else ""


@dataclass(frozen=True)
class ValidationUnit:
    """One set of held-out data, and the step that measures it. All hosts must call its methods alike."""

    loader: Any
    """`epoch()` iterates over all batches, and gives as many on every host: leaves [1, rows, ...], sharded as in training. Rows
    of `weight` 0, such as those that pad the last batch, do not count."""
    step: Callable[[TrainState, MetricSums, Batch], Any]
    """`trainers.step.train_step.make_eval_step`, compiled; with predictions if there is a `new_metrics`."""
    layout: Layout
    mesh: Mesh
    max_batches: int | None = None
    """The limit for the number of batches; None: all."""
    name: str = DEFAULT_UNIT
    new_metrics: Callable[[], EvaluationMetrics] | None = None
    """Makes the metrics of the predictions for one evaluation; None: there are none."""
    prepare: Callable[[TrainState, Batch], Batch] | None = None
    """The hook on batches that are on the devices."""
    flops_per_example: float = 0.0
    """Forward and backward, as the task knows them."""
    rates: dict[str, float] = field(default_factory=dict)
    """How long the last evaluation took, and its rates. They are no metrics: the same state gives others each time."""

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Returns means over all examples, each counted once: sums and counts are added up on the devices, and divided at the
        end."""
        metric_sums, collector, watch = self._zeros(), self._collector(), Stopwatch()
        for batch in self._batches(state):
            metric_sums = self._add(state, metric_sums, batch, collector, watch)
        metrics = self._result(wait_for_device(metric_sums), collector)
        self._take_rates(wait_for_device(metric_sums), watch)
        return metrics

    def eval(self, state: TrainState) -> Generator[dict[str, float], None, dict[str, float]]:
        """Yields the metrics of each batch, with its seconds and rates. Returns the metrics of all, as `evaluate` does."""
        total: Any = self.layout.zeros()
        collector, watch = self._collector(), Stopwatch()
        for batch in self._batches(state):
            # Sums of their own for each batch: the step donates what it gets.
            metric_sums: Any = wait_for_device(self._add(state, self._zeros(), batch, collector, watch))
            total = self.layout.combine(total, metric_sums, steps=False)
            self._take_rates(metric_sums, watch)
            yield self._read(metric_sums) | self.rates
            watch = Stopwatch()  # what the caller did meanwhile does not count
        return self._result(np.asarray(total), collector)

    def _add(
        self, state: TrainState, metric_sums: MetricSums, batch: Batch, collector: Collector | None, watch: Stopwatch
    ) -> MetricSums:
        """Returns the sums with one more batch."""
        if getattr(self.step, "compiled", True) is None:  # a program that was not called yet
            begun_s = watch.clock()
            self.step.prepare(state, metric_sums, batch)  # type: ignore[attr-defined]
            watch.leave_out(begun_s)
        if collector is None:
            return self.step(state, metric_sums, batch)
        metric_sums, outputs = self.step(state, metric_sums, batch)
        collector.add(outputs)
        return metric_sums

    def _collector(self) -> Collector | None:
        return None if self.new_metrics is None else Collector(self.name, self.new_metrics)

    def _result(self, metric_sums: np.ndarray, collector: Collector | None) -> dict[str, float]:
        return self._read(metric_sums) | ({} if collector is None else collector.result())

    def _take_rates(self, metric_sums: np.ndarray, watch: Stopwatch) -> None:
        values = self.layout.read(metric_sums)
        counts = {name.removeprefix("counted/"): values[name] for name in EVALUATION_COUNTS if name in values}
        self.rates.clear()
        self.rates.update(watch.rates(counts, self.flops_per_example, self.mesh.devices.size))

    def _batches(self, state: TrainState) -> Iterator[Batch]:
        # The same number of batches on all hosts: the step has collectives.
        batches = itertools.islice(self.loader.epoch(), self.max_batches)
        prepared = batches if self.prepare is None else (self.prepare(state, batch) for batch in batches)
        return reported(self.name, prepared, self._num_batches())

    def _num_batches(self) -> int | None:
        """Returns the number of batches; None if the loader does not know it."""
        try:
            known = len(self.loader)
        except TypeError:  # a loader of one's own, or one around an iterable without a length
            return self.max_batches
        return known if self.max_batches is None else min(known, self.max_batches)

    def _zeros(self) -> MetricSums:
        return meshes.put_everywhere(self.mesh, self.layout.zeros())

    def _read(self, metric_sums: np.ndarray) -> dict[str, float]:
        values = self.layout.read(metric_sums)
        metrics = {name: value for name, value in values.items() if name not in EVALUATION_COUNTS}
        if self.layout.terms and "loss" in metrics:
            # The sum of the terms' means over all batches, which is not the mean of the batches' totals.
            metrics["loss"] = sum(metrics.get(name, 0.0) for name in self.layout.terms)
        return with_perplexity(metrics, self.layout)


def shapes_of_rows(batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch as they are passed to a loss: leaves [rows, ...]."""
    return {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in batch.items()}


TELL_EVERY_S = 1.0
"""The shortest time between two events of progress."""
FORWARD_PART = 1 / 3
"""The part of `flops_per_token` that is the forward pass: the backward pass takes twice as much."""


def reported(unit: str, batches: Iterable[Any], total: int | None, clock: Callable[[], float] = time.monotonic) -> Iterator[Any]:
    """Yields the batches, and reports how many were given to the devices. Waits for none of them."""
    host, noted_s = runtime.current(), clock()
    for done, batch in enumerate(batches, 1):
        yield batch
        # On every host, for its own watchdog: the heartbeats bring it.
        host.evaluated_batches += 1
        if clock() - noted_s >= TELL_EVERY_S:
            noted_s = clock()
            if jax.process_index() == 0:
                host.emit({"ev": "evaluating", "unit": unit, "done": done, "total": total})


class Stopwatch:
    """The time of an evaluation, without what it took to compile."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock, self.since_s = clock, clock()

    def rates(self, counts: dict[str, float], flops_per_example: float, num_devices: int) -> dict[str, float]:
        """Returns the rates of the `tokens` and `samples` since the stopwatch was started, and starts it again."""
        now_s = self.clock()
        # Never 0: a clock may not have moved.
        seconds, self.since_s = max(now_s - self.since_s, 1e-9), now_s
        rates = {"seconds": seconds} | {f"{name}_per_s": count / seconds for name, count in counts.items()}
        if flops_per_example and "samples" in counts:
            flops = flops_per_example * FORWARD_PART * rates["samples_per_s"] / num_devices
            rates["tflops_per_s_per_device"] = flops / 1e12
        return rates

    def leave_out(self, since_s: float) -> None:
        """Does not count the time since `since_s`."""
        self.since_s += self.clock() - since_s
