"""The validation units of a trainer, and its evaluations, in training and by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from gangway.errors import NotConfiguredError, UsageError
from trainers.config import UnitConfig
from trainers.config.arguments import TrainingArguments, load_object
from trainers.evaluation import outputs
from trainers.evaluation.exact_match import ExactMatch, task_of_unit
from trainers.evaluation.validation import DEFAULT_UNIT, NO_DATA, ValidationUnit, shapes_of_rows
from trainers.loop.evaluator import Observed, means
from trainers.loop.hooks import overrides
from trainers.metrics.accumulator import Layout
from trainers.metrics.publisher import with_perplexity
from trainers.protocol import Batch, EvaluationMetrics, Task
from trainers.runtime.executables import Program
from trainers.step.loss import LossFunction
from trainers.step.state import TrainState
from trainers.step.train_step import EVALUATION_COUNTS
from trainers.trainer.build import build, build_steps

if TYPE_CHECKING:  # it imports this module
    from trainers.trainer.base_trainer import BaseTrainer

Metrics = dict[str, float]


class Evaluations:
    """Measures validation units, and calls the hooks and callbacks of an evaluation around it."""

    def __init__(self, trainer: BaseTrainer):
        self._trainer = trainer
        self.observed = Observed(trainer, trainer.callbacks, trainer.info)
        self.in_training = False
        """Whether `train` is running: then it is known at which step the state is, which may still be computed."""

    @property
    def are_own(self) -> bool:
        """Whether a subclass measures by itself, and so needs no held-out data."""
        return overrides(self._trainer, "evaluate") or overrides(self._trainer, "eval")

    def evaluate(
        self, state: TrainState | None, unit: str | None, metric_calculator: Callable[[Metrics], Metrics] | None
    ) -> Metrics:
        """Does what `BaseTrainer.evaluate` does."""

        def measure(state: TrainState) -> Metrics:
            metrics = self._means(chosen, state, unit)
            metrics = self._trainer.calculate_metrics(metrics, name) if metrics else {}
            return metrics if metric_calculator is None else {**metrics, **metric_calculator(metrics)}

        name, chosen = self._unit(unit)
        given = self.current(state)
        # In training the evaluator calls the hooks, whatever a subclass makes of this method.
        return measure(given) if self.observed.active else self._observe(given, name, measure)

    def around(self, state: TrainState | None, unit: str | None, measure: Callable[[TrainState], Metrics]) -> Metrics:
        """Returns what `measure`, a subclass's own `evaluate`, returns, with the hooks and callbacks around it."""
        name = unit or next(iter(build(self._trainer).units), DEFAULT_UNIT)
        return self._observe(self.current(state), name, measure)

    def batches(self, state: TrainState | None, unit: str | None) -> Iterator[Metrics]:
        """Does what `BaseTrainer.eval` does."""
        name, chosen = self._unit(unit)
        given = self.current(state)

        def batches() -> Iterator[Metrics]:
            if chosen is None:
                return
            if self.observed.active:  # a subclass's own `eval` calls this one in an evaluation
                yield from chosen.eval(given)
                return
            self._at(given)
            state = self.observed.begin(given, name)
            metrics = yield from chosen.eval(state)
            state, _ = self.observed.end(state, name, self._trainer.calculate_metrics(metrics, name))
            self._keep(given, state)

        return batches()

    def current(self, state: TrainState | None) -> TrainState:
        """Returns the state; that of the last training for None. Raises NotConfiguredError if there is none."""
        state = state or self._trainer.state
        if state is None:
            raise NotConfiguredError("there is no state yet: call train first, or pass a state")
        return state

    def _keep(self, given: TrainState, returned: TrainState) -> None:
        """Keeps the current state, if that was evaluated, as the hooks returned it."""
        if given is self._trainer.state:
            self._trainer.state = returned

    def _observe(self, given: TrainState, name: str, measure: Callable[[TrainState], Metrics]) -> Metrics:
        self._at(given)
        returned, metrics = self.observed.evaluate(given, name, measure)
        self._keep(given, returned)
        return metrics

    def _means(self, chosen: ValidationUnit | None, state: TrainState, unit: str | None) -> Metrics:
        """Returns the means of a unit, by a subclass's own `eval` if there is one."""
        if overrides(self._trainer, "eval"):
            found = means(self._trainer.eval(state) if unit is None else self._trainer.eval(state, unit=unit))
            return {name: value for name, value in found.items() if name not in getattr(chosen, "rates", {})}
        return {} if chosen is None else chosen.evaluate(state)

    def _unit(self, name: str | None) -> tuple[str, ValidationUnit | None]:
        """Returns a unit and its name; None in a training without held-out data."""
        units = build(self._trainer).units
        if name is not None and name not in units:
            raise UsageError(f"unit = {name!r}: expected one of {', '.join(units) or 'no unit, for there is no held-out data'}")
        # A training may do without: its evaluations measure nothing.
        if not units and not self.observed.active and not self.are_own:
            raise UsageError(f"evaluation: {NO_DATA}, or give dataset_eval")
        chosen = name or next(iter(units), DEFAULT_UNIT)
        return chosen, units.get(chosen)

    def _at(self, state: TrainState) -> None:
        """Tells hooks and callbacks at which step the state is that is evaluated."""
        if not self.in_training:
            info = self._trainer.info
            info.global_step = int(state.batch_index)
            info.epoch = self._trainer.batching.epochs.at(info.global_step)


