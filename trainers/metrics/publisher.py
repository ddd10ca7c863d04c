"""Publishes metrics once per interval: the step sums them on the device, and they are fetched when the interval is complete."""

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
from trainers.parallel.platform import wait_for_device

NO_STEPS = ("evaluation", "checkpoint", "preview")
"""Categories of `Seconds` that are not part of the time of a step."""


@dataclass
class Seconds:
    """The wall time since the last publish that the loop's host spent on something other than steps, by category."""

    clock: Callable[[], float] = time.perf_counter
    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, category: str) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            self.add(category, self.clock() - start)

    def add(self, category: str, seconds: float) -> None:
        self.spent[category] = self.spent.get(category, 0.0) + seconds

    def drain(self) -> dict[str, float]:
        spent, self.spent = self.spent, {}
        return spent


_REMOVED = object()


class Replaced:
    """The metrics that `BaseTrainer.on_step_end` replaced since the last publish. Values may still be on the device."""

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {}

    def add(self, given: Mapping[str, Any], returned: Mapping[str, Any]) -> None:
        for name, value in returned.items():
            # By identity: to compare the values would wait for the device.
            if given.get(name, _REMOVED) is not value:
                self._values.setdefault(name, []).append(value)
        for name in given.keys() - returned.keys():
            self._values.setdefault(name, []).append(_REMOVED)

    def drain(self) -> dict[str, list[Any]]:
        values, self._values = self._values, {}
        return values


def replace(metrics: dict[str, float], replaced: Mapping[str, list[Any]]) -> dict[str, float]:
    """Returns `metrics` with the means of the values that a hook returned, and without those that it always removed."""
    metrics = dict(metrics)
    for name, values in replaced.items():
        # No wait in practice: an interval is published when its last step is complete.
        if numbers := [float(value) for value in values if value is not _REMOVED]:
            metrics[name] = sum(numbers) / len(numbers)
        else:
            metrics.pop(name, None)
    return metrics


class BusyTime:
    """Counts the seconds in which the loop's thread did work of its own. A host that is slow by itself has more of them than
    others, while all hosts wait equally long for the slowest."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock, self._spent_s = clock, 0.0
        self._since_s = clock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Use this around whatever waits for devices or other hosts."""
        # What came before this wait was the host's own work.
        self._spent_s += self.clock() - self._since_s
        try:
            yield
        finally:
            self._since_s = self.clock()

    @property
    def total_s(self) -> float:
        return self._spent_s + self.clock() - self._since_s


@dataclass
class Interval:
    """Metric sums on their way to the host, and the host's knowledge of the steps it covers."""

    metric_sums: MetricSums
    first_step: int
    last_step: int
    seconds: dict[str, float]
    replaced: Mapping[str, list[Any]]
    distributions: Any = None
    """The histograms of the interval's last step, on the device; None if there are none."""
    end_s: float | None = None
    """When its last step was complete."""


THROUGHPUT = ("step_time_s", "tokens_per_s", "samples_per_s", "mfu", "mfu_of_fp8_peak")
"""The metrics that a run's result repeats, of its last publish."""


@dataclass(frozen=True)
class Throughput:
    """The constants that turn counts into rates."""

    flops_per_token: float
    tokens_per_example: int
    """Those that are computed, whether they are targets or not."""
    num_devices: int
    peak_flops_per_s: float | None = None
    fp8_peak_flops_per_s: float | None = None
    """Of a training whose linear layers multiply in 8 bits, if it is known."""


