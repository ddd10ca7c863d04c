"""Reports the metrics of an interval: to callbacks, as an event of host 0, and in the meta of the next checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from gangway.wire.events import Metrics
from trainers import runtime
from trainers.callbacks import Callback, CallbackList, RunInfo
from trainers.loop.triggers import Epochs
from trainers.metrics import histograms
from trainers.metrics.host_usage import HostUsage
from trainers.metrics.publisher import device_memory


@dataclass
class MetricsReporter:
    callbacks: CallbackList
    info: RunInfo
    epochs: Epochs
    devices: Sequence[jax.Device]
    """The devices of this host, whose memory is published."""
    histogram_names: list[str]
    """The names of the parameters that have histograms, in the order of the rows that the step returns."""
    data_numbers: Callable[[int], dict[str, float]] = lambda step: {}
    """What the data tells of the batches before a step, such as how often each source was read."""
    once: dict[str, float] = field(default_factory=dict)
    """Metrics that do not change: they are published with the first ones."""
    usage: HostUsage = field(default_factory=HostUsage)
    latest: dict[str, float] = field(default_factory=dict)
    """The metrics of the last publish; after a restore, those of the last one before that checkpoint."""

    def report(self, step: int, metrics: dict[str, float], seconds: dict[str, float], bins: np.ndarray | None) -> None:
        """Reports the metrics of the interval that ends at `step`. `seconds` says where the host spent its time since the last
        publish. `bins` [histogram, bin] are the histograms of the step, if they are due."""
        if self.epochs.num_samples:
            metrics["epoch"] = self.epochs.at(step)
        metrics |= self.once | self.data_numbers(step)
        self.once = {}
        # Of this host's devices only: asking other hosts would need an exchange.
        metrics |= device_memory(self.devices)
        # Kept for the heartbeats, which bring every host's usage to the driver.
        runtime.current().usage = self.usage.read()
        metrics |= runtime.current().usage
        self.latest = metrics
        event: Metrics = {"ev": "metrics", "step": step, "metrics": metrics, "seconds": seconds}
        if bins is not None:
            event["distributions"] = histograms.read(bins, self.histogram_names)
        fields: dict[str, Any] = {name: value for name, value in event.items() if name != "ev"}
        # On every host: callbacks run everywhere, the event is sent by host 0 alone.
        self.callbacks.call(Callback.on_publish, self.info, **fields)
        if jax.process_index() == 0:
            runtime.current().emit(event)
