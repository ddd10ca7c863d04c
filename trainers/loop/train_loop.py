"""The training loop. It reads from top to bottom; where the order matters, a comment at the line says what would break.

The host never waits for the step that it has just dispatched. It waits for the step before last. This bounds how far the host
runs ahead of the device, and gives it what all hosts had agreed on by that step.

A *step* here is a batch drawn, whether or not its update was applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax

from trainers import runtime
from trainers.callbacks import Callback, CallbackList, RunInfo
from trainers.config import AnomalyConfig, DistributionConfig
from trainers.data.loader import StepAddressedLoader
from trainers.errors import (
    CoordinatorError,
    DesyncError,
    LossScaleError,
    LossSpikeError,
    NonFiniteLossError,
    NonFiniteStateError,
)
from trainers.loop import anomalies
from trainers.loop.anomalies import Anomaly, Decision
from trainers.loop.evaluator import Evaluator
from trainers.loop.garbage import GarbageCollection
from trainers.loop.hooks import Hooks, overrides
from trainers.loop.host_requests import HostRequests
from trainers.loop.inflight import STOP_REASONS, Agreed, Flags, Window
from trainers.loop.lineage import Lineage
from trainers.loop.previewer import Previewer
from trainers.loop.restore import Resume
from trainers.loop.saver import Saver
from trainers.loop.triggers import Due, EndOfData
from trainers.metrics import histograms
from trainers.metrics.accumulator import Layout, MetricSums, scalars
from trainers.metrics.publisher import BusyTime, Publisher, Replaced, Seconds
from trainers.runtime import multihost
from trainers.step.host_flags import UpdateStatus
from trainers.step.state import TrainState
from trainers.step.train_step import StepOutput
from trainers.stop_reason import StopReason

DESYNC_TIMEOUT_S = 10.0
"""How long the hosts wait to exchange their batch indices for the error message. All hosts read the same status, so all of them
take part, unless one dies first."""


class GoBack(Exception):
    """Raised to continue training from an older state. It ends a segment, wherever in it the anomaly was read."""

    def __init__(self, decision: Decision):
        super().__init__(str(decision.anomaly))
        self.decision = decision


@dataclass
class Loop:
    """The training loop of one run, with the objects that it works with."""

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
    saver: Saver
    evaluator: Evaluator
    previewer: Previewer
    resume: Resume
    diagnose: Callable[[TrainState, Any, int], str]
    """(state, batch, step of the state) -> a text that says where the batch's loss or gradient stopped being finite."""
    callbacks: CallbackList
    hooks: Hooks
    seconds: Seconds
    info: RunInfo
    resumed_step: int
    replaced: Replaced = field(default_factory=Replaced)
    window: Window = field(default_factory=Window)
    agreed: Agreed = field(default_factory=Agreed)
    busy: BusyTime = field(default_factory=BusyTime)
    handled_saves: int = 0
    first_step_reported: bool = False
    diagnosed: bool = False
    end_of_data: EndOfData = field(default_factory=lambda: EndOfData(None))
    garbage: GarbageCollection = field(default_factory=lambda: GarbageCollection(None))
    prepare_batch: Callable[[TrainState, Any], Any] | None = None
    """The hook on batches that are on the devices; None: batches stay as they are."""
    broken: Callable[[TrainState], Sequence[str]] = lambda state: ()
    """Returns the names of the leaves of a state whose values have become infinite or NaN."""
    infinite_parameters: Callable[[], bool | None] = lambda: None
    """Returns whether parameters were infinite as training began or went back, such as a mask; None: not known."""
    _infinite: bool | None = None
    """Whether they were: then only what is looked at before a save tells that others have become so."""
    _suspicious_to: int = -1
    """Up to this step an update breaks the state, and it is not known which."""

    def run(self, state: TrainState) -> tuple[TrainState, StopReason]:
        """Trains from `state` to a limit, or to a stop that all hosts agreed on. `state` is donated: use the returned one."""
        self.busy = BusyTime()
        while True:
            try:
                return self._run_segment(state)
            except GoBack as rollback:
                decision = rollback.decision
            # Outside the `except` block: the exception's frames hold the old state, and there may be no room for two.
            with self.busy.waiting():
                state, self.resumed_step = self.resume.go_back(decision)
                self.saver.restore(self.resume.meta)
            if not self.resume.meta:
                # What the hook made of the beginning is part of it; a checkpoint has it.
                state = self.hooks.on_training_start(state)
            self.info.global_step = self.resumed_step

    def _run_segment(self, state: TrainState) -> tuple[TrainState, StopReason]:
        """Trains until the run ends. Raises GoBack at an anomaly that calls for a rollback."""
        info, host = self.info, runtime.current()
        # After a rollback the results of the steps in flight must not be read any more.
        self.window, self.agreed, self._infinite = Window(info.global_step), Agreed(), self.infinite_parameters()
        self.end_of_data.start(info.batch_index)
        host.step = host.batch_index = info.batch_index
        metric_sums = self.empty_sums()
        self.publisher.start(info.global_step)
        while (reason := self._stop_reason()) is None:
            # First in the loop: a run that was stopped at this step before it could evaluate does so when it continues.
            if self.due.evaluate(info.global_step) and info.global_step != self.evaluator.evaluated_step:
                self._finish_steps(state, metric_sums)
                metric_sums = self.empty_sums()
                # Before a save at this step: its meta records the score, and that the evaluation need not be repeated.
                state = self._evaluate(state)
                continue  # the evaluation may have ended training (early stop)
            self._save_what_is_due(state)
            # Here, on the main thread: a user's callback must not run on the thread that saves.
            with info.showing(state):
                self.saver.report_saved()
            state = self._begin_epochs(state)
            began_s = self.seconds.clock()
            batch = self.loader.batch(info.batch_index)
            data_wait_s = self.seconds.clock() - began_s
            self.callbacks.call(Callback.on_step_begin, info, batch=batch)
            state = self.hooks.on_step_start(state, info.batch_index)
            batch = self._prepared(state, batch)
            flags = self._flags(data_wait_s)
            with self.busy.waiting():  # some backends compute on the dispatching thread: that is not the host's own work
                state, metric_sums, reduced, step_metrics, bins = self.train_step(state, metric_sums, batch, flags)
            # With the index of the batch that it trains on: the counter moves on in the next line.
            self.window.push(info.batch_index, reduced)
            info.global_step += 1
            info.epoch = self.due.epochs.at(info.batch_index)
            if not self.first_step_reported:
                jax.block_until_ready(reduced)  # the only wait for the newest step: recovery time ends here
                host.emit({"ev": "first_step", "step": info.global_step, "resumed_step": self.resumed_step})
                self.first_step_reported = True
            if self.window.full:
                self._complete_one(state)
            host.batch_index, host.busy_s = info.batch_index, self.busy.total_s
            self.garbage.at(info.batch_index)
            # After the wait for an older step: the copies of these numbers had that time to arrive.
            with info.showing(state):
                self.publisher.collect(self.window.completed_step)
            state = self._end_step(state, batch, step_metrics)
            if self.due.publish(info.global_step):
                # `- 1`, for the counter has moved on: the step itself asked with the index of its batch.
                bins = bins if histograms.due(info.batch_index - 1, self.distributions) else None
                self.publisher.cut(info.global_step, metric_sums, self.seconds.drain(), self.replaced.drain(), bins)
                # New ones: the publisher keeps the old ones until their copy has arrived, and the next step donates its input.
                metric_sums = self.empty_sums()
            if self.due.preview(info.global_step):
                self._finish_steps(state, metric_sums)
                metric_sums = self.empty_sums()
                self._preview(state)
        # Before the end: a step in flight may still ask for a rollback, and its metrics are not published yet.
        self._finish_steps(state, metric_sums)
        self._look_at_the_last(state)
        return state, reason

    def _prepared(self, state: TrainState, batch: Any) -> Any:
        if self.prepare_batch is None:
            return batch
        with self.busy.waiting():  # a hook that reads values waits for the device
            return self.prepare_batch(state, batch)

    def _begin_epochs(self, state: TrainState) -> TrainState:
        for epoch in self.due.epochs.begun_at(self.info.batch_index):
            self.callbacks.call(Callback.on_epoch_begin, self.info, epoch=epoch)
            state = self.hooks.on_epoch_begin(state, epoch)
        return state

    def _end_step(self, state: TrainState, batch: Any, step_metrics: MetricSums) -> TrainState:
        """Calls the hooks and callbacks that follow a step, without waiting for the device."""
        step, metrics = self.info.batch_index, scalars(self.layout, step_metrics)
        if overrides(self.hooks, "on_step_end"):
            state, returned = self.hooks.on_step_end(state, dict(metrics), step)
            self.replaced.add(metrics, returned)
            metrics = returned
        self.callbacks.call(
            Callback.on_step_end,
            self.info,
            batch=batch,
            loss=metrics.get("loss"),
            grad_norm=metrics.get("grad_norm"),
            loss_dict=metrics,
        )
        for epoch in self.due.epochs.ended_at(step):
            self.callbacks.call(Callback.on_epoch_end, self.info, epoch=epoch)
            state = self.hooks.on_epoch_end(state, epoch)
        self._look_at(state)
        return state

    def _stop_reason(self) -> StopReason | None:
        early = StopReason.EARLY_STOPPED if self.evaluator.wants_stop else None
        reason = early or self.host_requests.limits.reached(self.info)
        if reason is None and self.end_of_data.reached(self.info.batch_index):
            return self.end_of_data.reason
        # END_OF_DATA is requested ahead of the end. Training stops only after the last batch, which was checked above.
        return reason or (None if self.agreed.stop_reason is StopReason.END_OF_DATA else self.agreed.stop_reason)

    def _stop_request(self) -> int:
        request = self.host_requests.stop()
        if self.end_of_data.in_sight(self.info.batch_index):
            # As the step does with the requests of several hosts: the greatest wins.
            request = max(request, 1 + STOP_REASONS.index(StopReason.END_OF_DATA))
        return request

    def _flags(self, data_wait_s: float) -> jax.Array:
        batch_index = self.info.batch_index
        skip = batch_index in self.lineage.skipped
        saves = self.host_requests.requested_saves(self.agreed)
        return self.flags.array(self._stop_request(), saves, skip, data_wait_s, batch_index)

    def _complete_one(self, state: TrainState) -> None:
        """Waits for the oldest step in flight, and acts on its status, as all hosts do."""
        with self.busy.waiting():
            self.agreed = self.window.complete_one()
        runtime.current().step = self.window.completed_step
        self.publisher.completed(self.window.completed_step)
        # That of the slowest host: the others wait for it inside the step.
        self.seconds.add("data_wait", self.agreed.data_wait_s)
        self.end_of_data.observe(self.agreed)
        status = self.agreed.status
        if status is UpdateStatus.OUT_OF_STEP:
            raise self._out_of_step()
        if status is UpdateStatus.SCALE_EXHAUSTED:
            raise LossScaleError(anomalies.scale_exhausted(self.agreed.batch_index, self.agreed.loss))
        if status is UpdateStatus.APPLIED and self._broke_state():
            status = UpdateStatus.BROKE_STATE
        if status in anomalies.KINDS:
            anomaly = Anomaly(status, self.agreed.batch_index, self.agreed.loss, self.agreed.expected_loss)
            self._handle_anomaly(anomaly, state)

    def _broke_state(self) -> bool:
        """Whether the update has made parameters infinite or NaN."""
        found = bool(self.agreed.not_finite)
        if self._infinite is None:
            self._infinite = found
        return found and not self._infinite

    def _find_what_broke(self, error: NonFiniteStateError) -> None:
        """Goes back, and looks at the state after every step from there: what has broken it since the last save, the step itself
        has not told. Raises the error if the run is to fail, or if every step was looked at already."""
        step = self.info.global_step
        if self.anomalies.non_finite == "raise" or step <= self._suspicious_to:
            raise NonFiniteLossError(f"{error}: {anomalies.ADVICE[UpdateStatus.BROKE_STATE]}") from error
        self._suspicious_to = step
        anomaly = Anomaly(UpdateStatus.BROKE_STATE, step - 1, math.nan, math.nan)
        raise GoBack(Decision(anomaly, "rollback", go_back_to=step - 1)) from error

    def _look_at_the_last(self, state: TrainState) -> None:
        """Looks at the state before training ends: from here it can still go back, and from the last save no more."""
        step = self.info.global_step
        with self.busy.waiting():
            leaves = self.broken(state) if step > self.resumed_step else ()
        if leaves:
            self._find_what_broke(NonFiniteStateError(step, leaves))

    def _look_at(self, state: TrainState) -> None:
        """Up to a step at which the state was found broken: treats the update as an anomaly if it has broken it. Waits for the
        device."""
        if self.info.global_step > self._suspicious_to:
            return
        self._complete_all(state)
        with self.busy.waiting():
            is_broken = bool(self.broken(state))
        if is_broken:
            anomaly = Anomaly(UpdateStatus.BROKE_STATE, self.info.batch_index - 1, self.agreed.loss, self.agreed.expected_loss)
            self._handle_anomaly(anomaly, state)

    def _handle_anomaly(self, anomaly: Anomaly, state: TrainState) -> None:
        decision = anomalies.decide(anomaly, self.anomalies, self.lineage.skipped)
        # Before the decision is carried out: after a rollback the parameters that gave the value are gone.
        origin = self._diagnose(anomaly, state)
        if decision.action == "raise":
            message = f"{decision.error}; {origin}" if origin else decision.error
            raise (LossSpikeError if anomaly.status is UpdateStatus.LOSS_SPIKE else NonFiniteLossError)(message)
        self.lineage.skipped.update(decision.skipped_batches)
        if decision.action == "rollback":
            raise GoBack(decision)
        if jax.process_index() == 0:
            runtime.current().emit({"ev": "anomaly", **decision.event(), "restored_step": None})

    def _diagnose(self, anomaly: Anomaly, state: TrainState) -> str:
        """Returns where the first non-finite value came from. Only once in a process: it takes as long as compiling a step."""
        if anomaly.status is UpdateStatus.BROKE_STATE:
            return f"not finite: {', '.join(list(self.broken(state))[: anomalies.SHOWN_LEAVES])}"
        if anomaly.status is not UpdateStatus.NON_FINITE or self.diagnosed:
            return ""
        self.diagnosed = True
        host = runtime.current()
        host.phase("diagnose")
        with self.busy.waiting():
            batch = self._prepared(state, self.loader.batch(anomaly.batch_index))
            origin = self.diagnose(state, batch, self.info.batch_index)
        host.phase("train")
        if jax.process_index() == 0:
            host.note(f"batch {anomaly.batch_index}: {origin}")
        return origin

    def _out_of_step(self) -> DesyncError:
        batch_index = self.window.completed_step - 1  # the batch that this host took the step with
        indices: list[int] | None = None
        hosts = f"this host at {batch_index}"
        with suppress(CoordinatorError):  # it would hide the DesyncError
            indices = multihost.all_hosts("hosts out of step", batch_index, DESYNC_TIMEOUT_S)
            hosts = "; ".join(f"host {host} at {index}" for host, index in enumerate(indices))
        return DesyncError(
            f"the hosts are out of step at batch {self.agreed.batch_index}: they took one step with batches "
            f"{self.agreed.batch_index} to {self.agreed.newest_batch_index} ({hosts}); a host has skipped or repeated a step",
            indices,
        )

    def _save_what_is_due(self, state: TrainState) -> None:
        step = self.info.global_step
        # Not at the step that was just restored: its checkpoint is there already.
        save_due = step > self.resumed_step and self.due.save(step)
        if save_due or self.agreed.saves > self.handled_saves:
            # Before the next batch is drawn: a checkpoint must not count a batch that its state was not trained on.
            self._save(state)
        if self.due.save_model(step):
            self._save_model(state)

    def _save(self, state: TrainState) -> None:
        with self.busy.waiting():
            # The copy would wait for the steps in flight anyway; here their time is not counted as checkpoint time.
            jax.block_until_ready(state)
        # Before the save: its meta lists the batches skipped so far, and an anomaly in flight may forbid the checkpoint.
        self._complete_all(state)
        # One checkpoint serves every request that is known by now, whichever host it came from.
        self.handled_saves = max(self.agreed.saves, self.handled_saves)
        broken: NonFiniteStateError | None = None
        with self.seconds.measure("checkpoint"), self.busy.waiting():
            try:
                self.saver.save(state)
            except NonFiniteStateError as error:  # a hook has made it so: the step itself would have told
                broken = error
        self.host_requests.saved()
        if broken is not None:
            self._find_what_broke(broken)

    def _save_model(self, state: TrainState) -> None:
        with self.busy.waiting():
            jax.block_until_ready(state)
        # As before a checkpoint: an anomaly in flight may say that these parameters are not to be kept.
        self._complete_all(state)
        with self.seconds.measure("checkpoint"), self.busy.waiting():
            self.saver.save_model(state)

    def _evaluate(self, state: TrainState) -> TrainState:
        host = runtime.current()
        host.phase("evaluate")
        with self.seconds.measure("evaluation"), self.busy.waiting():
            state = self.evaluator.evaluate(state)
        host.phase("train")
        return state

    def _preview(self, state: TrainState) -> None:
        with self.seconds.measure("preview"), self.busy.waiting():
            self.previewer.show(state)
        runtime.current().phase("train")

    def _finish_steps(self, state: TrainState, metric_sums: MetricSums) -> None:
        """Waits for the steps in flight, and publishes their metrics."""
        self._complete_all(state)
        with self.info.showing(state):
            self.publisher.flush(self.window.completed_step, metric_sums, self.seconds.drain(), self.replaced.drain())

    def _complete_all(self, state: TrainState) -> None:
        while self.window.in_flight:
            self._complete_one(state)
