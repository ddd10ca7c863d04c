"""The trainer most users want, and the one to subclass: each `configure_*` and `build_*` may be overridden alone."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from trainers import agree, distributed, runtime
from trainers import mesh as meshes
from trainers.anomalies import Decision
from trainers.arguments import TrainingArguments, load_object
from trainers.callbacks import Callback, CallbackList, RunInfo
from trainers.checkpoints import CheckpointManager, save_to
from trainers.checks import parse_duration_s
from trainers.compile import Program, ProgramStore
from trainers.data.loader import RandomAccess, StepAddressedLoader
from trainers.errors import NotConfiguredError, SaveFailedError, UsageError
from trainers.lineage import Lineage
from trainers.loop import Loop
from trainers.metrics import Publisher, Seconds, Throughput, means
from trainers.optimizers import build_optimizer
from trainers.protocol import (
    Task,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
)
from trainers.results import describe
from trainers.resume import Resume, known_lineage
from trainers.schedules import build_schedule
from trainers.state import (
    ModelParts,
    TrainState,
    abstract_model,
    initial_state,
    num_parameters,
    state_from_parameters,
    state_shardings,
    with_shardings,
)
from trainers.step import STEP_METRICS, Bag, make_eval_step, make_train_step
from trainers.stop_reason import StopReason
from trainers.wishes import Flags, Limits, Wishes


class BaseTrainer:
    """Trains a task's model on random-access datasets. Conforms to `trainers.protocol.TrainerProtocol`.

    Building one touches no device: a standby process does it, and `prepare`, before its host has joined the gang.
    All hosts must call `train`, `evaluate`, `eval` and `save_pretrained` alike.
    """

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
        self._last_evaluation: tuple[int, dict[str, float]] | None = None
        self._latest_metrics: dict[str, float] = {}
        """Of the last publish, if need be the last before the checkpoint that was restored."""

    # ------------------------------------------------------------------ what a subclass may replace

    def configure_model(self) -> TrainerConfigureModelOutput:
        """(the model taken apart, the state's shapes): no device is touched."""
        parts, params, self._axes = abstract_model(self.task, self.arguments.seed)
        return TrainerConfigureModelOutput(parts, jax.eval_shape(state_from_parameters_of(self.optimizer), params))

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        """The jitted train and eval steps (state donated, shardings pinned in and out), the mesh, the checkpoint manager."""
        host, everywhere = runtime.current(), meshes.replicated(self._mesh)
        places, batch_place = self._state_shardings, meshes.micro_batches(self._mesh)
        names = (*self._metric_names, *STEP_METRICS)
        step = make_train_step(self.task, self.model, self.optimizer, self.scheduler, names, self.arguments)
        train_step = jax.jit(
            step,
            in_shardings=(places, everywhere, batch_place, meshes.one_per_device(self._mesh)),
            out_shardings=(places, everywhere, everywhere),
            donate_argnums=(0, 1),
        )
        eval_step = jax.jit(
            make_eval_step(self.task, self.model, self._metric_names),
            in_shardings=(places.params, everywhere, batch_place),
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

    def add_callback(self, callback: Callback) -> None:
        self.callbacks.add(callback)

    # ------------------------------------------------------------------ training

    def prepare(self) -> None:
        """All that can be done before a device may be touched. Optional: `train` does what was not done."""
        if self._model is None:
            self._model = self.configure_model()
        _ = self._metric_names

    def train(self, model_parameters: Any = None, state: TrainState | None = None) -> TrainState:
        """Starts or resumes; returns the final state and sets `output`. Raises on any failure; a stop is not one."""
        host = runtime.current()
        started_s = time.monotonic()
        self._configure()
        host.phase("restore")
        self.lineage = known_lineage(self._run_folder, host.skip_batches)
        self._resume = self._build_resume()
        state = self._starting_state(model_parameters, state)
        host.phase("compile")
        self._compile(state)
        loop = self._build_loop(int(state.batch_index), started_s)
        self.callbacks.call(Callback.on_train_begin, self.info)
        host.phase("train")
        state, reason = loop.run(state)
        self._state = state
        self._finish(state, reason)
        self.callbacks.call(Callback.on_train_end, self.info)
        return state

    def evaluate(
        self, state: TrainState | None = None, metric_calculator: Callable[[dict[str, float]], dict[str, float]] | None = None
    ) -> dict[str, float]:
        """Means over the whole held-out set (or `evaluation.max_batches` of it), each example counted once.

        `metric_calculator` gets the means and returns further metrics. Empty if there is no held-out data.
        """
        state, bag = self._current(state), self._zeros(len(self._metric_names))
        for batch in self._eval_batches():
            bag = self.functions.eval_step_fn(state.params, bag, batch)
        metrics = self._means(bag) if self.dataset_eval is not None else {}
        if metric_calculator is not None:
            metrics.update(metric_calculator(metrics))
        return metrics

    def eval(self, state: TrainState | None = None) -> Iterator[dict[str, float]]:
        """Yields the metrics of each held-out batch."""
        state = self._current(state)
        for batch in self._eval_batches():
            yield self._means(self.functions.eval_step_fn(state.params, self._zeros(len(self._metric_names)), batch))

    def save_pretrained(self, ckpt_path: str, state: TrainState | None = None) -> str:
        """Writes parameters, optimizer state, arguments and all else of `state` (None: the current one) to the folder
        `ckpt_path`, which must not exist. Returns the path; `trainers.checkpoints.load_from` reads it back."""
        state = self._current(state)
        save_to(ckpt_path, state, self._meta())
        return ckpt_path

    # ------------------------------------------------------------------ inside

    def _configure(self) -> None:
        self.prepare()
        if self._functions is None:
            self._functions = self.configure_functions()
        if self._dataloaders is None:
            self._dataloaders = self.configure_dataloaders()

    def _starting_state(self, model_parameters: Any, state: TrainState | None) -> TrainState:
        """1. the state given; 2. the parameters given, with a new optimizer state; 3. the newest whole checkpoint; 4. step 0."""
        places, resume = self._state_shardings, self._resume
        if state is not None:
            return resume.begin_with(jax.device_put(state, places))
        if model_parameters is not None:
            fresh = jax.jit(state_from_parameters_of(self.optimizer), out_shardings=places)
            return resume.begin_with(fresh(jax.device_put(model_parameters, places.params)))
        state = resume.newest()
        self._latest_metrics = resume.metrics
        return state

    def _build_resume(self) -> Resume:
        places, seed = self._state_shardings, self.arguments.seed
        return Resume(
            self._run_folder,
            self.functions.checkpoint_manager,
            with_shardings(self._model_state, places),
            jax.jit(lambda: initial_state(self.task, seed, self.optimizer), out_shardings=places),
            {"num_hosts": jax.process_count(), "num_devices": self._mesh.devices.size, "mesh": dict(self._mesh.shape)},
            self.lineage,
        )

    def _go_back(self, decision: Decision) -> tuple[TrainState, int]:
        found = self._resume.go_back(decision)
        self._latest_metrics = self._resume.metrics
        return found

    def _compile(self, state: TrainState) -> None:
        """Compiles (or loads) the train step and what saving needs, so that no step has to wait for it."""
        self.functions.checkpoint_manager.prepare(state)
        shape = (self.arguments.accumulation_steps, meshes.padded_rows(self._mesh, self.arguments.micro_batch_size))
        batch = self._batch_shapes(shape, sharding=meshes.micro_batches(self._mesh))
        self.functions.train_step_fn.prepare(state, self._empty_bag(), batch, self._no_wishes())

    def _build_loop(self, step: int, started_s: float) -> Loop:
        arguments = self.arguments
        loader, manager = self.dataloaders.dataloader_train, self.functions.checkpoint_manager
        epochs = arguments.max_num_data_epochs
        limits = Limits(
            max_steps=arguments.max_num_steps,
            max_batches=None if epochs is None else -(-epochs * len(self.dataset_train or ()) // arguments.global_batch_size),
            stop_at=runtime.current().stop_at,
            deadline_s=None if arguments.time_limit is None else started_s + parse_duration_s(arguments.time_limit),
        )
        self.info.global_step = step
        publisher = Publisher(
            arguments.publish_every_steps, self._throughput(), (*self._metric_names, *STEP_METRICS), self._publish
        )
        return Loop(
            train_step=self.functions.train_step_fn,
            loader=loader,
            empty_bag=self._empty_bag,
            publisher=publisher,
            flags=Flags(self._mesh),
            wishes=Wishes(limits, arguments.checkpoint.save_minutes, lambda: manager.failing),
            checkpoint=arguments.checkpoint,
            evaluation=arguments.evaluation,
            anomalies=arguments.anomalies,
            lineage=self.lineage,
            save=self._save,
            evaluate=self._evaluate_and_publish,
            go_back=self._go_back,
            callbacks=self.callbacks,
            seconds=Seconds(),
            info=self.info,
            samples_per_epoch=len(self.dataset_train or ()),
            resumed_step=step,
        )

    def _finish(self, state: TrainState, reason: StopReason) -> None:
        host, manager, step = runtime.current(), self.functions.checkpoint_manager, self.info.global_step
        wanted = self.arguments.checkpoint.save_at_end or not reason.finished
        if wanted:
            host.phase("save")
            self._save(state)
        if reason.finished and (self._last_evaluation is None or self._last_evaluation[0] != step):
            host.phase("evaluate")
            self._evaluate_and_publish(state)
        host.phase("finish")
        manager.wait()
        if wanted and not agree.every_host("saved at the end", manager.last_saved_step == step):
            raise SaveFailedError(f"training is over, but the checkpoint of its last step, {step}, could not be saved")
        saved = agree.from_host0("last checkpoint", manager.last_saved_step)
        path = None if saved is None else manager.path(saved)
        metrics = self._final_metrics(state)
        if reason.finished:
            metrics["sample"] = self._sample(state)
        self.output = TrainerOutput(state, self._mesh, path, None if saved is None else str(saved), reason, metrics)
        self.dataloaders.dataloader_train.close()
        self._dataloaders = None  # made anew if this trainer goes on

    def _final_metrics(self, state: TrainState) -> dict[str, Any]:
        metrics = describe(state, self.functions.checkpoint_manager.fingerprint(state))
        metrics["train_loss"] = self._latest_metrics.get("loss")
        metrics.update(self.lineage.meta(self.info.batch_index))
        if self._last_evaluation is not None:
            metrics.update({f"eval_{name}": value for name, value in self._last_evaluation[1].items()})
        return metrics

    def _sample(self, state: TrainState) -> str | None:
        """A text that the model generates, if its task can; a look at what was learnt, never a reason to fail."""
        config = self.arguments.sample
        generate = getattr(self.task, "sample", None)
        if generate is None or not config.prompt:
            return None
        return generate(self.model.merge(state.params), config.prompt, config.num_tokens, config.temperature, self.arguments.seed)

    def _save(self, state: TrainState) -> None:
        step, manager = self.info.batch_index, self.functions.checkpoint_manager
        manager.wait()
        if step == manager.last_saved_step:
            return  # `saving` would be told, and never `saved`
        runtime.current().emit("saving", step=step)
        manager.save(step, state, self._meta())

    def _meta(self) -> dict[str, Any]:
        return {
            "batch_index": self.info.batch_index,
            "seed": self.arguments.seed,
            **self.lineage.meta(self.info.batch_index),
            "metrics": self._latest_metrics,
            "arguments": dataclasses.asdict(self.arguments),
        }

    def _evaluate_and_publish(self, state: TrainState) -> None:
        metrics = self.evaluate(state)
        if not metrics:
            return
        self._last_evaluation = (self.info.global_step, metrics)
        self.callbacks.call(Callback.on_evaluate, self.info, metrics=metrics)
        if jax.process_index() == 0:
            named = {f"eval_{name}": value for name, value in metrics.items()}
            runtime.current().emit("metrics", step=self.info.global_step, metrics=named, seconds={})

    def _publish(self, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None:
        metrics["epoch"] = self.info.epoch
        self._latest_metrics = metrics
        self.callbacks.call(Callback.on_publish, self.info, metrics=metrics)
        if jax.process_index() == 0:
            runtime.current().emit("metrics", step=step, metrics=metrics, seconds=seconds)

    def _eval_batches(self) -> Iterator[Any]:
        self._configure()
        loader = self.dataloaders.dataloader_eval
        if loader is not None:
            limit = self.arguments.evaluation.max_batches
            yield from itertools.islice(loader.epoch(), limit)

    def _current(self, state: TrainState | None) -> TrainState:
        state = state or self._state
        if state is None:
            raise NotConfiguredError("there is no state yet: call train first, or pass a state")
        return state

    def _empty_bag(self) -> Bag:
        return self._zeros(len(self._metric_names) + len(STEP_METRICS))

    def _no_wishes(self) -> jax.Array:
        return Flags(self._mesh).array()

    def _zeros(self, num_metrics: int) -> Bag:
        return meshes.put_everywhere(self._mesh, np.zeros((num_metrics, 2), np.float32))

    def _means(self, bag: Bag) -> dict[str, float]:
        return means(dict(zip(self._metric_names, np.asarray(bag), strict=True)))

    @cached_property
    def _metric_names(self) -> tuple[str, ...]:
        batch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
            self._batch_shapes((1, self.arguments.micro_batch_size)),
        )
        loss = jax.eval_shape(
            lambda params, rows: self.task.loss(self.model.merge(params), rows), self._model_state.params, batch
        )
        return ("loss", *loss.parts)

    def _batch_shapes(self, rows: tuple[int, int], sharding: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
        if self.dataset_train is None:
            raise UsageError("there is no training data: give dataset_train, or override configure_dataloaders")
        leaves = {**self.dataset_train[0], "weight": np.zeros((), np.float32)}
        return {
            name: jax.ShapeDtypeStruct((*rows, *np.shape(leaf)), np.asarray(leaf).dtype, sharding=sharding)
            for name, leaf in leaves.items()
        }

    def _throughput(self) -> Throughput:
        flops = self.task.flops_per_token(num_parameters(self._model_state.params))
        return Throughput(self.arguments.global_batch_size, flops, self._mesh.devices.size)

    def _build_checkpoint_manager(self) -> CheckpointManager:
        host, arguments = runtime.current(), self.arguments

        manager = CheckpointManager(
            f"{self._run_folder}/checkpoints",
            arguments.checkpoint,
            self._mesh,
            self._programs,
            on_saved=lambda step, path: host.emit("saved", step=step, path=path),
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


def state_from_parameters_of(optimizer: optax.GradientTransformation) -> Callable[[Any], TrainState]:
    return lambda params: state_from_parameters(params, optimizer)
