"""What the driver knows of its run, exported to Prometheus: at every change of its state, and once a second while it trains."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from gangway.wire.events import Heartbeat
from gangway.wire.limits import PHASES
from orchestrator.driver.states import FOLLOWERS
from orchestrator.run_state.goodput import share
from orchestrator.run_state.progress import Progress
from orchestrator.tracking import prometheus
from orchestrator.tracking.prometheus import Gauges
from trainers.metrics import host_usage

EVERY_S = 1.0
STATES = tuple(dict.fromkeys((*(state.label for state in FOLLOWERS if state.label), *(phase.label for phase in PHASES.values()))))
NOT_KEPT = "earlier"
"""The kind of the incidents that are counted and no longer known."""


class ExportedMetrics:
    """Sets the metrics of a run. Changes nothing, and waits for nothing."""

    def __init__(self, gauges: Gauges, progress: Progress):
        self._gauges, self._progress = gauges, progress
        self._set_at_s = -math.inf
        self._num_incidents = 0
        self._incidents: Counter[str] = Counter()
        self._busy: dict[int, tuple[int, float]] = {}
        """The batches and the busy seconds of each host, by its newest heartbeat."""

    def publish(self, metrics: Mapping[str, float]) -> None:
        self._gauges.publish(metrics)

    def start(self, num_hosts: int) -> None:
        """A gang of so many hosts begins. Of hosts that it has no more there is no number."""
        for host in [host for host in self._busy if host >= num_hosts]:
            for metric in prometheus.OF_HOSTS.values():
                self._gauges.set(metric, math.nan, str(host))
        self._busy = {}
        self._gauges.set(prometheus.HOSTS, num_hosts)

    def host(self, host: int, event: Heartbeat) -> None:
        """Sets what a heartbeat says of its host."""
        for name, value in event.get("usage", {}).items():
            if (metric := prometheus.OF_HOSTS.get(name)) is not None:
                self._gauges.set(metric, value / 100 if name == host_usage.CPU else value, str(host))
        if "busy_s" in event:
            batches, busy_s = self._busy.get(host, (0, 0.0))
            if event["batch_index"] > batches and host in self._busy:
                mean_s = (event["busy_s"] - busy_s) / (event["batch_index"] - batches)
                self._gauges.set(prometheus.OF_HOSTS["step_time_s"], mean_s, str(host))
            self._busy[host] = (event["batch_index"], event["busy_s"])

    def state(self, label: str, now_s: float) -> None:
        """The run is in another state."""
        for state in STATES:
            self._gauges.set(prometheus.STATE, float(state == label), state)
        progress = self._progress
        self.now(progress.trained_step or progress.checkpoint_step or 0, now_s)

    def often(self, step: int, now_s: float) -> None:
        """As `now`, at most once a second. `step`: how far the gang has trained."""
        if now_s >= self._set_at_s + EVERY_S:
            self.now(step, now_s)

    def now(self, step: int, now_s: float) -> None:
        """Sets what follows from the progress of the run."""
        self._set_at_s = now_s
        progress, earlier = self._progress, self._progress.earlier
        seconds = {name: value + earlier.seconds.get(name, 0.0) for name, value in progress.goodput.totals(now_s).items()}
        self._gauges.ledger(seconds, share(seconds))
        self._gauges.set(prometheus.STEP, step)
        for metric, value in ((prometheus.MAX_STEPS, progress.max_steps), (prometheus.CHECKPOINT_STEP, progress.checkpoint_step)):
            if value is not None:
                self._gauges.set(metric, value)
        generations = earlier.generations + progress.generations
        self._gauges.set(prometheus.GENERATIONS, generations)
        self._gauges.set(prometheus.DISRUPTIONS, max(0, generations - earlier.launches - 1), "CUMULATIVE")
        self._gauges.set(prometheus.PRODUCTIVE_STEPS, progress.high_water_step)
        self._set_incidents()

    def _set_incidents(self) -> None:
        total = self._progress.earlier.num_incidents + self._progress.num_incidents
        if new := total - self._num_incidents:
            known = [*(incident for _, incident in self._progress.earlier_incidents), *self._progress.incidents][-new:]
            self._incidents.update(incident.kind for incident in known)
            self._incidents[NOT_KEPT] += new - len(known)
            self._num_incidents = total
            for kind, number in self._incidents.items():
                self._gauges.set(prometheus.INCIDENTS, number, kind)
