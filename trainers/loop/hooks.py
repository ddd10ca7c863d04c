"""Hooks: methods of a trainer that a subclass overrides to change what training does. Observers are callbacks, not hooks.

Hooks are called on all hosts alike (except `preprocess_batch`), between steps, without waiting for the device. What a hook
returns is used, logged and checkpointed from there on. A returned state must have the shapes, types and shardings of the one
passed in, which is donated. A hook that raises ends training with its error. A hook that is not overridden costs nothing.

A hook that changes a state must compute it from its arguments alone: after a failure it is called again for the replayed steps.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from trainers.protocol import Batch, Loss
from trainers.step.state import TrainState

Metrics = dict[str, Any]
"""Metrics by name. Those of a step are scalars on the device (`float()` of one waits for the step); those of an evaluation are
numbers."""


class Hooks:
    """Hooks that do nothing, for a trainer to override."""

    def on_training_start(self, state: TrainState) -> TrainState:
        """Called before the first step of this process, also after a restore, and when a rollback goes back to the beginning of
        the run."""
        return state

    def on_training_end(self, state: TrainState) -> TrainState:
        """Called after the last step, before the state is saved, whatever ended training except an error."""
        return state

    def on_epoch_begin(self, state: TrainState, epoch: int) -> TrainState:
        """Called before the first batch of an epoch (counted from 0). Not called again when a run continues in mid-epoch."""
        return state

    def on_epoch_end(self, state: TrainState, epoch: int) -> TrainState:
        """Called after the last batch that begins in this epoch."""
        return state

    def on_step_start(self, state: TrainState, step: int) -> TrainState:
        """Called before each step. `step` is the index of its batch."""
        return state

    def on_step_end(self, state: TrainState, metrics: Metrics, step: int) -> tuple[TrainState, Metrics]:
        """Called after each step. `step` is the number of batches drawn, `metrics` are those of this step by name. Entries that
        are replaced or added (numbers, or scalars on the device) are published as means over the steps of the interval; entries
        that are removed are not published."""
        return state, metrics

    def on_evaluation_start(self, state: TrainState) -> TrainState:
        """Called for each validation unit, like `on_evaluation_end`. To change what one unit measures, override `evaluate`,
        which gets its name."""
        return state

    def on_evaluation_end(self, state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
        return state, metrics

    def calculate_metrics(self, metrics: Metrics, unit: str) -> Metrics:
        """Called with the metrics of a validation unit before `on_evaluation_end`, in training and outside of it. Returns the
        metrics, to which it may add. Metrics of single examples: `build_evaluation_metrics`."""
        return metrics

    def preprocess_batch(self, batch: dict[str, np.ndarray], batch_index: int) -> Any:
        """Called on the host, in the threads that read ahead, with rows of one global batch (leaves [rows, ...]), for training
        or evaluation. Returns a batch of as many rows, or (batch, metrics). Metrics are numbers, or arrays [rows]; they are
        published as means over all rows.

        It must be a pure function that treats each row by itself: which rows are passed together depends on the devices.
        """
        return batch

    def prepare_batch(self, state: TrainState, batch: Batch, *, training: bool) -> Any:
        """Called between steps, before each train step and each batch of an evaluation, with the present state and the batch on
        the devices: global arrays [accumulation_steps, rows, ...] ([1, rows, ...] in an evaluation), rows sharded over the
        replicas. Returns the batch, with leaves changed or added: rollouts, log-probabilities of a reference, logits of a
        teacher. A leaf may also be a NumPy array of the whole global batch, equal on all hosts. It may also return (batch,
        metrics): numbers, scalars on the devices, or arrays [accumulation_steps, rows], published as means over the rows.

        Use jitted functions: then nothing waits for the device. It must not keep arrays of `state`, which the step donates.
        All random numbers must come from `state.batch_index` (`trainers.step.rng.key`): a resumed run calls it again.
        `mesh` and `state_shardings` of the trainer say where arrays lie.
        """
        return batch

    def prepared_shapes(self, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of what `prepare_batch` makes of a batch of these shapes ([micro-batches, rows, ...]). Need not be
        overridden if `prepare_batch` can be traced. Must touch no device."""
        return shapes

    # ------------------------------------------------------------------ traced: pure functions inside the compiled step

    def preforward(self, batch: Batch) -> Batch:
        """Returns the micro-batch that is passed to the loss."""
        return batch

    def postforward(self, loss: Loss, batch: Batch) -> Loss:
        """Returns the loss of a micro-batch (sums over its targets), before it is differentiated."""
        return loss

    def forward_backward(self, objective: Any, params: Any, batch: Batch) -> tuple[tuple[jax.Array, Loss], Any]:
        """Returns ((value, loss), gradients) of a micro-batch, as `jax.value_and_grad(objective, has_aux=True)(params, batch)`
        does. `objective` may be called several times, with other parameters, too. The gradients are sums over the targets of
        the micro-batch: so they add up to those of the global batch. A frozen parameter is None in `params`."""
        return jax.value_and_grad(objective, has_aux=True)(params, batch)

    def on_micro_step(self, loss: Loss, gradients: Any, batch: Batch) -> tuple[Loss, Any]:
        """Returns the loss and the gradients of a micro-batch (sums over its targets), before they are accumulated. A frozen
        parameter has None in place of a gradient."""
        return loss, gradients

    @classmethod
    def overrides(cls, hook: str) -> bool:
        """Whether this trainer overrides a hook."""
        return getattr(cls, hook) is not getattr(Hooks, hook)
