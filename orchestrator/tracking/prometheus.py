"""The run's state as Ray metrics: Prometheus scrapes them from every node, and Ray's dashboard draws them."""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Gauge

PUBLISHED = {
    "step": "optimizer steps completed",
    "loss": "mean training loss of the last published interval, nats per target",
    "eval_loss": "mean loss on held-out data, nats per target",
    "tokens_per_s": "training tokens per second, padding excluded",
    "step_time_s": "seconds per step",
    "generations": "lives of the gang so far",
    "goodput": "share of the wall clock spent in steps that counted",
}


class Gauges:
    """`gangway_NAME{run="..."}`; setting one takes microseconds."""

    def __init__(self, run: str):
        self._gauges = {name: Gauge(f"gangway_{name}", text, tag_keys=("run",)) for name, text in PUBLISHED.items()}
        self._tags = {"run": run}

    def set(self, values: Mapping[str, float]) -> None:
        """Sets those of `values` that are published; the others are passed over."""
        for name, gauge in self._gauges.items():
            if name in values:
                gauge.set(values[name], tags=self._tags)
