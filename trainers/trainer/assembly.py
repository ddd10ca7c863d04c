"""Makes the parts of a trainer on its devices, each once, from what the trainer overrides."""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from gangway.errors import UsageError
from trainers import runtime
from trainers.checkpoint import layout
from trainers.checkpoint.manager import manager_of
from trainers.config.frozen import BASE
from trainers.config.model import AUTO, TO_HOST
from trainers.data.iterated_loader import IteratedLoader
from trainers.evaluation import score
from trainers.evaluation.previews import Previews, can_generate
from trainers.evaluation.validation import ValidationUnit
from trainers.loop.frozen import FrozenWeights, Source
from trainers.loop.hooks import overrides
from trainers.loop.inflight import Flags
from trainers.loop.prepared_batch import Shapes
from trainers.loop.triggers import Epochs
from trainers.metrics.accumulator import Layout, MetricSums
from trainers.models.remat import choosing
from trainers.optim.param_groups import parameter_paths
from trainers.parallel import host_memory
from trainers.parallel import mesh as meshes
from trainers.protocol import (
    CheckpointManagerProtocol,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
)
from trainers.runtime.executables import Program, ProgramStore
from trainers.step import adapted
from trainers.step.by_hand import StepProgram, eval_by_hand, train_by_hand
from trainers.step.state import TrainState, arrays_of_model, state_shardings, with_shardings
from trainers.step.train_step import EVALUATION_COUNTS, StepOutput
from trainers.trainer.batching import Batching
from trainers.trainer.chosen_step import Choices, ChosenStep
from trainers.trainer.model_design import ModelDesign, configured
from trainers.trainer.unit_maker import UnitMaker


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
    """What a training and an evaluation work with: see `assemble`."""

    design: ModelDesign
    batching: Batching
    mesh: Mesh
    frozen: FrozenWeights | None
    steps: Steps
    loaders: TrainerConfigureDataloaderOutput
    units: Mapping[str, ValidationUnit]
    previews: Previews | None


def assemble(trainer: Any) -> Parts:
    """Returns the parts of a trainer. Makes those that were not made: it touches the devices, and all hosts must call it. Raises
    what the trainer's `configure_*` and `build_*` raise."""
    made = trainer.assembly
    made.prepare()
    steps = made.steps()
    loaders = made.loaders()
    units = made.validation.units()
    return Parts(
        made.design,
        made.batching,
        made.mesh,
        made.frozen,
        steps,
        loaders,
        units,
        made.previews,
    )


