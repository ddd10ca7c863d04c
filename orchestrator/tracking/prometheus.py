"""The metrics of a run for Prometheus: their names, units and labels. Ray exports them from every node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ray.util.metrics import Counter, Gauge


class Metric(NamedTuple):
    """A metric, called as Prometheus asks: in base units, a total that only grows as `_total`. Ray puts `ray_` before it."""

    name: str
    unit: str
    text: str
    labels: tuple[str, ...] = ()
    """Beside that of the run."""


PUBLISHED = {
    "loss": Metric("gangway_loss", "nats per target", "mean training loss of the last published interval"),
    "eval_loss": Metric("gangway_eval_loss", "nats per target", "mean loss on held-out data"),
    "learning_rate": Metric("gangway_learning_rate", "1", "learning rate of the newest step"),
    "grad_norm": Metric("gangway_grad_norm", "1", "norm of the gradient before clipping"),
    "total_tokens": Metric("gangway_tokens", "tokens", "tokens trained on since the run began; a rollback takes some back"),
    "tokens_per_s": Metric("gangway_tokens_per_second", "tokens/s", "tokens trained on in a second, padding excluded"),
    "mfu": Metric("gangway_mfu_ratio", "1", "model FLOPs over the peak of the devices"),
    "step_time_s": Metric("gangway_step_seconds", "s", "wall time of a step"),
    "device_memory_bytes": Metric("gangway_device_memory_bytes", "bytes", "memory in use on the fullest device of host 0"),
    "device_memory_peak_bytes": Metric("gangway_device_memory_peak_bytes", "bytes", "the most that was ever in use there"),
}
"""By the name of a published number, as in docs/metrics.md."""

OF_HOSTS = {
    "step_time_s": Metric("gangway_host_step_seconds", "s", "time that the host works at a step, without waits", ("host",)),
    "host_cpu_percent": Metric("gangway_host_cpu_ratio", "1", "CPU time in use over that of all cores", ("host",)),
    "host_memory_bytes": Metric("gangway_host_memory_bytes", "bytes", "memory of the machine in use", ("host",)),
    "host_memory_total_bytes": Metric("gangway_host_memory_total_bytes", "bytes", "memory of the machine", ("host",)),
    "process_memory_bytes": Metric("gangway_process_memory_bytes", "bytes", "memory of the training process", ("host",)),
}
"""By the name of what a heartbeat says."""

STATE = Metric("gangway_state", "0 or 1", "1 for the state that the run is in", ("state",))
STEP = Metric("gangway_step", "steps", "optimizer steps completed; goes back at a restart and at a rollback")
MAX_STEPS = Metric("gangway_max_steps", "steps", "optimizer steps wanted; absent without `max_num_steps`")
CHECKPOINT_STEP = Metric("gangway_checkpoint_step", "steps", "step of the newest checkpoint")
HOSTS = Metric("gangway_hosts", "hosts", "hosts of the present gang, or of the last one")
GOODPUT = Metric("gangway_goodput_ratio", "1", "share of the wall clock, up to the last step, in steps that counted")
TIME = Metric("gangway_time_seconds", "s", "wall clock of all launches, by category of the goodput ledger", ("category",))
INCIDENTS = Metric("gangway_incidents_total", "incidents", "failures, resizes and anomalies, by kind", ("kind",))
GENERATIONS = Metric("gangway_generations_total", "generations", "lives of the gang: the starts and restarts of all launches")

GOODPUT_TIME = Metric("workload_goodput_time", "s", "time in steps that counted", ("goodput_source",))
BADPUT_TIME = Metric("workload_badput_time", "s", "time in anything else, by its source", ("badput_source",))
ELAPSED_TIME = Metric("workload_total_elapsed_time", "s", "wall clock of all launches", ("window_type",))
DISRUPTIONS = Metric("workload_disruptions", "restarts", "restarts of the gang", ("window_type",))
PRODUCTIVE_STEPS = Metric("workload_max_productive_steps", "steps", "the furthest step that was ever trained")

OF_RUN = (STATE, STEP, MAX_STEPS, CHECKPOINT_STEP, HOSTS, GOODPUT, TIME, INCIDENTS, GENERATIONS)
OF_GOOGLE = (GOODPUT_TIME, BADPUT_TIME, ELAPSED_TIME, DISRUPTIONS, PRODUCTIVE_STEPS)
"""The names of Google's ml-goodput-measurement in Cloud Monitoring, without their `compute.googleapis.com/`."""
METRICS = (*PUBLISHED.values(), *OF_RUN, *OF_HOSTS.values(), *OF_GOOGLE)

BADPUT_SOURCES = {
    "start": "OTHER",
    "schedule": "OTHER",
    "import": "TRAINING_PREP",
    "join": "TPU_INITIALIZATION",
    "compile": "PROGRAM_STARTUP",
    "restore": "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    "data_wait": "DATA_LOADING_SYNC",
    "checkpoint": "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    "evaluation": "CUSTOM_BADPUT_EVENTS.EVALUATION",
    "detection": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "recovery": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "replay": "WASTED_PROGRESS_FROM_DISRUPTION",
    "idle": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "finish": "OTHER",
}
"""What Google calls each category of the ledger but `step`, which is its goodput."""


class Gauges:
    """The metrics of one run. Setting one takes microseconds. The run is the label `run`; for Google's, `workload_id`."""

    def __init__(self, run: str):
        self._run = run
        self._made: dict[str, Gauge | Counter] = {}
        self._counted: dict[tuple[str, ...], float] = {}

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """`labels`: the values of the labels of the metric. Of a counter, `value` is the total, which never falls."""
        run = "workload_id" if metric in OF_GOOGLE else "run"
        tags = {run: self._run, **dict(zip(metric.labels, labels, strict=True))}
        made = self._made.get(metric.name)
        if made is None:
            kind = Counter if metric.name.endswith("_total") else Gauge
            made = self._made[metric.name] = kind(metric.name, f"{metric.text} [{metric.unit}]", tag_keys=tuple(tags))
        if isinstance(made, Gauge):
            made.set(value, tags=tags)
        elif (more := value - self._counted.get((metric.name, *labels), 0.0)) > 0:
            made.inc(more, tags=tags)
            self._counted[metric.name, *labels] = value

    def publish(self, values: Mapping[str, float]) -> None:
        """Sets those of the published numbers that go out; the others are passed over."""
        for name, metric in PUBLISHED.items():
            if name in values:
                self.set(metric, values[name])

    def ledger(self, seconds: Mapping[str, float], goodput: float) -> None:
        """Sets what follows from the goodput ledger: the seconds by category, those of all launches, and their goodput."""
        wall_s, productive_s = sum(seconds.values()), seconds.get("step", 0.0)
        lost: dict[str, float] = dict.fromkeys(BADPUT_SOURCES.values(), 0.0)
        for category, value in seconds.items():
            self.set(TIME, value, category)
            if category != "step":
                lost[BADPUT_SOURCES[category]] += value
        self.set(GOODPUT, goodput)
        self.set(GOODPUT_TIME, productive_s, "TOTAL")
        for source, value in lost.items():
            self.set(BADPUT_TIME, value, source)
        self.set(ELAPSED_TIME, wall_s, "CUMULATIVE")
