"""Makes the validation units of a trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import jax

from gangway.errors import UsageError
from trainers.config import UnitConfig
from trainers.config.arguments import load_object
from trainers.data.loader import RandomAccess
from trainers.data.sources.sequence import held_out_examples
from trainers.evaluation.exact_match import questions, task_of_unit
from trainers.evaluation.unit_builder import UnitBuilder
from trainers.evaluation.validation import DEFAULT_UNIT, ValidationUnit, shapes_of_rows
from trainers.metrics.accumulator import Layout
from trainers.protocol import Batch, Task
from trainers.step.loss import LossFunction


class UnitMaker:
    """Makes the validation units of `trainer`, a BaseTrainer, with the other parts of its `assembly`."""

    def __init__(self, trainer: Any, assembly: Any):
        self._trainer, self._assembly = trainer, assembly
        self._units: Mapping[str, ValidationUnit] | None = None

    def forget(self) -> None:
        """Lets the next training make units again."""
        self._units = None

    def units(self) -> Mapping[str, ValidationUnit]:
        """Returns the validation units by name. Calls `build_validation_units` if that was not done."""
        if self._units is None:
            self._units = self._trainer.build_validation_units()
        return self._units

    def build_units(self) -> dict[str, ValidationUnit]:
        """Does what `BaseTrainer.build_validation_units` does."""
        config, loader = self._trainer.arguments.evaluation, self._assembly.made_loaders.dataloader_eval
        units = config.units or ({} if loader is None else {DEFAULT_UNIT: UnitConfig()})
        return {name: self._build_unit(name, unit) for name, unit in units.items()}

    def unit(self, name: str, loader: Any, task: Task | None = None, max_batches: int | None = None) -> ValidationUnit:
        """Returns a unit for `build_validation_units`: the data that `loader` reads (see `ValidationUnit`), measured by the
        loss of `task` (default: the one that is trained) with the parameters that are trained. All hosts must call this."""
        function = (
            self._assembly.design.eval_loss if task is None else dataclasses.replace(self._assembly.design.eval_loss, task=task)
        )
        limit = max_batches or self._trainer.arguments.evaluation.max_batches
        return self.builder.unit(name, loader, function, limit, self._trainer.build_evaluation_metrics)

    @cached_property
    def datasets(self) -> dict[str, RandomAccess]:
        """The datasets of the validation units that have their own."""
        arguments = self._trainer.arguments
        units = arguments.evaluation.units
        with_dataset = {name: unit.dataset for name, unit in units.items() if unit.dataset is not None}
        # The ids of their samples are their own: no training sample is among them.
        made = {name: load_object(path)(arguments) for name, path in with_dataset.items()}
        asking = {name: unit.exact_match for name, unit in units.items() if unit.exact_match is not None}
        made |= {name: questions(config, arguments) for name, config in asking.items()}
        return {name: self._assembly.batching.collated(held_out_examples(examples, 0)) for name, examples in made.items()}

    def _build_unit(self, name: str, config: UnitConfig) -> ValidationUnit:
        arguments, held_out = self._trainer.arguments, self._trainer.dataset_eval
        max_batches = config.max_batches or arguments.evaluation.max_batches
        loader = self._assembly.made_loaders.dataloader_eval
        if name in self.datasets:
            loader = self._assembly.batching.held_out_loader(self.datasets[name], config.batch_size)
        elif loader is None:
            raise UsageError(f"evaluation.units.{name}: there is no held-out data; set its dataset, or data.eval_fraction")
        elif config.batch_size is not None:
            if held_out is None:
                raise UsageError(f"evaluation.units.{name}.batch_size: there is no dataset_eval to read; set the unit's dataset")
            # With a program of its own below: one for several shapes would be compiled again at each change.
            loader = self._assembly.batching.held_out_loader(held_out, config.batch_size)
        elif config.task is None and self._trainer.build_evaluation_metrics(name) is None:
            steps = self._assembly.steps()
            step, layout = steps.functions.eval_step_fn, steps.loss_layout
            return self.builder.around(loader, step, layout, self._assembly.design.eval_loss, max_batches, name)
        return self.unit(name, loader, task_of_unit(config, arguments), max_batches)

    @cached_property
    def builder(self) -> UnitBuilder:
        made, design = self._assembly, self._assembly.design

        def layout_of(function: LossFunction, batch: Batch) -> Layout:
            shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in batch.items()}
            rows = shapes_of_rows(made.batching.prepared_shapes(shapes, design.output))
            return design.layout_of(function, design.state.params, rows)

        flops = partial(design.flops_per_token, trained=design.num_parameters)
        prepare = made.batching.prepare_held_out
        return UnitBuilder(made.mesh, made.state_shardings, made.programs, layout_of, prepare, flops, made.frozen)
