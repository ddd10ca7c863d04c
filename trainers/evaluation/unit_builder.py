"""Builds validation units that have a compiled step of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gangway.errors import UsageError
from trainers import runtime
from trainers.evaluation import outputs
from trainers.evaluation.validation import ValidationUnit
from trainers.metrics.accumulator import Layout
from trainers.metrics.publisher import with_perplexity
from trainers.parallel import mesh as meshes
from trainers.protocol import Batch, EvaluationMetrics, Task
from trainers.runtime.executables import Bound, Program, ProgramStore
from trainers.step.loss import LossFunction
from trainers.step.state import TrainState
from trainers.step.train_step import EVALUATION_COUNTS, make_eval_step


@dataclass(frozen=True)
class UnitBuilder:
    """What the units of a trainer have in common."""

    mesh: Mesh
    state_shardings: TrainState
    programs: ProgramStore
    layout_of: Callable[[LossFunction, Batch], Layout]
    """(loss, a batch) -> the layout of its metrics."""
    prepare: Callable[[TrainState, Batch], Batch] | None
    """The hook on batches that are on the devices."""
    flops_per_token: Callable[[Task], float]
    """Forward and backward."""
    frozen: Bound | None = None
    """The frozen weights; None: there are none."""

    def jit(self, function: LossFunction, layout: Layout, *, predicts: bool = False) -> Any:
        """Returns `make_eval_step`, jitted."""
        return self.jit_step(
            make_eval_step(function, layout.with_others(EVALUATION_COUNTS), predicts=predicts), predicts=predicts
        )

    def jit_step(self, step: Callable[..., Any], *, predicts: bool = False) -> Any:
        replicated = meshes.replicated(self.mesh)
        rows = NamedSharding(self.mesh, PartitionSpec(meshes.batch_axes(self.mesh.shape)))
        return jax.jit(
            meshes.tracing_for(self.mesh, step),
            in_shardings=(self.state_shardings, replicated, meshes.micro_batches(self.mesh), *self._frozen_shardings),
            out_shardings=(replicated, rows) if predicts else replicated,
            # The sums alone: the state is needed again for the next batch.
            donate_argnums=1,
        )

    @property
    def _frozen_shardings(self) -> tuple[Any, ...]:
        shapes = () if self.frozen is None else self.frozen.shapes
        return jax.tree.map(lambda leaf: leaf.sharding, shapes)

    def unit(
        self,
        name: str,
        loader: Any,
        function: LossFunction,
        max_batches: int | None,
        build_metrics: Callable[[str], EvaluationMetrics | None],
    ) -> ValidationUnit:
        """Returns a unit with a program of its own. All hosts must call this. Raises UsageError."""
        # One batch is read for its shapes; the evaluation begins anew.
        first = next(iter(loader.epoch()), None)
        if first is None:
            raise UsageError(f"the validation unit {name!r} has no examples: give it some, or leave it out")
        layout = self.layout_of(function, first)
        metrics = build_metrics(name)
        if metrics is not None:
            outputs.check(name, metrics, function.task, with_perplexity(dict.fromkeys(layout.names, 0.0), layout))
        predicts = metrics is not None
        jitted = self.jit(function, layout, predicts=predicts)
        program = Program(f"eval_step_{name}", jitted, self.programs, runtime.current().note, self.frozen)
        # A new one for each evaluation: it begins with nothing.
        new_metrics: Any = (lambda: build_metrics(name)) if predicts else None
        return self.around(loader, program, layout, function, max_batches, name, new_metrics)

    def around(
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
        counting, task = layout.with_others(EVALUATION_COUNTS), function.task
        flops = self.flops_per_token(task) * task.tokens_per_example
        return ValidationUnit(loader, step, counting, self.mesh, max_batches, name, new_metrics, self.prepare, flops)
