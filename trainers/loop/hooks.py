"""The hooks of a trainer that the loop and the evaluations call. `trainers.base.BaseTrainer` describes them."""

from __future__ import annotations

from typing import Any, Protocol

from trainers.step.state import TrainState

HAS_DEFAULTS = "has_defaults"
"""What the class with the methods that a subclass may replace has among its own attributes."""


class Hooks(Protocol):
    """What the loop needs of a trainer."""

    def on_training_start(self, state: TrainState) -> TrainState: ...

    def on_epoch_begin(self, state: TrainState, epoch: int) -> TrainState: ...

    def on_epoch_end(self, state: TrainState, epoch: int) -> TrainState: ...

    def on_step_start(self, state: TrainState, step: int) -> TrainState: ...

    def on_step_end(self, state: TrainState, metrics: dict[str, Any], step: int) -> tuple[TrainState, dict[str, Any]]: ...

    def on_evaluation_start(self, state: TrainState) -> TrainState: ...

    def on_evaluation_end(self, state: TrainState, metrics: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]: ...


def overrides(trainer: object, name: str) -> bool:
    """Whether the class of a trainer replaces a method or a property that has a default."""
    owner = next(cls for cls in type(trainer).__mro__ if name in vars(cls))
    return HAS_DEFAULTS not in vars(owner)