class Publisher:
    """Collects the metric sums of each interval, and hands its numbers to `publish(step, metrics, seconds, distributions)`.

    `cut` ends an interval without waiting: the numbers are copied while the next steps run. `collect` reads them when the loop
    knows that the interval's last step is complete (`completed`), so nothing waits for the device. The time of an interval is
    that between the completions of steps: hosts begin steps before older ones are complete, some at once and some late.
    """

    def __init__(
        self,
        throughput: Throughput,
        layout: Layout,
        publish: Callable[[int, dict[str, float], dict[str, float], np.ndarray | None], None],
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.throughput, self.layout, self.publish, self.clock = throughput, layout, publish, clock
        self.pending: collections.deque[Interval] = collections.deque()
        self._since_s = clock()
        self._first_step = 0
        self._completed_step, self._completed_s = -1, 0.0

    def start(self, step: int) -> None:
        """Begins at `step`, which after a rollback may lie before what was published. Drops intervals that are not complete."""
        # What they cover is trained again after a rollback, and is published then.
        self.pending.clear()
        self._first_step, self._since_s = step, self.clock()
        self._completed_step = -1

    def completed(self, step: int) -> None:
        """Notes that `step` is complete now. The loop calls this for each step, in their order."""
        self._completed_step, self._completed_s = step, self.clock()
        for interval in self.pending:
            if interval.last_step == step:
                interval.end_s = self._completed_s

    def cut(
        self,
        step: int,
        metric_sums: MetricSums,
        seconds: dict[str, float],
        replaced: Mapping[str, list[Any]],
        distributions: Any = None,
    ) -> None:
        # Start the copies now: they run beside the next steps, and `collect` finds the numbers on the host.
        for array in (metric_sums, distributions) if distributions is not None else (metric_sums,):
            array.copy_to_host_async()
        end_s = self._completed_s if step == self._completed_step else None
        self.pending.append(Interval(metric_sums, self._first_step, step, seconds, replaced, distributions, end_s))
        self._first_step = step

    def collect(self, completed_step: int) -> None:
        """Publishes every interval whose last step is complete."""
        while self.pending and self.pending[0].last_step <= completed_step:
            self._publish(self.pending.popleft())

    def flush(self, step: int, metric_sums: MetricSums, seconds: dict[str, float], replaced: Mapping[str, list[Any]]) -> None:
        """Publishes everything up to `step`, which must be complete; also a part of an interval."""
        if step > self._first_step:
            self.cut(step, metric_sums, seconds, replaced)
        self.collect(step)

    def _publish(self, interval: Interval) -> None:
        metrics = with_perplexity(self.layout.read(wait_for_device(interval.metric_sums)), self.layout)
        end_s = self.clock() if interval.end_s is None else interval.end_s
        metrics |= self._rates(interval, end_s - self._since_s, metrics.get("tokens", 0.0), metrics.get("samples", 0.0))
        self._since_s = end_s
        distributions = None if interval.distributions is None else wait_for_device(interval.distributions)
        self.publish(interval.last_step, replace(metrics, interval.replaced), interval.seconds, distributions)

    def _rates(self, interval: Interval, wall_s: float, tokens: float, samples: float) -> dict[str, float]:
        num_steps = interval.last_step - interval.first_step
        other_s = sum(interval.seconds.get(name, 0) for name in NO_STEPS)
        # Never 0: a clock may not have moved in a very short interval.
        steps_s, throughput = max(wall_s - other_s, 1e-9), self.throughput
        # Of all that is computed: of a completion in 64 tokens, one may be a target.
        flops = throughput.flops_per_token * throughput.tokens_per_example * samples / steps_s / throughput.num_devices
        rates = {
            "step_time_s": steps_s / max(num_steps, 1),
            "tokens_per_s": tokens / steps_s,
            "tokens_per_s_per_device": tokens / steps_s / throughput.num_devices,
            "samples_per_s": samples / steps_s,
            "flops_per_token": throughput.flops_per_token,
            "tflops_per_s_per_device": flops / 1e12,
        }
        if throughput.peak_flops_per_s:
            rates["mfu"] = flops / throughput.peak_flops_per_s
        if throughput.fp8_peak_flops_per_s:
            rates["mfu_of_fp8_peak"] = flops / throughput.fp8_peak_flops_per_s
        return rates


def device_memory(devices: Sequence[jax.Device]) -> dict[str, float]:
    """Returns the memory of the fullest of these devices of this host. Empty if the backend does not count it, as on a CPU."""
    stats = [device.memory_stats() or {} for device in devices]
    names = {"device_memory_bytes": "bytes_in_use", "device_memory_peak_bytes": "peak_bytes_in_use"}
    # Only what all of them count: the maximum over some would pass for that over all.
    counted = {name: key for name, key in names.items() if all(key in device_stats for device_stats in stats)}
    return {name: max(device_stats[key] for device_stats in stats) for name, key in counted.items()}


NOT_OF_TOKENS = ("z_loss", "load_balancing_loss", "router_z_loss")
"""Parts of the loss of a language model beside the cross-entropy."""


def with_perplexity(metrics: dict[str, float], layout: Layout) -> dict[str, float]:
    """Adds `perplexity` to the metrics of a loss of tokens, from the loss without its z-loss and those of routers."""
    if "loss" not in metrics or not layout.of_tokens:
        return metrics
    # exp overflows beyond 709.
    of_tokens = metrics["loss"] - sum(metrics.get(name, 0.0) for name in NOT_OF_TOKENS)
    return {**metrics, "perplexity": math.exp(min(of_tokens, 700.0))}
