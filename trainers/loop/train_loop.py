"""The training loop: reads straight down; where order matters, the line says what would break.

The host never waits for the step it has just dispatched. It waits for the step before last: that bounds how far it runs ahead,
and tells it what all hosts agreed on by then.

A *step* here is a batch drawn, whether or not its update was applied.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax

from trainers import runtime
from trainers.callbacks import Callback, CallbackList, RunInfo
from trainers.config import AnomalyConfig, DistributionConfig
from trainers.data.loader import StepAddressedLoader
from trainers.errors import CoordinatorError, DesyncError, LossScaleError, LossSpikeError, NonFiniteLossError
from trainers.loop import anomalies
from trainers.loop.anomalies import Anomaly, Decision
from trainers.loop.hooks import Hooks
from trainers.loop.host_requests import HostRequests
from trainers.loop.inflight import STOP_REASONS, Agreed, Flags, Window
from trainers.loop.lineage import Lineage
from trainers.loop.triggers import Due, EndOfData
from trainers.metrics import histograms as distributions
from trainers.metrics.accumulator import Layout, MetricSums, scalars
from trainers.metrics.publisher import BusyTime, Publisher, Replaced, Seconds
from trainers.runtime import multihost
from trainers.runtime.stop_reason import StopReason
from trainers.step.host_flags import UpdateStatus
from trainers.step.state import TrainState
from trainers.step.train_step import StepOutput

DESYNC_TIMEOUT_S = 10.0
"""For the hosts to tell each other who is out of step. All read the same verdict, so all come, unless one dies of it."""


class GoBack(Exception):
    """Training is to go on from an older state: ends a stretch, from wherever in it the anomaly was read."""

    def __init__(self, decision: Decision):
        super().__init__(str(decision.anomaly))
        self.decision = decision


@dataclass
class Loop:
    """What one run of the loop works with."""

    train_step: Callable[[TrainState, MetricSums, Any, jax.Array], StepOutput]
    layout: Layout
    loader: StepAddressedLoader
    empty_sums: Callable[[], MetricSums]
    publisher: Publisher
    flags: Flags
    host_requests: HostRequests
    due: Due
    anomalies: AnomalyConfig
    distributions: DistributionConfig
    lineage: Lineage
    save: Callable[[TrainState], None]
    """Starts a checkpoint of the step that the RunInfo names."""
    evaluate: Callable[[TrainState], TrainState]
    evaluated_step: Callable[[], int | None]
    """Of the last evaluation that the state, restored or not, has behind it."""
    stop_early: Callable[[], bool]
    """The same on all hosts."""
    preview: Callable[[TrainState], None]
    diagnose: Callable[[TrainState, Any, int], str]
    """(state, batch, step of the state) -> where the batch's loss or gradient stopped being finite."""
    go_back: Callable[[Decision], tuple[TrainState, int]]
    """The state to go on from after a rollback, and its batch index. The lineage knows by then what to leave out."""
    callbacks: CallbackList
    hooks: Hooks
    seconds: Seconds
    info: RunInfo
    resumed_step: int
    saved: collections.deque[tuple[int, str]] = field(default_factory=collections.deque)
    """Step and path of checkpoints that are complete, appended by the thread that saves."""
    replaced: Replaced = field(default_factory=Replaced)
    window: Window = field(default_factory=Window)
    agreed: Agreed = field(default_factory=Agreed)
    busy: BusyTime = field(default_factory=BusyTime)
    handled_saves: int = 0
    first_step_told: bool = False
    diagnosed: bool = False
    end_of_data: EndOfData = field(default_factory=lambda: EndOfData(None))
    last_evaluated_step: int | None = None

    def run(self, state: TrainState) -> tuple[TrainState, StopReason]:
        """From `state` to a limit or a stop that all hosts agreed on. `state` is donated: use what is returned."""
        self.busy = BusyTime()
        while True:
            try:
                return self._run_stretch(state)
            except GoBack as wanted:
                decision = wanted.decision
            # Here the exception is gone, and with its frames the old state: there may be no room for two.
            with self.busy.waiting():
                state, self.resumed_step = self.go_back(decision)
            self.info.global_step = self.resumed_step

    def _run_stretch(self, state: TrainState) -> tuple[TrainState, StopReason]:
        """Raises GoBack at an anomaly that wants it."""
        info, host = self.info, runtime.current()
        self.window, self.agreed = Window(info.global_step), Agreed()
        self.end_of_data.start(info.batch_index)
        host.step = host.batch_index = info.batch_index
        metric_sums = self.empty_sums()
        self.publisher.start(info.global_step)
        self.last_evaluated_step = self.evaluated_step()
        while (reason := self._stop_reason()) is None:
            # Also where a run goes on that was stopped here before it could evaluate.
            if self.due.evaluate(info.global_step) and info.global_step != self.last_evaluated_step:
                self._finish_steps(state, metric_sums)
                metric_sums = self.empty_sums()
                # Before a save at this step, whose meta tells of it: so it is not repeated, and the checkpoint has a score.
                state = self._evaluate(state)
                continue  # it may have ended training
            save_due = info.global_step > self.resumed_step and self.due.save(info.global_step)
            if save_due or self.agreed.saves > self.handled_saves:
                # Before the data moves on: a checkpoint must not know of a batch that its state has not seen.
                self._save(state)
            self.callbacks.tell_saved(info, self.saved)
            state = self._begin_epochs(state)
            with self.seconds.measure("data_wait"):
                batch = self.loader.batch(info.batch_index)
            self.callbacks.call(Callback.on_step_begin, info, batch=batch)
            state = self.hooks.on_step_start(state, info.batch_index)
            flags = self._flags()
            with self.busy.waiting():  # where devices compute on the dispatching thread
                state, metric_sums, reduced, measured, bins = self.train_step(state, metric_sums, batch, flags)
            self.window.push(info.batch_index, reduced)
            info.global_step += 1
            info.epoch = self.due.epochs.at(info.batch_index)
            if not self.first_step_told:
                jax.block_until_ready(reduced)  # the only wait for the newest step: recovery is measured to here
                host.emit("first_step", step=info.global_step, resumed_step=self.resumed_step)
                self.first_step_told = True
            if self.window.full:
                self._complete_one(state)
            host.batch_index, host.busy_s = info.batch_index, self.busy.total_s
            self.publisher.collect(self.window.completed_step)
            state = self._end_step(state, batch, measured)
            if self.publisher.due(info.global_step):
                bins = bins if distributions.due(info.batch_index - 1, self.distributions) else None
                self.publisher.cut(info.global_step, metric_sums, self.seconds.take(), self.replaced.take(), bins)
                metric_sums = self.empty_sums()
            if self.due.preview(info.global_step):
                self._finish_steps(state, metric_sums)
                metric_sums = self.empty_sums()
                self._preview(state)
        self._finish_steps(state, metric_sums)
        return state, reason

    def _begin_epochs(self, state: TrainState) -> TrainState:
        for epoch in self.due.epochs.begun_at(self.info.batch_index):
            self.callbacks.call(Callback.on_epoch_begin, self.info, epoch=epoch)
            state = self.hooks.on_epoch_begin(state, epoch)
        return state

    def _end_step(self, state: TrainState, batch: Any, measured: MetricSums) -> TrainState:
        """All that observes or changes what a step has made, without waiting for it."""
        step, metrics = self.info.batch_index, scalars(self.layout, measured)
        if self.hooks.overrides("on_step_end"):
            state, returned = self.hooks.on_step_end(state, dict(metrics), step)
            self.replaced.add(metrics, returned)
            metrics = returned
        own = {"batch": batch, "loss": metrics.get("loss"), "grad_norm": metrics.get("grad_norm"), "loss_dict": metrics}
        self.callbacks.call(Callback.on_step_end, self.info, **own)
        for epoch in self.due.epochs.ended_at(step):
            self.callbacks.call(Callback.on_epoch_end, self.info, epoch=epoch)
            state = self.hooks.on_epoch_end(state, epoch)
        return state

    def _stop_reason(self) -> StopReason | None:
        early = StopReason.EARLY_STOPPED if self.stop_early() else None
        reason = early or self.host_requests.limits.reached(self.info)
        if reason is None and self.end_of_data.reached(self.info.batch_index):
            return StopReason.END_OF_DATA
        # That one is told ahead, and comes when the last batch was trained on.
        return reason or (None if self.agreed.stop_reason is StopReason.END_OF_DATA else self.agreed.stop_reason)

    def _stop_request(self) -> int:
        wish = self.host_requests.stop()
        if self.end_of_data.in_sight(self.info.batch_index):
            wish = max(wish, 1 + STOP_REASONS.index(StopReason.END_OF_DATA))
        return wish

    def _flags(self) -> jax.Array:
        batch_index = self.info.batch_index
        skip = batch_index in self.lineage.skipped
        return self.flags.array(self._stop_request(), self.host_requests.requested_saves(self.agreed), skip, batch_index)

    def _complete_one(self, state: TrainState) -> None:
        """Waits for the oldest step in flight, and does what all hosts do about it."""
        with self.busy.waiting():
            self.agreed = self.window.complete_one()
        runtime.current().step = self.window.completed_step
        self.end_of_data.hear(self.agreed)
        verdict = self.agreed.verdict
        if verdict is UpdateStatus.OUT_OF_STEP:
            raise self._out_of_step()
        if verdict is UpdateStatus.SCALE_EXHAUSTED:
            raise LossScaleError(anomalies.scale_exhausted(self.agreed.batch_index, self.agreed.loss))
        if verdict in anomalies.KINDS:
            self._treat(Anomaly(verdict, self.agreed.batch_index, self.agreed.loss, self.agreed.expected_loss), state)

    def _treat(self, anomaly: Anomaly, state: TrainState) -> None:
        decision = anomalies.decide(anomaly, self.anomalies, self.lineage.skipped)
        why = self._diagnose(anomaly, state)
        if decision.action == "raise":
            error = f"{decision.error}; {why}" if why else decision.error
            raise (NonFiniteLossError if anomaly.verdict is UpdateStatus.NON_FINITE else LossSpikeError)(error)
        self.lineage.skipped.update(decision.skipped_batches)
        if decision.action == "rollback":
            raise GoBack(decision)
        if jax.process_index() == 0:
            runtime.current().emit("anomaly", **decision.event(), restored_step=None)

    def _diagnose(self, anomaly: Anomaly, state: TrainState) -> str:
        """Where the first non-finite value came from: once, for it takes as long as to compile a step."""
        if anomaly.verdict is not UpdateStatus.NON_FINITE or self.diagnosed:
            return ""
        self.diagnosed = True
        host = runtime.current()
        host.phase("diagnose")
        with self.busy.waiting():
            why = self.diagnose(state, self.loader.batch(anomaly.batch_index), self.info.batch_index)
        host.phase("train")
        if jax.process_index() == 0:
            host.note(f"batch {anomaly.batch_index}: {why}")
        return why

    def _out_of_step(self) -> DesyncError:
        own = self.window.completed_step - 1  # the batch that this host took the step with
        indices: list[int] | None = None
        places = f"this host at {own}"
        with suppress(CoordinatorError):  # it would hide what happened
            indices = multihost.all_hosts("hosts out of step", own, DESYNC_TIMEOUT_S)
            places = "; ".join(f"host {host} at {index}" for host, index in enumerate(indices))
        return DesyncError(
            f"the hosts are out of step at batch {self.agreed.batch_index}: they took one step with batches "
            f"{self.agreed.batch_index} to {self.agreed.newest_batch_index} ({places}); a host has skipped or repeated a step",
            indices,
        )

    def _save(self, state: TrainState) -> None:
        with self.busy.waiting():
            jax.block_until_ready(state)  # copying waits for the steps in flight anyway: their time is theirs
        # A checkpoint tells which batches were skipped before it; one of these may forbid it.
        self._complete_all(state)
        self.handled_saves = max(self.agreed.saves, self.handled_saves)
        with self.seconds.measure("checkpoint"), self.busy.waiting():
            self.save(state)
        self.host_requests.saved()

    def _evaluate(self, state: TrainState) -> TrainState:
        host = runtime.current()
        host.phase("evaluate")
        with self.seconds.measure("evaluation"), self.busy.waiting():
            state = self.evaluate(state)
        self.last_evaluated_step = self.info.global_step
        host.phase("train")
        return state

    def _preview(self, state: TrainState) -> None:
        with self.seconds.measure("preview"), self.busy.waiting():
            self.preview(state)
        runtime.current().phase("train")

    def _finish_steps(self, state: TrainState, metric_sums: MetricSums) -> None:
        """Waits for the steps in flight and publishes what is known of them."""
        self._complete_all(state)
        self.publisher.flush(self.window.completed_step, metric_sums, self.seconds.take(), self.replaced.take())

    def _complete_all(self, state: TrainState) -> None:
        while self.window.in_flight:
            self._complete_one(state)
