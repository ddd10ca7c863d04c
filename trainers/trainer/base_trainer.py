"""The trainer that most users want, and the one to subclass.

A subclass may replace every `build_*`, every `configure_*`, every property and every hook by itself. They stand here in the order
in which they are called. How a trainer becomes a training is in `build.py` (its parts) and `training_run.py`.

Hooks change what training does; observers are callbacks. Hooks are called on all hosts alike (except `preprocess_batch`), between
steps, without waiting for the device. What a hook returns is used, logged and checkpointed from there on. A returned state must
have the shapes, types and shardings of the one passed in, which is donated. A hook that raises ends training with its error. A
hook that is not overridden costs nothing. A hook that changes a state must compute it from its arguments alone: after a failure
it is called again for the replayed steps.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh

from trainers import runtime
from trainers.callbacks import Callback, CallbackList, RunInfo
from trainers.callbacks.profiler import Profiler
from trainers.checkpoint import assets, carried
from trainers.checkpoint.standalone import load_from, save_to
from trainers.config import ParameterGroup
from trainers.config.arguments import TrainingArguments, load_object
from trainers.data.collate import CollateInfo, Collator, Transform
from trainers.data.loader import RandomAccess
from trainers.data.sources.iterable import held_out_examples, num_examples, random_access
from trainers.diagnostics import memory
from trainers.evaluation.validation import ValidationUnit
from trainers.loop import init_from
from trainers.loop.evaluator import observe_own
from trainers.loop.hooks import overrides
from trainers.loop.lineage import Lineage
from trainers.loop.returned import check_returns
from trainers.loop.saver import TimeUsed
from trainers.models.hf.pretrained import is_there, resolved
from trainers.optim.optimizers import build_grouped
from trainers.optim.schedules import build_schedule
from trainers.other_systems import INSTEAD_OF_A_METHOD, INSTEAD_OF_A_TASK_METHOD
from trainers.overrides import CALLED_OF_A_TASK, check_hooks, check_overrides, shows
from trainers.parallel.mesh import make_mesh
from trainers.protocol import (
    Batch,
    CheckpointManagerProtocol,
    EvaluationMetrics,
    Loss,
    Pruner,
    Task,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
)
from trainers.runtime import distributed, signals
from trainers.runtime.multihost import note_from_host0
from trainers.step.state import ModelParts, TrainState
from trainers.trainer import metric_names
from trainers.trainer.batching import Batching
from trainers.trainer.build import Built, build, build_checkpoint_manager, configure_functions, prepare
from trainers.trainer.evaluations import Evaluations, build_metrics, build_units
from trainers.trainer.model_design import ModelDesign, configured
from trainers.trainer.placement import Placement
from trainers.trainer.training_run import TrainingRun

Metrics = dict[str, Any]
"""Metrics by name. Those of a step are scalars on the device (`float()` of one waits for the step); those of an evaluation are
numbers."""


class BaseTrainer:
    """Trains a task's model on random-access datasets. Conforms to `trainers.protocol.TrainerProtocol`.

    Building one touches no device: a standby process does it, and `prepare`, before its host has joined the gang.
    All hosts must call `train`, `evaluate`, `eval` and `save_pretrained` alike.
    """

    names_are_final = True
    """Whether the task is known when the trainer is built, and with it the names of its metrics."""
    has_defaults = True
    """Marks the class whose methods a subclass may replace (`trainers.loop.hooks.overrides`)."""

    def __init__(
        self,
        arguments: TrainingArguments,
        dataset_train: RandomAccess | None = None,
        dataset_eval: RandomAccess | None = None,
        *,
        callbacks: tuple[Callback, ...] = (),
    ):
        check_overrides(type(self), INSTEAD_OF_A_METHOD)
        check_returns(type(self), BaseTrainer)
        observe_own(type(self))
        self.arguments = arguments = with_own_parameters(resolved(arguments))
        self.dtype, self.param_dtype = jax.numpy.dtype(arguments.dtype), jax.numpy.dtype(arguments.param_dtype)
        self.dataset_train = dataset_train
        self.dataset_eval = dataset_eval
        self.reads_files = type(dataset_train).__module__.startswith("trainers.data.")
        """Whether the data was made of the files that `arguments.data` names."""
        self.reads_records = getattr(dataset_train, "reads_records", True)
        self.callbacks = CallbackList()
        for callback in (Profiler(arguments.profile, os.path.join(arguments.run_folder, arguments.profile.folder)), *callbacks):
            self.callbacks.add(callback)
        self.output: TrainerOutput | None = None
        """What the last training has come to; None before its end."""
        self.state: TrainState | None = None
        """The state at the end of the last training; None before it."""
        self.info = RunInfo(max_steps=arguments.max_num_steps)
        self.lineage = Lineage()
        self.batching = Batching(self)
        self.design = ModelDesign(self, self.batching)
        self.built = Built()
        """The parts that were built of this trainer. `trainers.trainer.build.build` builds the others."""
        self.evaluations = Evaluations(self)
        self.training: TrainingRun | None = None
        """The last training; None before the first."""
        if overrides(self, "prepare_batch"):
            # Its programs need not depend on the step's, nor on each other.
            distributed.let_cpus_run_one_program_at_a_time()
        # Before the datasets are wrapped: a subclass sets here what its transforms need.
        self.post_init()
        early_stopper = arguments.evaluation.score is not None, "set evaluation.score, whose score it is told"
        shapes = overrides(self, "prepare_batch"), "it says what prepare_batch makes: override that too"
        check_hooks(self, {"build_early_stopper": early_stopper, "prepared_shapes": shapes})
        own = assets.named(self.build_model_assets())
        self.model_assets = {**carried.of(arguments, arguments.run_folder), **carried.labels_of(dataset_train), **own}
        """The files of Hugging Face that the run began with, and what `build_model_assets` has returned, by name."""
        collated = self.batching.collated
        if dataset_train is not None:
            self.dataset_train = collated(random_access(dataset_train, arguments, note_from_host0))
        if dataset_eval is not None:
            self.dataset_eval = collated(held_out_examples(dataset_eval, num_examples(dataset_train) or 0))
        if self.names_are_final and dataset_train is not None:
            metric_names.check_when_built(self)

    # ------------------------------------------------------------------ what a program calls

    def add_callback(self, callback: Callback) -> None:
        """Adds an observer. Before `train`."""
        self.callbacks.add(callback)

    def prepare(self) -> None:
        """Does everything that needs no device. Optional: `train` does what was not done."""
        prepare(self)

    def precompile(self) -> None:
        """Optional, instead of `train`, in a process that does nothing else: compiles and keeps the programs that the start of
        a gang of this size needs. All its hosts must call this."""
        TrainingRun(self, build(self), TimeUsed()).compile(self.placement.placed_state)

    def train(self, model_parameters: Any = None, state: TrainState | None = None) -> TrainState:
        """Starts or resumes training. Returns the final state and sets `output`. Raises on any failure; a stop is not one.

        What is given is where the run begins: a state, or parameters (in nested dicts, also of NumPy arrays, as
        `trainers.export.from_safetensors` returns them) with a new optimizer state. A run that has a checkpoint goes on from
        that, and says so.

        In the main thread Ctrl-C and SIGTERM save and stop, unless the program handles them; a second Ctrl-C ends it at once.
        """
        self.evaluations.in_training, self.training = True, None
        try:
            with signals.handled(runtime.current()):
                time_used = TimeUsed(runtime.current().time_used_s)
                self.training = TrainingRun(self, build(self), time_used)
                return self.training.train(model_parameters, state)
        except BaseException as raised:
            explains = self.training is not None and memory.out_of_memory(raised)
            error = self.training.out_of_memory(raised) if explains else raised  # type: ignore[union-attr]
            self.callbacks.call(Callback.on_exception, self.info, error=error)
            if error is raised:
                raise
            # `from`: the runtime's own error stays visible below the advice.
            raise error from raised
        finally:
            self.evaluations.in_training = False
            runtime.current().training_ended()

    def evaluate(
        self,
        state: TrainState | None = None,
        metric_calculator: Callable[[dict[str, float]], dict[str, float]] | None = None,
        *,
        unit: str | None = None,
    ) -> dict[str, float]:
        """Returns means over the whole held-out set of a validation unit (default: the first), or over its `max_batches`, each
        example counted once: `loss`, the parts of the loss, and `perplexity`, without the name of the unit. If a subclass has its
        own `eval`, they are the means of what that yields.

        The hooks and callbacks of an evaluation are called as in training. A hook may donate the state that is given.
        `metric_calculator` gets the means and returns further metrics; metrics of single predictions come from
        `build_evaluation_metrics`. Raises UsageError if there is no held-out data.
        """
        return self.evaluations.evaluate(state, unit, metric_calculator)

    def eval(self, model_state: TrainState | None = None, *, unit: str | None = None) -> Iterator[dict[str, float]]:
        """Yields the metrics of each held-out batch. `on_evaluation_end` and the callbacks get those of all batches at the end.
        Raises UsageError if there is no held-out data."""
        return self.evaluations.batches(model_state, unit)

    def save_pretrained(self, ckpt_path: str, state: TrainState | None = None) -> str:
        """Writes parameters, optimizer state, arguments and everything else of `state` (None: the current one), and the model's
        assets, to the folder `ckpt_path`, which must not exist. Returns the path. `load_pretrained` and
        `trainers.checkpoint.assets.read` read it back."""
        state = self.evaluations.current(state)
        if self.training is None:  # not after `train`: data loaders would be built again, to read nothing
            self.training = TrainingRun(self, build(self), TimeUsed())
        # Of the state that is given, which need not be the current one.
        save_to(ckpt_path, state, self.training.saver.meta(int(state.batch_index)), self.model_assets)
        return ckpt_path

    def load_pretrained(self, path: str) -> TrainState:
        """Returns the state that `save_pretrained` or a run's checkpoint has, with this trainer's shardings. `path` may also be a
        run's folder, which stands for its newest whole checkpoint. All hosts must call this. Raises CheckpointError if the
        state is damaged or of another model, and CheckpointUnavailableError if it cannot be read."""
        self.prepare()
        loaded, meta = load_from(init_from.found(path), self.placement.placed_state)
        if self.placement.frozen is not None:
            self.placement.frozen.check(meta)
        return loaded

    # ------------------------------------------------------------------ called when the trainer is built

    def post_init(self) -> None:
        """Called before anything is built from the data; must not touch a device."""

    def build_model_assets(self) -> Mapping[str, Any] | Sequence[Any]:
        """Returns what belongs to the model beside its arrays, such as a tokenizer, by name or as a list: text, bytes, JSON
        values, or objects with `save_pretrained(folder)` or `save(folder)`. Called once on every host, before
        `build_data_transform`; must not touch a device. The run's folder, `save_pretrained` and every export get it."""
        return {}

    def build_data_transform(self) -> Transform | None:
        """Returns the transform of each example, before it becomes a row; None: no transform. For training and held-out data."""
        return None

    def build_data_collate_info(self) -> Mapping[str, CollateInfo | Mapping[str, Any] | tuple[Any, ...]]:
        """Returns how leaves whose length varies between examples are truncated and padded, by the name of the leaf. A dict with
        the fields of `CollateInfo`, or a tuple in their order, will do."""
        return {}

    # ------------------------------------------------------------------ called before there are devices

    def build_collator(self) -> Collator | None:
        """Returns a function from a list of examples to a batch, a dict of arrays [examples, ...]; None: they are stacked.

        The examples are dicts without `weight` and `sample_id`. The function is pure, and gets some rows of a global batch: the
        shapes of its leaves must not depend on the examples. Default: `data.collator`."""
        path = self.arguments.data.collator
        return None if path is None else load_object(path)

    @cached_property
    def task(self) -> Task:
        """The task: its model and its loss. Default: the class that `task` names, which gets the arguments."""
        return load_object(self.arguments.task)(self.arguments)

    def freeze_module(self) -> str | Sequence[str]:
        """Returns patterns of parameters to freeze, or one. They come before all groups; `optimizer.groups` may freeze others."""
        return ()

    def build_param_groups(self) -> Sequence[ParameterGroup | Mapping[str, Any]]:
        """Returns the groups of parameters with their own settings, and frozen ones. The first group that matches counts. A dict
        with the fields of `ParameterGroup` will do."""
        return self.arguments.optimizer.groups

    def build_pruner(self) -> Pruner | None:
        """Returns what changes the parameters around each step, such as an object with masks; None: nothing does. Default:
        `pruning.pruner`, which gets the arguments, or pruning by magnitude (`pruning.pattern`)."""
        return self.design.build_pruner()

    @cached_property
    def scheduler(self) -> optax.Schedule:
        """The learning rate by step."""
        config, max_steps = self.arguments.optimizer, self.arguments.max_num_steps
        return build_schedule(config.schedule, config.learning_rate, max_steps or self.design.batches_of_epochs)

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The update rule of the parameters that are trained."""
        design = self.design
        return build_grouped(self.arguments.optimizer, self.scheduler, design.parameter_kinds, design.groups)

    def configure_model(self) -> TrainerConfigureModelOutput:
        """Returns (the parts of the model, the shapes of the state). Touches no device. May be called by hand: `model` is there
        from then on. A leaf of the state that is an array, and no shape, is what a new run begins with (`initial_state`)."""
        check_overrides(type(self.task), INSTEAD_OF_A_TASK_METHOD, CALLED_OF_A_TASK)
        return self.design.configure()

    # ------------------------------------------------------------------ called once the devices are there

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        """Returns the jitted train and eval steps (state donated, shardings pinned in and out), the mesh, and the checkpoint
        manager. May be called by hand: `functions` is there from then on, and `model`."""
        return configure_functions(self)

    def build_checkpoint_manager(self) -> CheckpointManagerProtocol:
        """Returns what saves and restores the state of the run."""
        return build_checkpoint_manager(self)

    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput:
        """Returns what the loop and the evaluations read. Raises UsageError if there is no training data."""
        return self.batching.configure_loaders()

    def build_validation_units(self) -> Mapping[str, ValidationUnit]:
        """Returns the validation units in the order of their evaluation. Their names begin the names of their metrics. Default:
        those of `evaluation.units`, or one for the held-out data. `trainers.trainer.evaluations.build_unit` makes a unit of
        a loader."""
        return build_units(self)

    def build_evaluation_metrics(self, unit_name: str) -> EvaluationMetrics | None:
        """Returns new metrics of the task's predictions for one evaluation of a unit; None: there are none. Default: those of
        `evaluation.units.NAME.metrics`, which get the arguments."""
        return build_metrics(self.arguments, unit_name)

    def build_early_stopper(self) -> Callable[[int, float], bool] | None:
        """Returns a function (step, score) -> whether to stop, which host 0 asks after each evaluation; None: there is none.
        Default: `evaluation.score.early_stopper`. It is used only with `evaluation.score`."""
        score = self.arguments.evaluation.score
        return None if score is None or score.early_stopper is None else load_object(score.early_stopper)

    # ------------------------------------------------------------------ before a step

    def on_training_start(self, state: TrainState) -> TrainState:
        """Called before the first step of this process, also after a restore, and when a rollback goes back to the beginning of
        the run."""
        return state

    def on_epoch_begin(self, state: TrainState, epoch: int) -> TrainState:
        """Called before the first batch of an epoch (counted from 0). Not called again when a run continues in mid-epoch."""
        return state

    def preprocess_batch(self, batch: dict[str, np.ndarray], batch_index: int) -> Any:
        """Called on the host, in the threads that read ahead, with rows of one global batch (leaves [rows, ...]), for training
        or evaluation. Returns a batch of as many rows, or (batch, metrics). Metrics are numbers, or arrays [rows]; they are
        published as means over all rows.

        It must be a pure function that treats each row by itself: which rows are passed together depends on the devices.
        """
        return batch

    def on_step_start(self, state: TrainState, step: int) -> TrainState:
        """Called before each step. `step` is the index of its batch."""
        return state

    def prepare_batch(self, state: TrainState, batch: Batch, *, training: bool) -> Any:
        """Called between steps, before each train step and each batch of an evaluation, with the present state and the batch on
        the devices: global arrays [accumulation_steps, rows, ...] ([1, rows, ...] in an evaluation), rows sharded over the
        replicas. Returns the batch, with leaves changed or added: rollouts, log-probabilities of a reference, logits of a
        teacher. A leaf may also be a NumPy array of the whole global batch, equal on all hosts. It may also return (batch,
        metrics): numbers, scalars on the devices, or arrays [accumulation_steps, rows], published as means over the rows.

        Use jitted functions: then nothing waits for the device. It must not keep arrays of `state`, which the step donates.
        All random numbers must come from `state.batch_index` (`trainers.step.rng.key`): a resumed run calls it again.
        `mesh` and `state_shardings` of the trainer say where arrays lie.
        """
        return batch

    def prepared_shapes(self, shapes: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of what `prepare_batch` makes of a batch of these shapes ([micro-batches, rows, ...]). Need not be
        overridden if `prepare_batch` can be traced. Must touch no device."""
        return shapes

    # ------------------------------------------------------------------ in the compiled step: pure functions, which are traced

    def preforward(self, batch: Batch) -> Batch:
        """Returns the micro-batch that is passed to the loss."""
        return batch

    def postforward(self, loss: Loss, batch: Batch) -> Loss:
        """Returns the loss of a micro-batch (sums over its targets), before it is differentiated."""
        return loss

    def forward_backward(self, objective: Any, params: Any, batch: Batch) -> tuple[tuple[jax.Array, Loss], Any]:
        """Returns ((value, loss), gradients) of a micro-batch, as `jax.value_and_grad(objective, has_aux=True)(params, batch)`
        does. `objective` may be called several times, with other parameters, too. The gradients are sums over the targets of
        the micro-batch: so they add up to those of the global batch. A frozen parameter is None in `params`."""
        return jax.value_and_grad(objective, has_aux=True)(params, batch)

    def on_micro_step(self, loss: Loss, gradients: Any, batch: Batch) -> tuple[Loss, Any]:
        """Returns the loss and the gradients of a micro-batch (sums over its targets), before they are accumulated. A frozen
        parameter has None in place of a gradient."""
        return loss, gradients

    # ------------------------------------------------------------------ after a step

    def on_step_end(self, state: TrainState, metrics: Metrics, step: int) -> tuple[TrainState, Metrics]:
        """Called after each step. `step` is the number of batches drawn, `metrics` are those of this step by name. Entries that
        are replaced or added (numbers, or scalars on the device) are published as means over the steps of the interval; entries
        that are removed are not published."""
        return state, metrics

    def on_epoch_end(self, state: TrainState, epoch: int) -> TrainState:
        """Called after the last batch that begins in this epoch."""
        return state

    def on_evaluation_start(self, state: TrainState) -> TrainState:
        """Called for each validation unit, like `on_evaluation_end`. To change what one unit measures, override `evaluate`,
        which gets its name."""
        return state

    def calculate_metrics(self, metrics: Metrics, unit: str) -> Metrics:
        """Called with the metrics of a validation unit before `on_evaluation_end`, in training and outside of it. Returns the
        metrics, to which it may add. Metrics of single examples: `build_evaluation_metrics`."""
        return metrics

    def on_evaluation_end(self, state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
        return state, metrics

    def on_training_end(self, state: TrainState) -> TrainState:
        """Called after the last step, before the state is saved, whatever ended training except an error."""
        return state

    # ------------------------------------------------------------------ what there is

    @cached_property
    def placement(self) -> Placement:
        """The devices of the run, and where the arrays of the design lie on them. Touches the devices."""
        self.arguments.check_devices(jax.device_count())
        return Placement(self.arguments, self.design, make_mesh(self.arguments.mesh))

    @property
    def _model_state(self) -> TrainState:
        """The current state, after `train` and where callbacks may read it; elsewhere its shapes, after `configure_model`."""
        current = self.info.shown_state or self.state
        return current or configured(self, self.design.made, "_model_state", "configure_model").state

    @property
    @shows("configure_model")
    def model(self) -> ModelParts:
        """The parts of the model, after `configure_model`."""
        return self.design.model

    @property
    @shows("configure_functions")
    def functions(self) -> TrainerConfigureFunctionOutput:
        """The compiled steps and the checkpoint manager, after `configure_functions`."""
        built = self.built
        made = built.functions if built.steps is None else built.steps.functions
        return configured(self, made, "functions", "configure_functions")

    @property
    @shows("configure_dataloaders")
    def dataloaders(self) -> TrainerConfigureDataloaderOutput:
        """The loaders, after `configure_dataloaders`."""
        return configured(self, self.batching.kept_loaders, "dataloaders", "configure_dataloaders")

    @property
    @shows("configure_functions")
    def mesh(self) -> Mesh:
        """The devices of the run. Touches them."""
        return self.placement.mesh

    @property
    @shows("configure_model")
    def state_shardings(self) -> TrainState:
        """The sharding of each array of the state, after `configure_model`."""
        return self.placement.state_shardings

    @property
    @shows("configure_model")
    def frozen(self) -> Mapping[str, Any]:
        """The frozen weights on the devices, in nested dicts, by their names: those of `frozen`, and `base` with `lora`. They are
        read now, if they were not: all hosts must call this alike."""
        return {} if self.placement.frozen is None else self.placement.frozen.arrays[0]

    def initial_state(self) -> TrainState:
        """Returns the state at step 0, on the devices: parameters from the seed, and a new optimizer state. `configure_model` of
        a subclass may call it after that of its base class, and return it with other arrays. All hosts must call this."""
        first = jax.jit(self.design.initial_state, out_shardings=self.state_shardings)
        return first({}, self.placement.values_of_base())

    def copy_for_tracing(self, model: TrainerConfigureModelOutput) -> BaseTrainer:
        """Returns a copy in which `prepare_batch` is traced: whatever the hook keeps on it meanwhile (a teacher, made at its
        first use) is no real array. `model`: what `configure_model` has returned.

        Its mesh has axes of size 1: a standby, or a plan, does not know the devices, and no shape depends on their number."""
        axes = tuple(field.name for field in dataclasses.fields(self.arguments.mesh))
        mesh: Any = AbstractMesh((1,) * len(axes), axes, axis_types=(AxisType.Auto,) * len(axes))
        trial = copy.copy(self)
        trial.design = self.design.around(model)
        trial.placement = Placement(self.arguments, trial.design, mesh)
        return trial


def with_own_parameters(arguments: TrainingArguments) -> TrainingArguments:
    """Returns the arguments with `init_from.exclude` for what the task has beside a decoder, such as a head that gives scores:
    its class names such parameters in `own_parameters`, as patterns. A folder of Hugging Face has none of them."""
    config = arguments.init_from
    if config is None or not is_there(config.path):
        return arguments
    own = getattr(load_object(arguments.task), "own_parameters", ())
    exclude = (*config.exclude, *(pattern for pattern in own if pattern not in config.exclude))
    return dataclasses.replace(arguments, init_from=dataclasses.replace(config, exclude=exclude))