class Assembly:
    """The parts of one trainer, as far as they are made. `mesh`: that of `arguments.mesh`, unless it is given."""

    def __init__(self, trainer: Any, mesh: Any = None, design: ModelDesign | None = None):
        self._trainer, self._given_mesh = trainer, mesh
        self.batching = Batching(trainer, lambda: self.mesh)
        self.design = design or ModelDesign(trainer, self.batching)
        self.validation = UnitMaker(trainer, self)
        self.saved: collections.deque[tuple[int, str]] = collections.deque()
        """(step, path) of checkpoints that are complete, and that that were not passed to the callbacks."""
        self._is_prepared = False
        self._functions: TrainerConfigureFunctionOutput | None = None
        self._steps: Steps | None = None
        self._loaders: TrainerConfigureDataloaderOutput | None = None
        self._loaders_are_asked = False
        """Whether they are what the trainer's `configure_dataloaders` has returned."""

    def around(self, trainer: Any, mesh: Any, model: TrainerConfigureModelOutput) -> Assembly:
        """Returns an assembly for a copy of the trainer, with `model` as what `configure_model` has returned, and a mesh that may
        have no devices."""
        return Assembly(trainer, mesh, self.design.around(model))

    def prepare(self) -> None:
        """Makes everything that needs no device."""
        if self._is_prepared:
            return
        self.design.prepare(is_own=self._replaces("configure_model"))
        _ = self.design.loss_layout, self.validation.datasets, self.batching.identity
        # Once: each evaluation comes here, and the check asks for a user's metrics.
        score.check(self._trainer)
        self._is_prepared = True

    # ------------------------------------------------------------------ devices

    @cached_property
    def mesh(self) -> Mesh:
        """The devices of the run. Touches them."""
        if self._given_mesh is not None:
            return self._given_mesh
        self._trainer.arguments.check_devices(jax.device_count())
        return meshes.make_mesh(self._trainer.arguments.mesh)

    @cached_property
    def state_shardings(self) -> TrainState:
        design = self.design
        design.check_mesh(self.mesh.shape)
        shardings = state_shardings(self.mesh, design.state, design.axes, design.state_axes)
        if self._trainer.arguments.optimizer.offload == "none":
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
    def shown_state(self) -> TrainState:
        """What `BaseTrainer._model_state` is."""
        current = self._trainer.info.shown_state or self._trainer.state
        return current or configured(self._trainer, self.design.made, "_model_state", "configure_model").state

    @property
    def model_arrays(self) -> Any:
        """The shapes of the parameters and of the model's other state, with shardings, as one tree."""
        return arrays_of_model(self.placed_state.params, self.placed_state.model_state)

    @cached_property
    def programs(self) -> ProgramStore:
        """Keeps the compiled programs."""
        arguments, host = self._trainer.arguments, runtime.current()
        # Where this machine keeps executables; unset: it keeps none.
        key, folder = host.program_key, os.environ.get("GANGWAY_PROGRAMS")
        # All that a program is made from: one of other settings must not be found.
        origin = (key, asdict(arguments), jax.process_count(), jax.__version__)
        limit_gb = arguments.kept_programs_gb
        max_bytes = None if limit_gb is None else limit_gb * 1e9
        return ProgramStore(Path(folder) if key and folder else None, origin, host.note, max_bytes)

    def zeros(self, layout: Layout) -> MetricSums:
        return meshes.put_everywhere(self.mesh, layout.zeros())

    @cached_property
    def frozen(self) -> FrozenWeights | None:
        """What reads the frozen weights, and binds them to the compiled programs; None: there are none."""
        models = self.design.frozen_models
        sources = {name: Source(model.path, model.asked_by, model.placed(self.mesh)) for name, model in models.items()}
        folder, note = self._trainer.arguments.run_folder, runtime.current().note
        return FrozenWeights(sources, folder, self.programs, note) if sources else None

    @property
    def frozen_shapes(self) -> tuple[Any, ...]:
        """What the frozen weights add to the arguments of a program."""
        return () if self.frozen is None else self.frozen.shapes

    def values_of_base(self) -> dict[str, jax.Array]:
        """Returns the base's own values of the parameters that are trained whole (`lora.whole`), by name, on the devices."""
        lora = self._trainer.arguments.lora
        if lora is None or not lora.whole:
            return {}
        trained, frozen = parameter_paths(self.design.state.params), self._trainer.frozen[BASE]
        base = dict(zip(parameter_paths(frozen), jax.tree.leaves(frozen), strict=True))
        return {name: base[name] for name in trained if name in base}

    # ------------------------------------------------------------------ the compiled steps

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        """Does what `BaseTrainer.configure_functions` does."""
        self.prepare()
        step = self._train_step(self.design.train_step(self.design.step_layout))
        manager = self._trainer.build_checkpoint_manager()
        functions = TrainerConfigureFunctionOutput(step, self._eval_step(), self.mesh, manager)
        self._functions, self._steps = functions, None
        return self._with_calls_by_hand(functions, self.design.step_layout, self.design.loss_layout)

    @property
    def functions(self) -> TrainerConfigureFunctionOutput:
        """What `configure_functions` has returned. Raises NotConfiguredError."""
        made = self._functions if self._steps is None else self._steps.functions
        return configured(self._trainer, made, "functions", "configure_functions")

    def steps(self) -> Steps:
        """Returns the steps. Calls `configure_functions` if that was not done; one of a subclass also if it was called by hand,
        for it keeps nothing itself."""
        if self._steps is None:
            if self._functions is None or self._replaces("configure_functions"):
                self._functions = self._trainer.configure_functions()
            steps = self._with_adapted_steps(self._completed(self._functions))
            functions = self._with_calls_by_hand(steps.functions, steps.step_layout, steps.loss_layout)
            self._steps = replace(steps, functions=functions)
        return self._steps

    def _train_step(self, step: Any) -> Program:
        arguments, jit = self._trainer.arguments, partial(self.jit_train_step, step)
        program: Any = None
        if arguments.model.remat == AUTO:
            choices = Choices.of(arguments, self.mesh)
            program = ChosenStep(jit, choices, self.programs, runtime.current().note, self.frozen)
        else:
            program = self._program("train_step", jit())

        def keeping() -> Program:
            return self._program(f"{program.name}_keeping", jit(getattr(program, "policy", None), keeps=True))

        program.keeping = keeping
        return program

    def flags(self) -> Flags:
        return Flags(self.mesh, snapshots=self._trainer.arguments.snapshot.every_steps is not None)

    def jit_train_step(self, step: Any, remat: str | None = None, *, keeps: bool = False) -> Any:
        """Returns the step, jitted for the mesh. `remat`: the policy that was chosen, where `model.remat` is `auto`. `keeps`: it
        leaves its state as it is."""
        asked = {"model.remat": remat or self._trainer.arguments.model.remat}
        if self._trainer.arguments.vision is not None:
            asked["vision.remat"] = self._trainer.arguments.vision.remat
        for key, policy in asked.items():
            if policy in TO_HOST:
                self._needs_host_memory(f"{key} = {policy!r}", f"set {key}: save_qkv_proj, or full")
        shardings, replicated = self.state_shardings, meshes.replicated(self.mesh)
        frozen = jax.tree.map(lambda leaf: leaf.sharding, self.frozen_shapes)
        return jax.jit(
            meshes.tracing_for(
                self.mesh, step if remat is None else choosing(step, remat), pipeline=self._trainer.arguments.pipeline
            ),
            in_shardings=(shardings, replicated, meshes.micro_batches(self.mesh), meshes.one_per_device(self.mesh), *frozen),
            # Pinned: XLA may choose other shardings for outputs, and the next step would be compiled again for them.
            out_shardings=StepOutput(shardings, replicated, replicated, replicated, replicated),  # type: ignore[arg-type]
            # State and sums are donated: so the step needs room for one state and not for two.
            donate_argnums=(1,) if keeps else (0, 1),
        )

    def step_batch_shapes(self) -> Shapes:
        """Returns the shapes of a global batch, with shardings."""
        arguments = self._trainer.arguments
        rows = arguments.accumulation_steps, meshes.padded_rows(self.mesh, arguments.micro_batch_size)
        return self.batching.shapes(rows, self.design.output, meshes.micro_batches(self.mesh))

    def checkpoint_manager(self) -> CheckpointManagerProtocol:
        """Does what `BaseTrainer.build_checkpoint_manager` does."""

        def saved(step: int, path: str) -> None:
            """Called on the thread that saves: the queue hands the checkpoint to the callbacks, which run on the main thread."""
            layout.readers(path, 1)  # until `on_save` has returned: a callback may want to read it
            self.saved.append((step, path))

        return manager_of(self._trainer.arguments, self._trainer.arguments.run_folder, self.mesh, self.programs, saved)

    def _completed(self, functions: Any) -> TrainerConfigureFunctionOutput:
        """Returns what `configure_functions` has returned, with what it left out. Raises UsageError for what cannot be used."""
        if not isinstance(functions, TrainerConfigureFunctionOutput):
            raise UsageError(
                f"configure_functions returned {type(functions).__name__}: expected a trainers.protocol."
                "TrainerConfigureFunctionOutput(train_step_fn=..., eval_step_fn=...)"
            )
        if functions.train_step_fn is None:
            raise UsageError("configure_functions returned no train_step_fn: return super().configure_functions()._replace(...)")
        if functions.mesh not in (None, self.mesh):
            raise UsageError(
                f"configure_functions returned a mesh of its own ({dict(functions.mesh.shape)}): the settings have "
                f"{dict(self.mesh.shape)}; set the section mesh, and leave it out here"
            )
        manager = functions.checkpoint_manager
        return TrainerConfigureFunctionOutput(
            functions.train_step_fn,
            self._eval_step() if functions.eval_step_fn is None else functions.eval_step_fn,
            self.mesh,
            self._trainer.build_checkpoint_manager() if manager is None else manager,
        )

    def _with_adapted_steps(self, functions: TrainerConfigureFunctionOutput) -> Steps:
        """Returns the functions, with steps (state, batch) of a user's own as those that the loop calls."""
        train, evaluate, arguments = functions.train_step_fn, functions.eval_step_fn, self._trainer.arguments
        state, output = self.design.state, self.design.output
        steps = Steps(functions, self.design.step_layout, self.design.loss_layout)
        if not hasattr(train, "prepare"):
            freezes = any(group.frozen for group in self.design.groups)
            adapted.check_settings(arguments, prunes=self.design.pruner is not None, freezes=freezes, params=state.params)
            adapted.check_hooks_of(self._trainer)
            shapes = self.batching.shapes((1, meshes.padded_rows(self.mesh, arguments.global_batch_size)), output)
            layout = adapted.train_layout(train, state, shapes)
            tokens = self._trainer.task.tokens_per_example
            step = adapted.adapted_train_step(train, layout, arguments, self._trainer.scheduler, tokens)
            functions = functions._replace(train_step_fn=self._train_step(step))
            steps = replace(steps, functions=functions, step_layout=layout, is_own=True)
        if not hasattr(evaluate, "prepare"):
            rows = self.batching.shapes((1, meshes.padded_rows(self.mesh, arguments.micro_batch_size)), output)
            layout = adapted.eval_layout(evaluate, state, rows)
            jitted = self.validation.jit_step(adapted.adapted_eval_step(evaluate, layout.with_others(EVALUATION_COUNTS)))
            functions = functions._replace(eval_step_fn=self._program("eval_step", jitted))
            steps = replace(steps, functions=functions, loss_layout=layout)
        return steps

    def _with_calls_by_hand(
        self, functions: TrainerConfigureFunctionOutput, step_layout: Layout, loss_layout: Layout
    ) -> TrainerConfigureFunctionOutput:
        """Returns the functions, whose steps may then also be called with (state, batch)."""
        train, evaluate = functions.train_step_fn, functions.eval_step_fn
        if isinstance(train, StepProgram):
            train.by_hand = train_by_hand(step_layout, lambda: self.zeros(step_layout), lambda: self.flags().array())
        if isinstance(evaluate, StepProgram):
            counting = loss_layout.with_others(EVALUATION_COUNTS)
            evaluate.by_hand = eval_by_hand(counting, lambda: self.zeros(counting))
        return functions

    def _eval_step(self) -> Program:
        return self._program("eval_step", self.validation.jit(self.design.eval_loss, self.design.loss_layout))

    def _program(self, name: str, jitted: Any) -> Program:
        return StepProgram(name, jitted, self.programs, runtime.current().note, self.frozen)

    # ------------------------------------------------------------------ loaders, previews, epochs

    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput:
        """Does what `BaseTrainer.configure_dataloaders` does."""
        held_out = self._trainer.dataset_eval
        loader = self.batching.held_out_loader(held_out) if held_out is not None and len(held_out) else None
        self._loaders = TrainerConfigureDataloaderOutput(self.batching.train_loader(), loader)
        return self._loaders

    @property
    def made_loaders(self) -> TrainerConfigureDataloaderOutput:
        """The loaders. Raises NotConfiguredError if they are not made."""
        return configured(self._trainer, self._loaders, "dataloaders", "configure_dataloaders")

    def loaders(self) -> TrainerConfigureDataloaderOutput:
        """Returns the loaders. Calls `configure_dataloaders` if that was not done; one of a subclass also if it was called by
        hand, for it keeps nothing itself."""
        by_hand = not self._loaders_are_asked and self._replaces("configure_dataloaders")
        if self._loaders is None or by_hand:
            self._loaders, self._loaders_are_asked = self.batching.loaders(), True
        return self._loaders

    def forget_loaders(self) -> None:
        """Lets the next training make loaders, and what reads them, again."""
        self.batching.forget_loaders()
        self._loaders, self._loaders_are_asked = None, False
        self.validation.forget()

    @cached_property
    def previews(self) -> Previews | None:
        """The previews; None if there are no prompts, or the task cannot generate."""
        config, task = self._trainer.arguments.previews, self._trainer.task
        if can_generate(task) and config.prompts:
            seed = self._trainer.arguments.seed
            return Previews.of(task, self.design.model.merge, config, self.mesh, seed, self.programs, self.frozen)
        if config.prompts and config.every_steps is not None:
            raise UsageError(f"previews.every_steps = {config.every_steps}: {type(task).__name__} has no encode and decode")
        return None

    @property
    def epochs(self) -> Epochs:
        """Where epochs begin and end, as far as the data are known."""
        size, loader = self._trainer.arguments.global_batch_size, self._loaders and self._loaders.dataloader_train
        if isinstance(loader, IteratedLoader):  # it need not read what `dataset_train` is
            return Epochs(0, size, lambda: loader.batches_of_epoch)
        return Epochs(len(self._trainer.dataset_train or ()), size)

    def _replaces(self, method: str) -> bool:
        return overrides(self._trainer, method)
