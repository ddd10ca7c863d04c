"""Builds the parts of a training: `build` calls what a trainer may override, in the order of its lines.

`prepare` needs no device: a standby process calls it before its host has joined the gang. What was built is kept with the trainer
(`Built`), so that a second training, or an evaluation, compiles nothing again.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gangway.errors import UsageError
from trainers.checkpoint import layout
from trainers.checkpoint.manager import manager_of
from trainers.evaluation.previews import Previews
from trainers.evaluation.validation import ValidationUnit
from trainers.loop.hooks import overrides
from trainers.metrics.accumulator import Layout
from trainers.parallel import mesh as meshes
from trainers.protocol import (
    CheckpointManagerProtocol,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
)
from trainers.step import adapted
from trainers.step.by_hand import StepProgram, eval_by_hand, train_by_hand
from trainers.step.train_step import EVALUATION_COUNTS
from trainers.trainer import metric_names
from trainers.trainer.batching import Batching
from trainers.trainer.model_design import ModelDesign
from trainers.trainer.placement import Placement

if TYPE_CHECKING:  # it imports this module
    from trainers.trainer.base_trainer import BaseTrainer


@dataclass(frozen=True)
class Steps:
    """The compiled steps, and the layouts of their metrics."""

    functions: TrainerConfigureFunctionOutput
    step_layout: Layout
    loss_layout: Layout
    is_own: bool = False
    """Whether the train step is the user's own."""


@dataclass(frozen=True)
class Parts:
    """What a training and an evaluation work with: see `build`."""

    design: ModelDesign
    batching: Batching
    placement: Placement
    steps: Steps
    loaders: TrainerConfigureDataloaderOutput
    units: Mapping[str, ValidationUnit]
    previews: Previews | None


@dataclass
class Built:
    """What was built of a trainer so far."""

    is_prepared: bool = False
    functions: TrainerConfigureFunctionOutput | None = None
    """What `configure_functions` has returned."""
    steps: Steps | None = None
    parts: Parts | None = None
    """None after a training, too: the next one has new loaders, and new units that read them."""
    committed: collections.deque[tuple[int, str]] = field(default_factory=collections.deque)
    """(step, path) of checkpoints that are complete, and that were not passed to the callbacks yet."""


def build(trainer: BaseTrainer) -> Parts:
    """Returns the parts of a trainer. Builds those that were not built: it touches the devices, and all hosts must call it.
    Raises what the trainer's `configure_*` and `build_*` raise."""
    built = trainer.built
    if built.parts is None:
        # The model first, from shapes alone: `configure_model`, with the optimizer, the loss and the layouts of the metrics.
        design = prepare(trainer)
        # The devices: a mesh, the shardings on it, and the programs that were kept for it.
        placement = trainer.placement
        # `configure_functions`, with `build_checkpoint_manager`. Nothing is compiled yet.
        steps = build_steps(trainer)
        # `configure_dataloaders`. After the mesh: a loader places its batches on it.
        loaders = trainer.batching.loaders()
        # `build_validation_units`. After the loaders, which they read, and the eval step, which they share.
        units = trainer.build_validation_units()
        built.parts = Parts(design, trainer.batching, placement, steps, loaders, units, placement.previews)
    return built.parts


def prepare(trainer: BaseTrainer) -> ModelDesign:
    """Builds everything that needs no device. Returns the design of the model."""
    design = trainer.design
    if not trainer.built.is_prepared:
        design.prepare(is_own=overrides(trainer, "configure_model"))
        _ = design.loss_layout, trainer.batching.datasets_of_units, trainer.batching.identity
        # Once: each evaluation comes here, and the check asks for a user's metrics.
        metric_names.check_score(trainer)
        trainer.built.is_prepared = True
    return design


def forget_loaders(trainer: BaseTrainer) -> None:
    """Lets the next training build loaders, and what reads them, again."""
    trainer.batching.forget_loaders()
    trainer.built.parts = None


# ---------------------------------------------------------------------- the compiled steps


def configure_functions(trainer: BaseTrainer) -> TrainerConfigureFunctionOutput:
    """Does what `BaseTrainer.configure_functions` does."""
    design, placement = prepare(trainer), trainer.placement
    train = placement.train_program(design.train_step(design.step_layout))
    manager = trainer.build_checkpoint_manager()
    functions = TrainerConfigureFunctionOutput(train, placement.eval_program(), placement.mesh, manager)
    trainer.built.functions, trainer.built.steps, trainer.built.parts = functions, None, None
    return with_calls_by_hand(placement, Steps(functions, design.step_layout, design.loss_layout)).functions