# ---------------------------------------------------------------------- the units


def build_units(trainer: BaseTrainer) -> dict[str, ValidationUnit]:
    """Does what `BaseTrainer.build_validation_units` does."""
    config, loader = trainer.arguments.evaluation, trainer.dataloaders.dataloader_eval
    units = config.units or ({} if loader is None else {DEFAULT_UNIT: UnitConfig()})
    return {name: unit_of_settings(trainer, name, unit) for name, unit in units.items()}


def unit_of_settings(trainer: BaseTrainer, name: str, config: UnitConfig) -> ValidationUnit:
    """Returns the unit that `evaluation.units` describes."""
    arguments, batching, held_out = trainer.arguments, trainer.batching, trainer.dataset_eval
    max_batches = config.max_batches or arguments.evaluation.max_batches
    loader, datasets = trainer.dataloaders.dataloader_eval, batching.datasets_of_units
    if name in datasets:
        loader = batching.held_out_loader(datasets[name], config.batch_size)
    elif loader is None:
        raise UsageError(f"evaluation.units.{name}: there is no held-out data; set its dataset, or data.eval_fraction")
    elif config.batch_size is not None:
        if held_out is None:
            raise UsageError(f"evaluation.units.{name}.batch_size: there is no dataset_eval to read; set the unit's dataset")
        # With a program of its own below: one for several shapes would be compiled again at each change.
        loader = batching.held_out_loader(held_out, config.batch_size)
    elif config.task is None and trainer.build_evaluation_metrics(name) is None:
        steps = build_steps(trainer)
        step, layout = steps.functions.eval_step_fn, steps.loss_layout
        return _unit(trainer, name, loader, step, layout, trainer.design.eval_loss, max_batches)
    return build_unit(trainer, name, loader, task_of_unit(config, arguments), max_batches)


def build_metrics(arguments: TrainingArguments, unit_name: str) -> EvaluationMetrics | None:
    """Does what `BaseTrainer.build_evaluation_metrics` does."""
    unit = arguments.evaluation.units.get(unit_name)
    if unit is not None and unit.exact_match is not None:
        return ExactMatch(arguments, unit.exact_match)
    return None if unit is None or unit.metrics is None else load_object(unit.metrics)(arguments)


def build_unit(
    trainer: BaseTrainer, name: str, loader: Any, task: Task | None = None, max_batches: int | None = None
) -> ValidationUnit:
    """Returns a unit for `build_validation_units`: the data that `loader` reads (see `ValidationUnit`), measured by the loss of
    `task` (default: the one that is trained) with the parameters that are trained, by a program of its own. All hosts must call
    this. Raises UsageError."""
    placement, function = trainer.placement, trainer.design.eval_loss
    if task is not None:
        function = dataclasses.replace(function, task=task)
    # One batch is read for its shapes; the evaluation begins anew.
    first = next(iter(loader.epoch()), None)
    if first is None:
        raise UsageError(f"the validation unit {name!r} has no examples: give it some, or leave it out")
    layout = layout_of(trainer, function, first)
    metrics = trainer.build_evaluation_metrics(name)
    if metrics is not None:
        outputs.check(name, metrics, function.task, with_perplexity(dict.fromkeys(layout.names, 0.0), layout))
    jitted = placement.jit_loss(function, layout, predicts=metrics is not None)
    program = placement.program(f"eval_step_{name}", jitted, Program)
    # New metrics for each evaluation: it begins with nothing.
    new_metrics = None if metrics is None else partial(trainer.build_evaluation_metrics, name)
    limit = max_batches or trainer.arguments.evaluation.max_batches
    return _unit(trainer, name, loader, program, layout, function, limit, new_metrics)


def layout_of(trainer: BaseTrainer, function: LossFunction, batch: Batch) -> Layout:
    """Returns the layout of the metrics of a loss, by the shapes of a batch."""
    design = trainer.design
    shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in batch.items()}
    rows = shapes_of_rows(trainer.batching.prepared_shapes(shapes, design.output))
    return design.layout_of(function, design.state.params, rows)


def _unit(
    trainer: BaseTrainer,
    name: str,
    loader: Any,
    step: Any,
    layout: Layout,
    function: LossFunction,
    max_batches: int | None,
    new_metrics: Any = None,
) -> ValidationUnit:
    """Returns a unit around a compiled step."""
    design, task, hook = trainer.design, function.task, trainer.batching.prepare
    counting = layout.with_others(EVALUATION_COUNTS)
    prepare = None if hook is None else partial(hook, training=False)
    flops = design.flops_per_token(task, design.num_parameters) * task.tokens_per_example
    return ValidationUnit(loader, step, counting, trainer.mesh, max_batches, name, new_metrics, prepare, flops)
