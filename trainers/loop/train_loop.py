"""The training loop. It reads from top to bottom; where the order matters, a comment at the line says what would break.

The host never waits for the step that it has just dispatched. It waits for the step before last. This bounds how far the host
runs ahead of the device, and gives it what all hosts had agreed on by that step.

A *step* here is a batch drawn, whether or not its update was applied.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import jax

from gangway.errors import NonFiniteStateError
from gangway.stop_reason import StopReason
from trainers import runtime
from trainers.callbacks import Callback, CallbackList, RunInfo
from trainers.config import DistributionConfig
from trainers.data.loader import StepAddressedLoader
from trainers.loop.agreement import Agreement
from trainers.loop.evaluator import Evaluator, Previewer
from trainers.loop.guard import GoBack, Guard
from trainers.loop.hooks import Hooks, overrides
from trainers.loop.restore import Resume
from trainers.loop.saver import Saver
from trainers.loop.snapshots import Snapshots
from trainers.loop.triggers import Due
from trainers.metrics import histograms
from trainers.metrics.accumulator import Layout, MetricSums, scalars
from trainers.metrics.publisher import BusyTime, Publisher, Replaced, Seconds
from trainers.step.state import TrainState
from trainers.step.train_step import StepOutput


class GarbageCollection:
    """Python collects garbage when enough objects have been made: on each host at another step, and all hosts wait for the one
    that does. Within this context it is collected at steps that are a multiple of `every_steps`; None: as always."""

    def __init__(self, every_steps: int | None):
        self.every_steps = every_steps
        self._was_enabled = False

    def __enter__(self) -> GarbageCollection:
        if self.every_steps is not None:
            self._was_enabled = gc.isenabled()
            gc.disable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self._was_enabled:
            gc.enable()

    def at(self, step: int) -> None:
        """Collects if it is time, between the dispatch of two steps: the devices have work meanwhile."""
        if self.every_steps is not None and step % self.every_steps == 0:
            gc.collect()


@dataclass(frozen=True)
class Steps:
    """The compiled step, and what it needs beside the state and a batch."""

    train: Callable[[TrainState, MetricSums, Any, jax.Array], StepOutput]
    layout: Layout
    empty_sums: Callable[[], MetricSums]
    distributions: DistributionConfig
    prepare_batch: Callable[[TrainState, Any], Any] | None = None
    """The hook on batches that are on the devices; None: batches stay as they are."""


@dataclass
class Loop:
    """The training loop of one run, with the objects that it works with."""

    info: RunInfo
    steps: Steps
    loader: StepAddressedLoader
    agreement: Agreement
    guard: Guard
    due: Due
    saver: Saver
    evaluator: Evaluator
    previewer: Previewer
    publisher: Publisher
    resume: Resume
    hooks: Hooks
    callbacks: CallbackList
    garbage: GarbageCollection = field(default_factory=lambda: GarbageCollection(None))
    seconds: Seconds = field(default_factory=Seconds)
    busy: BusyTime = field(default_factory=BusyTime)
    replaced: Replaced = field(default_factory=Replaced)
    snapshots: Snapshots | None = None
    first_step_reported: bool = False
    tried: Callable[[], None] | None = None
    """Waits until it is known whether the state can be saved, and raises CheckpointError if not; None: that is known."""
    resumed_step: int = field(init=False)
    """The step that training began at, or went back to."""

    def __post_init__(self) -> None:
        self.resumed_step = self.info.global_step

    def run(self, state: TrainState) -> tuple[TrainState, StopReason]:
        """Trains from `state` to a limit, or to a stop that all hosts agreed on. `state` is donated: use the returned one."""
        self.busy = BusyTime()
        while True:
            try:
                return self._run_segment(state)
            except GoBack as rollback:
                decision = rollback.decision
                if self.snapshots is not None:
                    self.snapshots.leave_behind()
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
        self.agreement.start(info)
        self.guard.start(self.busy.waiting)
        host.step = host.batch_index = host.at_step = info.batch_index
        metric_sums = self.steps.empty_sums()
        self.publisher.start(info.global_step)
        while (reason := self._stop_reason()) is None:
            # First in the loop: a run that was stopped at this step before it could evaluate does so when it continues.
            if self.due.evaluate(info.global_step) and info.global_step != self.evaluator.evaluated_step:
                metric_sums = self._finish_steps(state, metric_sums)
                # Before a save at this step: its meta records the score, and that the evaluation need not be repeated.
                state = self._evaluate(state)
                continue  # the evaluation may have ended training (early stop)
            self._save_what_is_due(state)
            # Here, on the main thread: a user's callback must not run on the thread that saves.
            with info.showing(state):
                self.saver.report_saved()
            train = self.steps.train if self.snapshots is None else self._step_with_snapshot(state)
            state = self._begin_epochs(state)
            began_s = self.seconds.clock()
            batch = self.loader.batch(info.batch_index)
            data_wait_s = self.seconds.clock() - began_s
            self.callbacks.call(Callback.on_step_begin, info, batch=batch)
            state = self.hooks.on_step_start(state, info.batch_index)
            batch = self._prepared(state, batch)
            skip = info.batch_index in self.guard.lineage.skipped
            flags = self.agreement.flags_of(info.batch_index, skip=skip, data_wait_s=data_wait_s)
            with self.busy.waiting():  # some backends compute on the dispatching thread: that is not the host's own work
                state, metric_sums, reduced, step_metrics, bins = train(state, metric_sums, batch, flags)
            # With the index of the batch that it trains on: the counter moves on in the next line.
            self.agreement.window.push(info.batch_index, reduced)
            host.at_step = info.global_step = info.global_step + 1
            info.epoch = self.due.epochs.at(info.batch_index)
            if not self.first_step_reported:
                self._report_first_step(reduced)
            if self.agreement.window.full:
                self._complete_one(state)
            host.batch_index, host.busy_s = info.batch_index, self.busy.total_s
            self.garbage.at(info.batch_index)
            # After the wait for an older step: the copies of these numbers had that time to arrive.
            with info.showing(state):
                self.publisher.collect(self.agreement.window.completed_step)
            state = self._end_step(state, batch, step_metrics)
            if self.due.publish(info.global_step):
                metric_sums = self._publish(metric_sums, bins)
            if self.due.preview(info.global_step):
                metric_sums = self._finish_steps(state, metric_sums)
                self._preview(state)
        # Before the end: a step in flight may still ask for a rollback, and its metrics are not published yet.
        self._finish_steps(state, metric_sums)
        if info.global_step > self.resumed_step:
            self.guard.look_at_the_last(state, info.global_step)
        return state, reason

    def _report_first_step(self, reduced: jax.Array) -> None:
        jax.block_until_ready(reduced)  # the only wait for the newest step: recovery time ends here
        runtime.current().emit({"ev": "first_step", "step": self.info.global_step, "resumed_step": self.resumed_step})
        self.first_step_reported = True
        if self.snapshots is not None:
            self.snapshots.start()
        if self.tried is not None:
            self.tried()

    def _prepared(self, state: TrainState, batch: Any) -> Any:
        if self.steps.prepare_batch is None:
            return batch
        with self.busy.waiting():  # a hook that reads values waits for the device
            return self.steps.prepare_batch(state, batch)

    def _begin_epochs(self, state: TrainState) -> TrainState:
        for epoch in self.due.epochs.begun_at(self.info.batch_index):
            self.callbacks.call(Callback.on_epoch_begin, self.info, epoch=epoch)
            state = self.hooks.on_epoch_begin(state, epoch)
        return state

    def _end_step(self, state: TrainState, batch: Any, step_metrics: MetricSums) -> TrainState:
        """Calls the hooks and callbacks that follow a step, without waiting for the device."""
        step, metrics = self.info.batch_index, scalars(self.steps.layout, step_metrics)
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
        if self.guard.looks_at_every_state(self.info.global_step):
            self._complete_all(state)
            self.guard.look_at_state(self.agreement.newest, state, self.info.batch_index - 1)
        return state

    def _stop_reason(self) -> StopReason | None:
        return StopReason.EARLY_STOPPED if self.evaluator.wants_stop else self.agreement.stop_reason(self.info)

    def _complete_one(self, state: TrainState) -> None:
        """Waits for the oldest step in flight, and acts on its result, as all hosts do."""
        with self.busy.waiting():
            agreed = self.agreement.complete_one()
        host, completed = runtime.current(), self.agreement.window.completed_step
        host.step = host.at_step = completed
        self.publisher.completed(completed)
        # That of the slowest host: the others wait for it inside the step.
        self.seconds.add("data_wait", agreed.data_wait_s)
        self.guard.look_at_step(agreed, state)
        host.at_step = self.info.global_step
        if self.snapshots is not None:
            self.snapshots.observe(agreed.whole)
            self._describe_snapshot(completed, state)

    def _step_with_snapshot(self, state: TrainState) -> Callable[..., StepOutput]:
        """Begins a snapshot if one is due, before the batch is drawn, as a save. Returns the program for the next step."""
        snapshots, step = self.snapshots, self.info.batch_index
        assert snapshots is not None
        if not snapshots.begin(step, state, lambda: self.saver.data_state.of_this_host(step)):
            return self.steps.train
        if self.agreement.window.completed_step == step:  # nothing is in flight: it is complete already
            self._describe_snapshot(step, state)
        assert snapshots.step is not None
        return snapshots.step

    def _describe_snapshot(self, completed: int, state: TrainState) -> None:
        """Gives the snapshot of a step that is complete now what a checkpoint would record. Only now: an update that is in flight
        may turn out to be one to skip."""
        assert self.snapshots is not None
        if self.snapshots.awaits(completed):
            with self.info.showing(state):
                self.publisher.collect(completed)  # first: after a restart this is not published again
            self.snapshots.tell(self.saver.of_snapshot(completed))

    def _save_what_is_due(self, state: TrainState) -> None:
        step = self.info.global_step
        # Not at the step that was just restored: its checkpoint is there already.
        save_due = step > self.resumed_step and self.due.save(step)
        if save_due or self.agreement.save_asked:
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
        self.agreement.saves()
        broken: NonFiniteStateError | None = None
        with self.seconds.measure("checkpoint"), self.busy.waiting():
            try:
                self.saver.save(state)
            except NonFiniteStateError as error:  # a hook has made it so: the step itself would have reported it
                broken = error
        self.agreement.requests.saved()
        if broken is not None:
            self.guard.find_what_broke(broken, self.info.global_step)

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

    def _publish(self, metric_sums: MetricSums, bins: Any) -> MetricSums:
        """Begins to publish the sums up to now. Returns new ones."""
        # `- 1`, for the counter has moved on: the step itself asked with the index of its batch.
        bins = bins if histograms.due(self.info.batch_index - 1, self.steps.distributions) else None
        self.publisher.cut(self.info.global_step, metric_sums, self.seconds.drain(), self.replaced.drain(), bins)
        # New ones: the publisher keeps the old ones until their copy has arrived, and the next step donates its input.
        return self.steps.empty_sums()

    def _preview(self, state: TrainState) -> None:
        with self.seconds.measure("preview"), self.busy.waiting():
            self.previewer.show(state)
        runtime.current().phase("train")

    def _finish_steps(self, state: TrainState, metric_sums: MetricSums) -> MetricSums:
        """Waits for the steps in flight, and publishes their metrics. Returns new sums."""
        self._complete_all(state)
        with self.info.showing(state):
            completed = self.agreement.window.completed_step
            self.publisher.flush(completed, metric_sums, self.seconds.drain(), self.replaced.drain())
        return self.steps.empty_sums()

    def _complete_all(self, state: TrainState) -> None:
        while self.agreement.window.in_flight:
            self._complete_one(state)
