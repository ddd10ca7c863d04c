"""Where the arrays of a training lie on a mesh, and the programs that are compiled for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gangway.errors import UsageError
from trainers import runtime
from trainers.checkpoint import going_on
from trainers.config.arguments import TrainingArguments
from trainers.config.frozen import BASE
from trainers.config.model import AUTO, TO_HOST
from trainers.evaluation.previews import Previews, can_generate
from trainers.loop.frozen import FrozenWeights, Source
from trainers.loop.inflight import Flags
from trainers.loop.prepared_batch import Shapes
from trainers.metrics.accumulator import Layout, MetricSums
from trainers.models.remat import choosing
from trainers.optim.param_groups import parameter_paths
from trainers.parallel import host_memory
from trainers.parallel import mesh as meshes
from trainers.runtime.executables import Program, ProgramStore
from trainers.step.by_hand import StepProgram
from trainers.step.loss import LossFunction
from trainers.step.state import TrainState, arrays_of_model, state_shardings, with_shardings
from trainers.step.train_step import EVALUATION_COUNTS, StepOutput, make_eval_step
from trainers.trainer.chosen_step import Choices, ChosenStep
from trainers.trainer.model_design import ModelDesign


@dataclass(frozen=True)
class Placement:
    """A design on the devices of `mesh`, which a plan or a trace may not have: nothing here asks a device for more than shapes
    and shardings before a program is compiled or a property returns arrays."""

    arguments: TrainingArguments
    design: ModelDesign
    mesh: Mesh

    # ------------------------------------------------------------------ the state

    @cached_property
    def state_shardings(self) -> TrainState:
        design = self.design
        design.check_mesh(self.mesh.shape)
        shardings = state_shardings(self.mesh, design.state, design.axes, design.state_axes)
        if self.arguments.optimizer.offload == "none":
            return shardings
        self._needs_host_memory("optimizer.offload = 'host'", "set optimizer.offload: none")
        return replace(shardings, opt_state=host_memory.on_host(design.state.opt_state, shardings.opt_state))

    def _needs_host_memory(self, setting: str, instead: str) -> None:
        """Raises UsageError if the devices cannot use their hosts' memory, which a setting asks for."""
        if why := host_memory.lacking(self.mesh.devices.flat):
            raise UsageError(f"{setting}: {why}; {instead}")

    @property
    def placed_state(self) -> TrainState:
        """The shapes of the state, with their shardings."""
        return with_shardings(self.design.state, self.state_shardings)

    @property
    def model_arrays(self) -> Any:
        """The shapes of the parameters and of the model's other state, with shardings, as one tree."""
        return arrays_of_model(self.placed_state.params, self.placed_state.model_state)

    @cached_property
    def frozen(self) -> FrozenWeights | None:
        """What reads the frozen weights, and binds them to the compiled programs; None: there are none."""
        models = self.design.frozen_models
        sources = {name: Source(model.path, model.asked_by, model.placed(self.mesh)) for name, model in models.items()}
        return FrozenWeights(sources, self.arguments.run_folder, self.programs, runtime.current().note) if sources else None

    @property
    def frozen_shapes(self) -> tuple[Any, ...]:
        """What the frozen weights add to the arguments of a program."""
        return () if self.frozen is None else self.frozen.shapes

    def values_of_base(self) -> dict[str, jax.Array]:
        """Returns the base's own values of the parameters that are trained whole (`lora.whole`), by name, on the devices."""
        lora = self.arguments.lora
        if lora is None or not lora.whole or self.frozen is None:
            return {}
        trained, base = parameter_paths(self.design.state.params), self.frozen.arrays[0][BASE]
        values = dict(zip(parameter_paths(base), jax.tree.leaves(base), strict=True))
        return {name: values[name] for name in trained if name in values}

    def zeros(self, layout: Layout) -> MetricSums:
        return meshes.put_everywhere(self.mesh, layout.zeros())

    def flags(self) -> Flags:
        return Flags(self.mesh, snapshots=self.arguments.snapshot.every_steps is not None)

    def step_batch_shapes(self) -> Shapes:
        """Returns the shapes of a global batch, with shardings."""
        rows = self.arguments.accumulation_steps, meshes.padded_rows(self.mesh, self.arguments.micro_batch_size)
        return self.design.batch_shapes(rows, meshes.micro_batches(self.mesh))

    # ------------------------------------------------------------------ the programs

    @cached_property
    def programs(self) -> ProgramStore:
        """Keeps the compiled programs."""
        host = runtime.current()
        # Where this machine keeps executables; unset: it keeps none.
        key, folder = host.program_key, os.environ.get("GANGWAY_PROGRAMS")
        # All that a program is made from: one of other settings must not be found.
        origin = (key, asdict(self.arguments), jax.process_count(), jax.__version__)
        limit_gb = self.arguments.kept_programs_gb
        max_bytes = None if limit_gb is None else limit_gb * 1e9
        return ProgramStore(Path(folder) if key and folder else None, origin, host.note, max_bytes)

    def program(self, name: str, jitted: Any, kind: type[Program] = StepProgram) -> Program:
        return kind(name, jitted, self.programs, runtime.current().note, self.frozen)

    def train_program(self, step: Any) -> Program:
        """Returns the program of a train step. Its `keeping()` returns another one, which leaves its state as it is."""
        jit = partial(self.jit_train_step, step)
        program: Any = None
        if self.arguments.model.remat == AUTO:
            choices = Choices.of(self.arguments.run_folder, going_on.of_the_step(self.arguments), self.mesh)
            program = ChosenStep(jit, choices, self.programs, runtime.current().note, self.frozen)
        else:
            program = self.program("train_step", jit())

        def keeping() -> Program:
            return self.program(f"{program.name}_keeping", jit(getattr(program, "policy", None), keeps=True))

        program.keeping = keeping
        return program

    def jit_train_step(self, step: Any, remat: str | None = None, *, keeps: bool = False) -> Any:
        """Returns the step, jitted for the mesh. `remat`: the policy that was chosen, where `model.remat` is `auto`. `keeps`: it
        leaves its state as it is."""
        asked = {"model.remat": remat or self.arguments.model.remat}
        if self.arguments.vision is not None:
            asked["vision.remat"] = self.arguments.vision.remat
        for key, policy in asked.items():
            if policy in TO_HOST:
                self._needs_host_memory(f"{key} = {policy!r}", f"set {key}: save_qkv_proj, or full")
        shardings, replicated = self.state_shardings, meshes.replicated(self.mesh)
        traced = step if remat is None else choosing(step, remat)
        return jax.jit(
            meshes.tracing_for(self.mesh, traced, pipeline=self.arguments.pipeline),
            in_shardings=(
                *(shardings, replicated, meshes.micro_batches(self.mesh), meshes.one_per_device(self.mesh)),
                *self._frozen_shardings,
            ),
            # Pinned: XLA may choose other shardings for outputs, and the next step would be compiled again for them.
            out_shardings=StepOutput(shardings, replicated, replicated, replicated, replicated),  # type: ignore[arg-type]
            # State and sums are donated: so the step needs room for one state and not for two.
            donate_argnums=(1,) if keeps else (0, 1),
        )

    def eval_program(self) -> Program:
        """Returns the program that measures a batch of held-out data by the loss of the task."""
        return self.program("eval_step", self.jit_loss(self.design.eval_loss, self.design.loss_layout))

    def jit_loss(self, function: LossFunction, layout: Layout, *, predicts: bool = False) -> Any:
        """Returns `make_eval_step`, jitted."""
        step = make_eval_step(function, layout.with_others(EVALUATION_COUNTS), predicts=predicts)
        return self.jit_eval_step(step, predicts=predicts)

    def jit_eval_step(self, step: Callable[..., Any], *, predicts: bool = False) -> Any:
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
    def _frozen_shardings(self) -> Any:
        return jax.tree.map(lambda leaf: leaf.sharding, self.frozen_shapes)

    @cached_property
    def previews(self) -> Previews | None:
        """The previews; None if there are no prompts, or the task cannot generate."""
        config, task = self.arguments.previews, self.design.task
        if can_generate(task) and config.prompts:
            merge, seed = self.design.model.merge, self.arguments.seed
            return Previews.of(task, merge, config, self.mesh, seed, self.programs, self.frozen)
        if config.prompts and config.every_steps is not None:
            raise UsageError(f"previews.every_steps = {config.every_steps}: {type(task).__name__} has no encode and decode")
        return None
