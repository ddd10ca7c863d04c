"""What a trainer is made of, and how: the part of `BaseTrainer` to replace piece by piece. Touches no device by itself."""

from __future__ import annotations

import collections
import dataclasses
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from trainers import distributed, runtime
from trainers import mesh as meshes
from trainers.arguments import TrainingArguments, load_object
from trainers.bag import Bag, Layout
from trainers.callbacks import Callback, CallbackList, RunInfo
from trainers.checkpoints import CheckpointManager
from trainers.compile import Program, ProgramStore
from trainers.data.loader import RandomAccess, StepAddressedLoader
from trainers.errors import NotConfiguredError, UsageError
from trainers.hooks import Hooks
from trainers.lineage import Lineage
from trainers.loss import LossFunction
from trainers.optimizers import build_optimizer
from trainers.protocol import (
    Task,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
)
from trainers.schedules import build_schedule
from trainers.state import (
    ModelParts,
    TrainState,
    abstract_model,
    initial_parameters,
    state_from_parameters,
    state_shardings,
)
from trainers.step import STEP_METRICS, StepOutput, make_eval_step, make_train_step


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
        for callback in callbacks:
            self.callbacks.add(callback)
        self.output: TrainerOutput | None = None
        self.info = RunInfo(max_steps=arguments.max_num_steps)
        self.lineage = Lineage()
        self._model: TrainerConfigureModelOutput | None = None
        self._functions: TrainerConfigureFunctionOutput | None = None
        self._dataloaders: TrainerConfigureDataloaderOutput | None = None
        self._state: TrainState | None = None
        self._saved: collections.deque[tuple[int, str]] = collections.deque()
        self.post_init()

    # ------------------------------------------------------------------ what a subclass may replace

    def post_init(self) -> None:
        """Called at the end of building; no device may be touched."""

    def configure_model(self) -> TrainerConfigureModelOutput:
        """(the model taken apart, the state's shapes): no device is touched."""
        parts, params, self._axes = abstract_model(self.task, self.arguments.seed)
        # Without data only its shapes are of interest.
        layout = self._layout_of(parts, params) if self.dataset_train is not None else Layout((), ())
        state = jax.eval_shape(lambda params: state_from_parameters(params, self.optimizer, layout), params)
        return TrainerConfigureModelOutput(parts, state)

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        """The jitted train and eval steps (state donated, shardings pinned in and out), the mesh, the checkpoint manager."""
        host, everywhere = runtime.current(), meshes.replicated(self._mesh)
        places, batch_place = self._state_shardings, meshes.micro_batches(self._mesh)
        on_micro_step = self.on_micro_step if self.overrides("on_micro_step") else None
        step = make_train_step(
            self.loss_function, self.step_layout, self.optimizer, self.scheduler, self.arguments, on_micro_step
        )
        train_step = jax.jit(
            step,
            in_shardings=(places, everywhere, batch_place, meshes.one_per_device(self._mesh)),
            out_shardings=StepOutput(places, everywhere, everywhere, everywhere),  # type: ignore[arg-type]
            donate_argnums=(0, 1),
        )
        eval_step = jax.jit(
            make_eval_step(self.loss_function, self.loss_layout),
            in_shardings=(places, everywhere, batch_place),
            out_shardings=everywhere,
            donate_argnums=1,
        )
        return TrainerConfigureFunctionOutput(
            Program("train_step", train_step, self._programs, host.note),
            Program("eval_step", eval_step, self._programs, host.note),
            self._mesh,
            self._build_checkpoint_manager(),
        )

    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput:
        if self.dataset_train is None:
            raise UsageError("there is no training data: give dataset_train, or override configure_dataloaders")
        size, mesh, held_out = self.arguments.global_batch_size, self._mesh, None
        train = StepAddressedLoader(self.dataset_train, size, mesh, accumulation_steps=self.arguments.accumulation_steps)
        if self.dataset_eval is not None and len(self.dataset_eval):
            # One micro-batch of the same size as in training, so that whatever fits in memory there fits here.
            rows = self.arguments.micro_batch_size
            held_out = StepAddressedLoader(self.dataset_eval, rows, mesh, num_examples=len(self.dataset_eval))
        return TrainerConfigureDataloaderOutput(train, held_out)

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
        return build_optimizer(self.arguments.optimizer, self.scheduler)

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
        names = len(self.step_layout) - len(STEP_METRICS)
        return Layout(self.step_layout.names[:names], self.step_layout.kinds[:names])

    @cached_property
    def step_layout(self) -> Layout:
        """Of the metrics of a train step: those of the loss, and those of the step."""
        return self._layout_of(self.model, self._configured(self._model, "step_layout", "configure_model").state.params)

    def add_callback(self, callback: Callback) -> None:
        self.callbacks.add(callback)

    # ------------------------------------------------------------------ inside

    def _configure(self) -> None:
        self.prepare()
        if self._functions is None:
            self._functions = self.configure_functions()
        if self._dataloaders is None:
            self._dataloaders = self.configure_dataloaders()

    def prepare(self) -> None:
        """All that can be done before a device may be touched. Optional: `train` does what was not done."""
        if self._model is None:
            self._model = self.configure_model()
        _ = self.loss_layout

    def _fresh_state(self, params: Any) -> TrainState:
        """Traced: the state at step 0 with these parameters."""
        return state_from_parameters(params, self.optimizer, self.step_layout)

    def _initial_state(self) -> TrainState:
        """Traced: the state at step 0."""
        return self._fresh_state(initial_parameters(self.task, self.arguments.seed))

    def _loss_function_of(self, parts: ModelParts) -> LossFunction:
        return LossFunction(self.task, parts.merge, self.preforward, self.postforward)

    def _layout_of(self, parts: ModelParts, params: Any) -> Layout:
        rows = self._batch_shapes((1, self.arguments.micro_batch_size))
        batch = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in rows.items()}
        step = jax.ShapeDtypeStruct((), np.int32)
        return Layout.of(jax.eval_shape(self._loss_function_of(parts), params, batch, step), **STEP_METRICS)

    def _batch_shapes(self, rows: tuple[int, int], sharding: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
        if self.dataset_train is None:
            raise UsageError("there is no training data: give dataset_train, or override configure_dataloaders")
        leaves = {**self.dataset_train[0], "weight": np.zeros((), np.float32)}
        return {
            name: jax.ShapeDtypeStruct((*rows, *np.shape(leaf)), np.asarray(leaf).dtype, sharding=sharding)
            for name, leaf in leaves.items()
        }

    def _zeros(self, layout: Layout) -> Bag:
        return meshes.put_everywhere(self._mesh, layout.zeros())

    def _build_checkpoint_manager(self) -> CheckpointManager:
        host, arguments = runtime.current(), self.arguments

        def on_saved(step: int, path: str) -> None:
            self._saved.append((step, path))
            host.emit("saved", step=step, path=path)

        manager = CheckpointManager(
            f"{self._run_folder}/checkpoints",
            arguments.checkpoint,
            self._mesh,
            self._programs,
            on_saved=on_saved,
            on_failed=lambda step, error: host.emit("save_failed", step=step, error=error),
            note=host.note,
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
        key, folder = runtime.current().program_key, distributed.compile_cache_folder()
        about = (key, dataclasses.asdict(self.arguments), jax.process_index(), jax.process_count(), jax.__version__)
        return ProgramStore(folder / "programs" if key and folder else None, about, runtime.current().note)

    def _configured(self, value: Any, name: str, method: str) -> Any:
        if value is None:
            raise NotConfiguredError(
                f"{type(self).__name__}.{name} exists after {method}() only: call train() or {method}() first"
            )
        return value
