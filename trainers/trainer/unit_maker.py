"""Makes the validation units of a trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gangway.errors import UsageError
from trainers import runtime
from trainers.config import UnitConfig
from trainers.config.arguments import load_object
from trainers.data.loader import RandomAccess
from trainers.data.sources.iterable import held_out_examples
from trainers.evaluation import outputs
from trainers.evaluation.exact_match import questions, task_of_unit
from trainers.evaluation.validation import DEFAULT_UNIT, ValidationUnit, shapes_of_rows
from trainers.metrics.accumulator import Layout
from trainers.metrics.publisher import with_perplexity
from trainers.parallel import mesh as meshes
from trainers.protocol import Batch, Task
from trainers.runtime.executables import Program
from trainers.step.loss import LossFunction
from trainers.step.train_step import EVALUATION_COUNTS, make_eval_step


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
        loss of `task` (default: the one that is trained) with the parameters that are trained, by a program of its own. All hosts
        must call this. Raises UsageError."""
        function = (
            self._assembly.design.eval_loss if task is None else dataclasses.replace(self._assembly.design.eval_loss, task=task)
        )
        limit = max_batches or self._trainer.arguments.evaluation.max_batches
        build_metrics = self._trainer.build_evaluation_metrics
        # One batch is read for its shapes; the evaluation begins anew.
        first = next(iter(loader.epoch()), None)
        if first is None:
            raise UsageError(f"the validation unit {name!r} has no examples: give it some, or leave it out")
        layout = self._layout_of(function, first)
        metrics = build_metrics(name)
        if metrics is not None:
            outputs.check(name, metrics, function.task, with_perplexity(dict.fromkeys(layout.names, 0.0), layout))
        predicts = metrics is not None
        jitted = self.jit(function, layout, predicts=predicts)
        program = Program(f"eval_step_{name}", jitted, self._assembly.programs, runtime.current().note, self._assembly.frozen)
        # A new one for each evaluation: it begins with nothing.
        new_metrics: Any = (lambda: build_metrics(name)) if predicts else None
        return self._around(loader, program, layout, function, limit, name, new_metrics)

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
            return self._around(loader, step, layout, self._assembly.design.eval_loss, max_batches, name)
        return self.unit(name, loader, task_of_unit(config, arguments), max_batches)

    def jit(self, function: LossFunction, layout: Layout, *, predicts: bool = False) -> Any:
        """Returns `make_eval_step`, jitted."""
        return self.jit_step(
            make_eval_step(function, layout.with_others(EVALUATION_COUNTS), predicts=predicts), predicts=predicts
        )

    def jit_step(self, step: Callable[..., Any], *, predicts: bool = False) -> Any:
        made = self._assembly
        replicated = meshes.replicated(made.mesh)
        rows = NamedSharding(made.mesh, PartitionSpec(meshes.batch_axes(made.mesh.shape)))
        frozen = jax.tree.map(lambda leaf: leaf.sharding, made.frozen_shapes)
        return jax.jit(
            meshes.tracing_for(made.mesh, step),
            in_shardings=(made.state_shardings, replicated, meshes.micro_batches(made.mesh), *frozen),
            out_shardings=(replicated, rows) if predicts else replicated,
            # The sums alone: the state is needed again for the next batch.
            donate_argnums=1,
        )

    def _around(
        self,
        loader: Any,
        step: Any,
        layout: Layout,
        function: LossFunction,
        max_batches: int | None,
        name: str,
        new_metrics: Any = None,
    ) -> ValidationUnit:
        """Returns a unit around a compiled step (`jit`)."""
        made, task = self._assembly, function.task
        counting, hook = layout.with_others(EVALUATION_COUNTS), made.batching.prepare
        flops = made.design.flops_per_token(task, made.design.num_parameters) * task.tokens_per_example
        prepare = hook and partial(hook, training=False)
        return ValidationUnit(loader, step, counting, made.mesh, max_batches, name, new_metrics, prepare, flops)

    def _layout_of(self, function: LossFunction, batch: Batch) -> Layout:
        """Returns the layout of the metrics of a loss, by the shapes of a batch."""
        batching, design = self._assembly.batching, self._assembly.design
        shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in batch.items()}
        rows = shapes_of_rows(batching.prepared_shapes(shapes, design.output))
        return design.layout_of(function, design.state.params, rows)