def build_checkpoint_manager(trainer: BaseTrainer) -> CheckpointManagerProtocol:
    """Does what `BaseTrainer.build_checkpoint_manager` does."""
    arguments, placement, committed = trainer.arguments, trainer.placement, trainer.built.committed

    def saved(step: int, path: str) -> None:
        """Called on the thread that saves: the queue hands the checkpoint to the callbacks, which run on the main thread."""
        layout.readers(path, 1)  # until `on_save` has returned: a callback may want to read it
        committed.append((step, path))

    folder, score = arguments.run_folder, arguments.evaluation.score
    return manager_of(folder, arguments.checkpoint, score, placement.mesh, placement.programs, saved)


def build_steps(trainer: BaseTrainer) -> Steps:
    """Returns the steps. Calls `configure_functions` if that was not done; one of a subclass also if it was called by hand, for
    it keeps nothing itself."""
    built, placement = trainer.built, trainer.placement
    if built.steps is None:
        if built.functions is None or overrides(trainer, "configure_functions"):
            built.functions = trainer.configure_functions()
        steps = with_adapted_steps(trainer, completed(trainer, built.functions))
        built.steps = with_calls_by_hand(placement, steps)
    return built.steps


def completed(trainer: BaseTrainer, functions: Any) -> TrainerConfigureFunctionOutput:
    """Returns what `configure_functions` has returned, with what it left out. Raises UsageError for what cannot be used."""
    placement = trainer.placement
    if not isinstance(functions, TrainerConfigureFunctionOutput):
        raise UsageError(
            f"configure_functions returned {type(functions).__name__}: expected a trainers.protocol."
            "TrainerConfigureFunctionOutput(train_step_fn=..., eval_step_fn=...)"
        )
    if functions.train_step_fn is None:
        raise UsageError("configure_functions returned no train_step_fn: return super().configure_functions()._replace(...)")
    if functions.mesh not in (None, placement.mesh):
        raise UsageError(
            f"configure_functions returned a mesh of its own ({dict(functions.mesh.shape)}): the settings have "
            f"{dict(placement.mesh.shape)}; set the section mesh, and leave it out here"
        )
    manager = functions.checkpoint_manager
    return TrainerConfigureFunctionOutput(
        functions.train_step_fn,
        placement.eval_program() if functions.eval_step_fn is None else functions.eval_step_fn,
        placement.mesh,
        trainer.build_checkpoint_manager() if manager is None else manager,
    )


def with_adapted_steps(trainer: BaseTrainer, functions: TrainerConfigureFunctionOutput) -> Steps:
    """Returns the functions, with steps (state, batch) of a user's own as those that the loop calls."""
    arguments, design, placement = trainer.arguments, trainer.design, trainer.placement
    train, evaluate, state = functions.train_step_fn, functions.eval_step_fn, design.state
    steps = Steps(functions, design.step_layout, design.loss_layout)
    if not hasattr(train, "prepare"):
        freezes = any(group.frozen for group in design.groups)
        adapted.check_settings(arguments, prunes=design.pruner is not None, freezes=freezes, params=state.params)
        adapted.check_hooks_of(trainer)
        rows = meshes.padded_rows(placement.mesh, arguments.global_batch_size)
        step_layout = adapted.train_layout(train, state, design.batch_shapes((1, rows)))
        tokens = trainer.task.tokens_per_example
        step = adapted.adapted_train_step(train, step_layout, arguments, trainer.scheduler, tokens)
        functions = functions._replace(train_step_fn=placement.train_program(step))
        steps = replace(steps, functions=functions, step_layout=step_layout, is_own=True)
    if not hasattr(evaluate, "prepare"):
        rows = meshes.padded_rows(placement.mesh, arguments.micro_batch_size)
        loss_layout = adapted.eval_layout(evaluate, state, design.batch_shapes((1, rows)))
        counting = adapted.adapted_eval_step(evaluate, loss_layout.with_others(EVALUATION_COUNTS))
        functions = functions._replace(eval_step_fn=placement.program("eval_step", placement.jit_eval_step(counting)))
        steps = replace(steps, functions=functions, loss_layout=loss_layout)
    return steps


def with_calls_by_hand(placement: Placement, steps: Steps) -> Steps:
    """Returns the steps, whose functions may then also be called with (state, batch)."""
    train, evaluate = steps.functions.train_step_fn, steps.functions.eval_step_fn
    if isinstance(train, StepProgram):
        summed = steps.step_layout
        train.by_hand = train_by_hand(summed, lambda: placement.zeros(summed), lambda: placement.flags().array())
    if isinstance(evaluate, StepProgram):
        counting = steps.loss_layout.with_others(EVALUATION_COUNTS)
        evaluate.by_hand = eval_by_hand(counting, lambda: placement.zeros(counting))
    return steps
