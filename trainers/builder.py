"""What a trainer is made of, and how: the part of `BaseTrainer` to replace piece by piece. Touches no device by itself."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from trainers import runtime
from trainers.callbacks import Callback, CallbackList, RunInfo
from trainers.callbacks.profiler import Profiler
from trainers.checkpoint.committed import Committed
from trainers.checkpoint.fence import WriterTerm
from trainers.checkpoint.manager import CheckpointManager
from trainers.checkpoint.retention import Retention
from trainers.config import ParameterGroup, UnitConfig
from trainers.config.arguments import TrainingArguments, load_object
from trainers.data.collate import Collated, CollateInfo, Preprocess, Transform, preprocessed, stack
from trainers.data.loader import RandomAccess, StepAddressedLoader
from trainers.data.sources.iterable import random_access
from trainers.errors import NotConfiguredError, UsageError
from trainers.evaluation.previews import Previews, can_generate
from trainers.evaluation.validation import DEFAULT_UNIT, ValidationUnit, shapes_of_rows
from trainers.loop.hooks import Hooks
from trainers.loop.lineage import Lineage
from trainers.metrics.accumulator import Kind, Layout, MetricSums
from trainers.optim import param_groups, pruning
from trainers.optim.optimizers import build_grouped, parameters_to_evaluate
from trainers.optim.schedules import build_schedule
from trainers.parallel import mesh as meshes
from trainers.protocol import (
    Task,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
)
from trainers.runtime import distributed
from trainers.runtime.executables import Program, ProgramStore
from trainers.step.loss import LossFunction
from trainers.step.loss_scale import initial_scaler
from trainers.step.state import ModelParts, TrainState, abstract_model, initial_parameters, state_from_parameters, state_shardings
from trainers.step.train_step import StepOutput, make_eval_step, make_train_step, step_metrics


class Builder(Hooks):
    """A subclass may replace each `configure_*`, `build_*` and property alone. Building one touches no device."""

    def __init__(
        self,
        arguments: TrainingArguments,
        dataset_train: RandomAccess | None = None,
        dataset_eval: RandomAccess | None = None,
        *,
        callbacks: tuple[Callback, ...] = (),
    ):
        self.arguments = arguments
        self.dataset_train = dataset_train
        self.dataset_eval = dataset_eval
        self.callbacks = CallbackList()
        for callback in (Profiler(arguments.profile, f"{self._run_folder}/profile"), *callbacks):
            self.callbacks.add(callback)
        self.output: TrainerOutput | None = None
        self.info = RunInfo(max_steps=arguments.max_num_steps)
        self.lineage = Lineage()
        self._model: TrainerConfigureModelOutput | None = None
        self._functions: TrainerConfigureFunctionOutput | None = None
        self._dataloaders: TrainerConfigureDataloaderOutput | None = None
        self._validation_units: Mapping[str, ValidationUnit] | None = None
        self._layout: Layout | None = None
        self._state: TrainState | None = None
        self._saved: collections.deque[tuple[int, str]] = collections.deque()
        self.post_init()
        if dataset_train is not None:
            self.dataset_train = self.collated(random_access(dataset_train, arguments, self._tell_from_host0))
        if dataset_eval is not None:
            self.dataset_eval = self.collated(dataset_eval)

    # ------------------------------------------------------------------ what a subclass may replace

    def post_init(self) -> None:
        """Called before anything is built of the data; no device may be touched."""

    def build_model_assets(self) -> Mapping[str, Any]:
        """What `save_pretrained` writes beside the arrays, by name, such as a tokenizer: text, bytes, what JSON can hold, or an
        object with `save_pretrained(folder)` or `save(folder)`. Called on host 0, in a thread."""
        return {}

    def build_data_transform(self) -> Transform | None:
        """What each example goes through before it becomes a row; None: nothing. For training and held-out data."""
        return None

    def build_data_collate_info(self) -> Mapping[str, CollateInfo]:
        """By the name of a leaf: how it is cut and filled up, where its length varies from example to example."""
        return {}

    def configure_model(self) -> TrainerConfigureModelOutput:
        """(the model taken apart, the state's shapes): no device is touched."""
        parts, params, self._axes = abstract_model(self.task, self.arguments.seed)
        # Without data only its shapes are of interest.
        layout = self._layout_of(parts, params) if self.dataset_train is not None else Layout((), ())
        self._layout = layout  # tracing the loss takes a while: once
        param_groups.check(self.param_groups, params)
        pruning.check(self.arguments.pruning, param_groups.trainable(self.param_groups, params))
        scaler = initial_scaler(self.arguments)
        state = jax.eval_shape(lambda params: state_from_parameters(params, self._update_rule, layout, scaler), params)
        return TrainerConfigureModelOutput(parts, state)

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        """The jitted train and eval steps (state donated, shardings pinned in and out), the mesh, the checkpoint manager."""
        host, everywhere = runtime.current(), meshes.replicated(self._mesh)
        places, batch_place = self._state_shardings, meshes.micro_batches(self._mesh)
        on_micro_step = self.on_micro_step if self.overrides("on_micro_step") else None
        step = make_train_step(
            self.loss_function,
            self.step_layout,
            self._update_rule,
            self.scheduler,
            self.arguments,
            on_micro_step,
            self.param_groups,
        )
        train_step = jax.jit(
            step,
            in_shardings=(places, everywhere, batch_place, meshes.one_per_device(self._mesh)),
            out_shardings=StepOutput(places, everywhere, everywhere, everywhere, everywhere),  # type: ignore[arg-type]
            donate_argnums=(0, 1),
        )
        eval_step = self._jit_eval_step(self.loss_function, self.loss_layout)
        return TrainerConfigureFunctionOutput(
            Program("train_step", train_step, self._programs, host.note),
            Program("eval_step", eval_step, self._programs, host.note),
            self._mesh,
            self._build_checkpoint_manager(),
        )

    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput:
        if self.dataset_train is None:
            raise UsageError("there is no training data: give dataset_train, or override configure_dataloaders")
        size, mesh = self.arguments.global_batch_size, self._mesh
        steps, preprocess = self.arguments.accumulation_steps, self._preprocess
        train = StepAddressedLoader(self.dataset_train, size, mesh, accumulation_steps=steps, preprocess=preprocess)
        held_out = self._held_out_loader(self.dataset_eval) if self.dataset_eval is not None and len(self.dataset_eval) else None
        return TrainerConfigureDataloaderOutput(train, held_out)

    def build_validation_units(self) -> Mapping[str, ValidationUnit]:
        """In the order in which they are evaluated, by the names that begin the names of their metrics. Default: those of
        `evaluation.units`, or one of the held-out data."""
        config, loader = self.arguments.evaluation, self.dataloaders.dataloader_eval
        units = config.units or ({} if loader is None else {DEFAULT_UNIT: UnitConfig()})
        return {name: self._build_unit(name, unit) for name, unit in units.items()}

    @cached_property
    def task(self) -> Task:
        return load_object(self.arguments.task)(self.arguments)

    @cached_property
    def scheduler(self) -> optax.Schedule:
        """Learning rate by step."""
        config = self.arguments.optimizer
        return build_schedule(config.schedule, config.learning_rate, self.arguments.max_num_steps)

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return build_grouped(self.arguments.optimizer, self.scheduler, self.param_groups)

    def freeze_module(self) -> tuple[str, ...]:
        """Patterns of parameters that are not trained, before all groups: `optimizer.groups` may freeze others."""
        return ()

    def build_param_groups(self) -> tuple[ParameterGroup, ...]:
        """What is trained in a way of its own, or not at all. The first group that takes a parameter has it."""
        return self.arguments.optimizer.groups

    # ------------------------------------------------------------------ what there is, once configured

    @property
    def model(self) -> ModelParts:
        return self._configured(self._model, "model", "configure_model").model

    @property
    def _model_state(self) -> TrainState:
        """The current state; before `train`, its shapes."""
        return self._state or self._configured(self._model, "_model_state", "configure_model").state

    @property
    def functions(self) -> TrainerConfigureFunctionOutput:
        return self._configured(self._functions, "functions", "configure_functions")

    @property
    def dataloaders(self) -> TrainerConfigureDataloaderOutput:
        return self._configured(self._dataloaders, "dataloaders", "configure_dataloaders")

    @property
    def validation_units(self) -> Mapping[str, ValidationUnit]:
        return self._configured(self._validation_units, "validation_units", "train")

    @property
    def dtype(self) -> Any:
        return jax.numpy.dtype(self.arguments.dtype)

    @property
    def param_dtype(self) -> Any:
        return jax.numpy.dtype(self.arguments.param_dtype)

    @cached_property
    def loss_function(self) -> LossFunction:
        return self._loss_function_of(self.model)

    @cached_property
    def loss_layout(self) -> Layout:
        """Of the metrics of the task's loss."""
        names = len(self.step_layout) - len(step_metrics(self._model_state.params, self.arguments))
        step = self.step_layout
        return dataclasses.replace(step, names=step.names[:names], kinds=step.kinds[:names])

    @cached_property
    def step_layout(self) -> Layout:
        """Of the metrics of a train step: those of the loss, and those of the step."""
        model = self._configured(self._model, "step_layout", "configure_model")
        return self._layout or self._layout_of(self.model, model.state.params)

    @cached_property
    def previews(self) -> Previews | None:
        """None: nothing to show, or the task cannot."""
        config, task = self.arguments.previews, self.task
        if can_generate(task) and config.prompts:
            return Previews.of(task, self.model.merge, config, self._mesh, self.arguments.seed, self._programs)
        if config.prompts and config.every_steps is not None:
            raise UsageError(f"previews.every_steps = {config.every_steps}: {type(task).__name__} has no encode and decode")
        return None

    @cached_property
    def param_groups(self) -> tuple[ParameterGroup, ...]:
        return (*(ParameterGroup(pattern=pattern, frozen=True) for pattern in self.freeze_module()), *self.build_param_groups())

    @cached_property
    def _update_rule(self) -> optax.GradientTransformation:
        """The optimizer, of what is trained."""
        return param_groups.freezing(pruning.pruning(self.arguments.pruning, self.optimizer), self.param_groups)

    def parameters_to_evaluate(self, state: TrainState) -> Any:
        """What is evaluated, shown and exported: the parameters, or the averages that the optimizer keeps of them."""
        return parameters_to_evaluate(state.opt_state, state.params)

    def validation_unit(self, name: str, loader: Any, task: Task | None = None, max_batches: int | None = None) -> ValidationUnit:
        """For `build_validation_units`: what `loader` reads (see `ValidationUnit`), measured by the loss of `task` (default: the
        one that is trained) on the parameters that are trained. All hosts must call this."""
        function = self.loss_function if task is None else dataclasses.replace(self.loss_function, task=task)
        first = next(iter(loader.epoch()), None)
        if first is None:
            raise UsageError(f"the validation unit {name!r} has no examples: give it some, or leave it out")
        layout = self._traced(function, self._model_state.params, shapes_of_rows(first))
        program = Program(f"eval_step_{name}", self._jit_eval_step(function, layout), self._programs, runtime.current().note)
        return ValidationUnit(loader, program, layout, self._mesh, max_batches or self.arguments.evaluation.max_batches)

    def add_callback(self, callback: Callback) -> None:
        self.callbacks.add(callback)

    # ------------------------------------------------------------------ inside

    def _configure(self) -> None:
        self.prepare()
        if self._functions is None:
            self._functions = self.configure_functions()
        if self._dataloaders is None:
            self._dataloaders = self.configure_dataloaders()
        if self._validation_units is None:
            self._validation_units = self.build_validation_units()
        _ = self.previews

    def prepare(self) -> None:
        """All that can be done before a device may be touched. Optional: `train` does what was not done."""
        if self._model is None:
            self._model = self.configure_model()
        _ = self.loss_layout, self._unit_datasets

    @cached_property
    def _unit_datasets(self) -> dict[str, RandomAccess]:
        """Of the validation units that have one of their own."""
        units = self.arguments.evaluation.units
        own = {name: load_object(unit.dataset)(self.arguments) for name, unit in units.items() if unit.dataset is not None}
        return {name: self.collated(dataset) for name, dataset in own.items()}

    def _build_unit(self, name: str, config: UnitConfig) -> ValidationUnit:
        max_batches = config.max_batches or self.arguments.evaluation.max_batches
        loader = self.dataloaders.dataloader_eval
        if config.dataset is not None:
            loader = self._held_out_loader(self._unit_datasets[name])
        elif loader is None:
            raise UsageError(f"evaluation.units.{name}: there is no held-out data; set its dataset, or data.eval_fraction")
        elif config.task is None:
            return ValidationUnit(loader, self.functions.eval_step_fn, self.loss_layout, self._mesh, max_batches)
        task = None if config.task is None else load_object(config.task)(self.arguments)
        return self.validation_unit(name, loader, task, max_batches)

    def _held_out_loader(self, dataset: RandomAccess) -> StepAddressedLoader:
        # One micro-batch of the same size as in training, so that whatever fits in memory there fits here.
        rows = self.arguments.micro_batch_size
        return StepAddressedLoader(dataset, rows, self._mesh, num_examples=len(dataset), preprocess=self._preprocess)

    def _jit_eval_step(self, function: LossFunction, layout: Layout) -> Any:
        everywhere = meshes.replicated(self._mesh)
        return jax.jit(
            make_eval_step(function, layout),
            in_shardings=(self._state_shardings, everywhere, meshes.micro_batches(self._mesh)),
            out_shardings=everywhere,
            donate_argnums=1,
        )

    def _fresh_state(self, params: Any) -> TrainState:
        """Traced: the state at step 0 with these parameters."""
        return state_from_parameters(params, self._update_rule, self.step_layout, initial_scaler(self.arguments))

    def _initial_state(self) -> TrainState:
        """Traced: the state at step 0."""
        return self._fresh_state(initial_parameters(self.task, self.arguments.seed))

    def _loss_function_of(self, parts: ModelParts) -> LossFunction:
        return LossFunction(self.task, parts.merge, self.preforward, self.postforward, self.arguments.data.sources)

    def _layout_of(self, parts: ModelParts, params: Any) -> Layout:
        rows = self._batch_shapes((1, self.arguments.micro_batch_size))
        return self._traced(self._loss_function_of(parts), params, shapes_of_rows(rows), **step_metrics(params, self.arguments))

    def _traced(self, function: LossFunction, params: Any, rows: Mapping[str, Any], **others: Kind) -> Layout:
        """Of the metrics of a loss, and others."""
        step = jax.ShapeDtypeStruct((), np.int32)
        loss, terms = jax.eval_shape(function.with_terms, params, rows, step)
        # What `postforward` makes of their total need not be their sum.
        return dataclasses.replace(Layout.of(loss, **others), terms=() if self.overrides("postforward") else tuple(terms))

    def _batch_shapes(self, rows: tuple[int, int], sharding: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
        if self.dataset_train is None:
            raise UsageError("there is no training data: give dataset_train, or override configure_dataloaders")
        row = stack([self.dataset_train[0]], [True])
        if self._preprocess is not None:
            row = preprocessed(row, 0, self._preprocess)
        return {name: jax.ShapeDtypeStruct((*rows, *leaf.shape[1:]), leaf.dtype, sharding=sharding) for name, leaf in row.items()}

    def collated(self, dataset: Any) -> RandomAccess:
        """`dataset` with `build_data_transform` and `build_data_collate_info` applied to each example."""
        transform, info = self.build_data_transform(), self.build_data_collate_info()
        if transform is None and not info:
            return dataset
        return Collated(dataset, transform, info, self.arguments.data.truncation)

    @property
    def _preprocess(self) -> Preprocess | None:
        return self.preprocess_batch if self.overrides("preprocess_batch") else None

    def _tell_from_host0(self, message: str) -> None:
        if jax.process_index() == 0:
            runtime.current().note(message)

    def _zeros(self, layout: Layout) -> MetricSums:
        return meshes.put_everywhere(self._mesh, layout.zeros())

    def _build_checkpoint_manager(self) -> CheckpointManager:
        host, arguments = runtime.current(), self.arguments

        def on_saved(step: int, path: str) -> None:
            self._saved.append((step, path))
            host.emit("saved", step=step, path=path)

        manager = CheckpointManager(
            f"{self._run_folder}/checkpoints",
            Retention.of(arguments.checkpoint, arguments.evaluation.score),
            self._mesh,
            self._programs,
            on_saved=on_saved,
            on_failed=lambda step, error: host.emit("save_failed", step=step, error=error),
            note=host.note,
            ordered=Committed(host.run, host.committed_step),
            term=WriterTerm(host.driver_term, host.generation),
            storage_patience_s=arguments.checkpoint.storage_patience_s,
        )
        host.follow_fence(lambda path: setattr(manager, "fence", path))
        return manager

    @property
    def _run_folder(self) -> str:
        return f"{self.arguments.storage}/{self.arguments.name}"

    @cached_property
    def _mesh(self) -> Mesh:
        self.arguments.check_devices(jax.device_count())
        return meshes.make_mesh(self.arguments.mesh)

    @cached_property
    def _state_shardings(self) -> TrainState:
        return state_shardings(self._mesh, self._configured(self._model, "state", "configure_model").state, self._axes)

    @cached_property
    def _programs(self) -> ProgramStore:
        key, folder = runtime.current().program_key, distributed.program_folder()
        about = (key, dataclasses.asdict(self.arguments), jax.process_count(), jax.__version__)
        room = self.arguments.kept_programs_gb
        return ProgramStore(folder if key else None, about, runtime.current().note, None if room is None else room * 1e9)

    def _configured(self, value: Any, name: str, method: str) -> Any:
        if value is None:
            raise NotConfiguredError(
                f"{type(self).__name__}.{name} exists after {method}() only: call train() or {method}() first"
            )
        return value
