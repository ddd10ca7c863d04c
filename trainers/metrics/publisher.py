"""Metrics: summed on the device by the step, fetched when the numbers are there, published once per interval."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from trainers.metrics.accumulator import Layout, MetricSums
from trainers.runtime.device import wait_for_device

NO_STEPS = ("evaluation", "checkpoint", "preview")
"""Categories of `Seconds` that are no part of the time of a step."""


@dataclass
class Seconds:
    """Wall time that the loop's host spent in something other than steps, by category, since the last publish."""

    clock: Callable[[], float] = time.perf_counter
    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, category: str) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            self.spent[category] = self.spent.get(category, 0.0) + self.clock() - start

    def take(self) -> dict[str, float]:
        spent, self.spent = self.spent, {}
        return spent


_TAKEN_OUT = object()


class Replaced:
    """What `Hooks.on_step_end` made of the metrics of the steps since the last publish: values may be on the device still."""

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {}

    def add(self, given: Mapping[str, Any], returned: Mapping[str, Any]) -> None:
        for name, value in returned.items():
            if given.get(name, _TAKEN_OUT) is not value:
                self._values.setdefault(name, []).append(value)
        for name in given.keys() - returned.keys():
            self._values.setdefault(name, []).append(_TAKEN_OUT)

    def take(self) -> dict[str, list[Any]]:
        values, self._values = self._values, {}
        return values


def replace(metrics: dict[str, float], replaced: Mapping[str, list[Any]]) -> dict[str, float]:
    """`metrics` with the means of what a hook gave in their place, without what it took out of every step."""
    metrics = dict(metrics)
    for name, values in replaced.items():
        if numbers := [float(value) for value in values if value is not _TAKEN_OUT]:
            metrics[name] = sum(numbers) / len(numbers)
        else:
            metrics.pop(name, None)
    return metrics


class BusyTime:
    """Seconds in which the loop's thread did something of its own: a host that is slow by itself has more of them than others,
    while all wait for the slowest alike."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock, self._spent_s = clock, 0.0
        self._since_s = clock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for devices or other hosts."""
        self._spent_s += self.clock() - self._since_s
        try:
            yield
        finally:
            self._since_s = self.clock()

    @property
    def total_s(self) -> float:
        return self._spent_s + self.clock() - self._since_s


@dataclass(frozen=True)
class Interval:
    """Metric sums on their way to the host, and the host's knowledge of the steps it covers."""

    metric_sums: MetricSums
    first_step: int
    last_step: int
    wall_s: float
    seconds: dict[str, float]
    replaced: Mapping[str, list[Any]]
    distributions: Any = None
    """On the device, of the interval's last step; None if it measured none."""


@dataclass(frozen=True)
class Throughput:
    """What turns counts into rates."""

    flops_per_token: float
    num_devices: int
    peak_flops_per_s: float | None = None


class Publisher:
    """Collects the metric sums of each interval of `every_steps`, and hands its numbers to `publish(step, metrics, seconds,
    distributions)`.

    `cut` ends an interval without waiting: the numbers are copied while the next steps run. `collect` reads them when the loop
    knows that the interval's last step is complete, so nothing waits for the device.
    """

    def __init__(
        self,
        every_steps: int,
        throughput: Throughput,
        layout: Layout,
        publish: Callable[[int, dict[str, float], dict[str, float], np.ndarray | None], None],
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.every_steps, self.throughput, self.publish, self.clock = every_steps, throughput, publish, clock
        self.layout = layout
        self.pending: collections.deque[Interval] = collections.deque()
        self._since_s = clock()
        self._first_step = 0

    def start(self, step: int) -> None:
        """Begins at `step`, which may lie before what was published: what is not complete yet is forgotten."""
        self.pending.clear()
        self._first_step, self._since_s = step, self.clock()

    def due(self, step: int) -> bool:
        return step % self.every_steps == 0

    def cut(
        self,
        step: int,
        metric_sums: MetricSums,
        seconds: dict[str, float],
        replaced: Mapping[str, list[Any]],
        distributions: Any = None,
    ) -> None:
        for array in (metric_sums, distributions) if distributions is not None else (metric_sums,):
            array.copy_to_host_async()
        now = self.clock()
        self.pending.append(Interval(metric_sums, self._first_step, step, now - self._since_s, seconds, replaced, distributions))
        self._first_step, self._since_s = step, now

    def collect(self, completed_step: int) -> None:
        """Publishes every interval whose last step is complete."""
        while self.pending and self.pending[0].last_step <= completed_step:
            self._publish(self.pending.popleft())

    def flush(self, step: int, metric_sums: MetricSums, seconds: dict[str, float], replaced: Mapping[str, list[Any]]) -> None:
        """Publishes all that is known when `step` is complete, a part of an interval too."""
        if step > self._first_step:
            self.cut(step, metric_sums, seconds, replaced)
        self.collect(step)

    def _publish(self, interval: Interval) -> None:
        metrics = with_perplexity(self.layout.read(wait_for_device(interval.metric_sums)))
        metrics |= self._rates(interval, metrics.get("tokens", 0.0), metrics.get("samples", 0.0))
        distributions = None if interval.distributions is None else wait_for_device(interval.distributions)
        self.publish(interval.last_step, replace(metrics, interval.replaced), interval.seconds, distributions)

    def _rates(self, interval: Interval, tokens: float, samples: float) -> dict[str, float]:
        steps, other_s = interval.last_step - interval.first_step, sum(interval.seconds.get(name, 0) for name in NO_STEPS)
        busy_s, about = max(interval.wall_s - other_s, 1e-9), self.throughput
        flops = about.flops_per_token * tokens / busy_s / about.num_devices
        rates = {
            "step_time_s": busy_s / max(steps, 1),
            "tokens_per_s": tokens / busy_s,
            "tokens_per_s_per_device": tokens / busy_s / about.num_devices,
            "samples_per_s": samples / busy_s,
            "flops_per_token": about.flops_per_token,
            "tflops_per_s_per_device": flops / 1e12,
        }
        if about.peak_flops_per_s:
            rates["mfu"] = flops / about.peak_flops_per_s
        return rates


def device_memory(devices: Sequence[jax.Device]) -> dict[str, float]:
    """Of the fullest of these devices, this host's; empty where the backend does not count (the CPU's does not)."""
    stats = [device.memory_stats() or {} for device in devices]
    names = {"device_memory_bytes": "bytes_in_use", "device_memory_peak_bytes": "peak_bytes_in_use"}
    return {name: max(one[key] for one in stats) for name, key in names.items() if all(key in one for one in stats)}


def with_perplexity(metrics: dict[str, float]) -> dict[str, float]:
    """Adds `perplexity` beside `loss`: without what the z-loss has added to it."""
    if "loss" not in metrics:
        return metrics
    return {**metrics, "perplexity": math.exp(min(metrics["loss"] - metrics.get("z_loss", 0.0), 700.0))}
