"""Hooks: methods of a trainer that a subclass overrides to change what training does. Observers are callbacks, not hooks.

Called on all hosts alike (but for `preprocess_batch`), between steps, without waiting for the device; what a hook returns is what
is used, logged and checkpointed from there on. A state that is returned must have the shapes, types and places of the one given,
which is gone. One that raises ends training as an error. A hook that is not overridden costs nothing.

A hook that changes a state must do so by a function of what it is given alone: after a failure it is called again for the steps
that are trained again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainers.protocol import Batch, Loss
from trainers.step.state import TrainState

Metrics = dict[str, Any]
"""By name. Of a step: scalars on the device (`float()` of one waits for the step); of an evaluation: numbers."""


class Hooks:
    """What does nothing, for a trainer to override."""

    def on_training_start(self, state: TrainState) -> TrainState:
        """Before the first step of this process, after a restore too."""
        return state

    def on_training_end(self, state: TrainState) -> TrainState:
        """After the last step, before it is saved: whatever ended training, but an error."""
        return state

    def on_epoch_begin(self, state: TrainState, epoch: int) -> TrainState:
        """Before the first batch of an epoch (counted from 0): not again where a run goes on in the middle of one."""
        return state

    def on_epoch_end(self, state: TrainState, epoch: int) -> TrainState:
        """After the last batch that begins in this epoch."""
        return state

    def on_step_start(self, state: TrainState, step: int) -> TrainState:
        """`step` is the index of the batch that comes."""
        return state

    def on_step_end(self, state: TrainState, metrics: Metrics, step: int) -> tuple[TrainState, Metrics]:
        """`step` is the number of batches drawn. `metrics` are those of this step by name; entries that are replaced or added
        (numbers, or scalars on the device) are published as means over the steps of the interval, entries taken out are not."""
        return state, metrics

    def on_evaluation_start(self, state: TrainState) -> TrainState:
        """For each validation unit, as the one below. To change what one unit measures, override `evaluate`, which is told it."""
        return state

    def on_evaluation_end(self, state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
        return state, metrics

    def preprocess_batch(self, batch: dict[str, np.ndarray], batch_index: int) -> Any:
        """On the host, in the threads that read ahead: rows of one global batch, leaves [rows, ...], for training or evaluation.
        Returns a batch of as many rows, or (batch, metrics): numbers, or arrays [rows], published as means over all rows.

        A pure function of its arguments that treats each row by itself: which rows come together depends on the devices.
        """
        return batch

    # ------------------------------------------------------------------ traced: pure functions inside the compiled step

    def preforward(self, batch: Batch) -> Batch:
        """The micro-batch that the loss is to see."""
        return batch

    def postforward(self, loss: Loss, batch: Batch) -> Loss:
        """The loss of a micro-batch, sums over its targets, before it is differentiated."""
        return loss

    def on_micro_step(self, loss: Loss, gradients: Any, batch: Batch) -> tuple[Loss, Any]:
        """The loss and the gradients of a micro-batch, sums over its targets, before they are added up. A frozen parameter has
        None in the place of a gradient."""
        return loss, gradients

    @classmethod
    def overrides(cls, hook: str) -> bool:
        """Whether this trainer does anything at a hook."""
        return getattr(cls, hook) is not getattr(Hooks, hook)
