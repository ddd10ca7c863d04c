"""Builds the parts of a trainer: the part of `BaseTrainer` to replace piece by piece. Touches no device by itself."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from trainers import runtime
from trainers.callbacks import Callback, CallbackList, RunInfo
from trainers.callbacks.profiler import Profiler
from trainers.checkpoint import assets, carried, readers
from trainers.checkpoint.of_run import manager_of
from trainers.config import UnitConfig
from trainers.config.arguments import TrainingArguments, load_object
from trainers.config.frozen import BASE
from trainers.data.iterated_loader import first_rows
from trainers.data.loader import RandomAccess, StepAddressedLoader
from trainers.data.sources.iterable import num_examples, random_access
from trainers.data.sources.sequence import held_out_examples
from trainers.errors import UsageError
from trainers.evaluation import score_metrics
from trainers.evaluation.exact_match import ExactMatch, questions, task_of_unit
from trainers.evaluation.previews import Previews, can_generate
from trainers.evaluation.unit_builder import UnitBuilder
from trainers.evaluation.validation import DEFAULT_UNIT, ValidationUnit, shapes_of_rows
from trainers.loop.beginning import with_types_of
from trainers.loop.frozen import FrozenWeights, Source
from trainers.loop.inflight import Flags
from trainers.loop.lineage import Lineage
from trainers.metrics.accumulator import Layout, MetricSums
from trainers.model_builder import ModelBuilder
from trainers.models.hf.pretrained import is_there, resolved
from trainers.optim.param_groups import parameter_paths
from trainers.other_systems import INSTEAD_OF_A_METHOD
from trainers.overrides import check_attributes, check_overrides
from trainers.parallel import mesh as meshes
from trainers.protocol import (
    Batch,
    CheckpointManagerProtocol,
    EvaluationMetrics,
    Task,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
    TrainerOutput,
)
from trainers.runtime import distributed
from trainers.runtime.executables import Program, ProgramStore
from trainers.step import adapted
from trainers.step.by_hand import StepProgram, eval_by_hand, train_by_hand
from trainers.step.loss import LossFunction
from trainers.step.state import (
    num_parameters,
)
from trainers.step.train_step import EVALUATION_COUNTS, StepOutput, make_train_step


class Builder(ModelBuilder):
    """Builds each part of a trainer. A subclass may replace every `configure_*`, `build_*` and property by itself. Building
    touches no device."""

    names_are_final = True
    """Whether the task is known when the trainer is built, and with it the names of its metrics."""

    def __init__(
        self,
        arguments: TrainingArguments,
        dataset_train: RandomAccess | None = None,
        dataset_eval: RandomAccess | None = None,
        *,
        callbacks: tuple[Callback, ...] = (),
    ):
        check_overrides(type(self), INSTEAD_OF_A_METHOD)
        self.arguments = arguments = with_own_parameters(resolved(arguments))
        self.dataset_train = dataset_train
        self.dataset_eval = dataset_eval
        self.callbacks = CallbackList()
        for callback in (Profiler(arguments.profile, os.path.join(self._run_folder, arguments.profile.folder)), *callbacks):
            self.callbacks.add(callback)
        self.output: TrainerOutput | None = None
        self.info = RunInfo(max_steps=arguments.max_num_steps)
        self.lineage = Lineage()
        self._is_prepared = False
        self._functions: TrainerConfigureFunctionOutput | None = None
        self._dataloaders: TrainerConfigureDataloaderOutput | None = None
        self._given_loaders: TrainerConfigureDataloaderOutput | None = None
        self._validation_units: Mapping[str, ValidationUnit] | None = None
        self.has_own_step = False
        self._saved: collections.deque[tuple[int, str]] = collections.deque()
        if self.overrides("prepare_batch"):
            # Its programs need not depend on the step's, nor on each other.
            distributed.let_cpus_run_one_program_at_a_time()
        # Before the datasets are wrapped: a subclass sets here what its transforms need.
        self.post_init()
        check_attributes(self)
        own = assets.named(self.build_model_assets())
        self.model_assets = {**carried.of(arguments, self._run_folder), **carried.labels_of(dataset_train), **own}
        """The files of Hugging Face that the run began with, and what `build_model_assets` has returned, by name."""
        if dataset_train is not None:
            self.dataset_train = self.collated(random_access(dataset_train, arguments, self._note_from_host0))
        if dataset_eval is not None:
            self.dataset_eval = self.collated(held_out_examples(dataset_eval, num_examples(dataset_train) or 0))
        if self.names_are_final and dataset_train is not None:
            score_metrics.check_when_built(self)

    # ------------------------------------------------------------------ what a subclass may replace

    def post_init(self) -> None:
        """Called before anything is built from the data; must not touch a device."""

    def build_model_assets(self) -> Mapping[str, Any] | Sequence[Any]:
        """Returns what belongs to the model beside its arrays, such as a tokenizer, by name or as a list: text, bytes, JSON
        values, or objects with `save_pretrained(folder)` or `save(folder)`. Called once on every host, before
        `build_data_transform`; must not touch a device. The run's folder, `save_pretrained` and every export get it."""
        return {}

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        """Returns the jitted train and eval steps (state donated, shardings pinned in and out), the mesh, and the checkpoint
        manager. May be called by hand: `functions` is there from then on, and `model`."""
        self.prepare()
        train_step = self._program("train_step", self._jit_train_step(self._traced_step()))
        self._functions = TrainerConfigureFunctionOutput(
            train_step, self._eval_step(), self._mesh, self.build_checkpoint_manager()
        )
        return self._with_calls_by_hand(self._functions)

    def _eval_step(self) -> Program:
        return self._program("eval_step", self._unit_builder.jit(self.eval_loss_function, self.loss_layout))

    def _program(self, name: str, jitted: Any) -> Program:
        return StepProgram(name, jitted, self._programs, runtime.current().note, self._frozen)

    def _with_calls_by_hand(self, functions: TrainerConfigureFunctionOutput) -> TrainerConfigureFunctionOutput:
        """Returns the functions, whose steps may then also be called with (state, batch)."""
        train, evaluate, layout = functions.train_step_fn, functions.eval_step_fn, self.step_layout
        if isinstance(train, StepProgram):
            train.by_hand = train_by_hand(layout, lambda: self._zeros(layout), Flags(self._mesh).array)
        if isinstance(evaluate, StepProgram):
            counting = self.loss_layout.with_others(EVALUATION_COUNTS)
            evaluate.by_hand = eval_by_hand(counting, lambda: self._zeros(counting))
        return functions

    def build_checkpoint_manager(self) -> CheckpointManagerProtocol:
        """Returns what saves and restores the state of the run."""
        return manager_of(self.arguments, self._run_folder, self._mesh, self._programs, self._report_saved)

    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput:
        if self.dataset_train is None:
            raise UsageError("there is no training data: give dataset_train, or override configure_dataloaders")
        size, mesh = self.arguments.global_batch_size, self._mesh
        steps, preprocess = self.arguments.accumulation_steps, self._preprocess
        train = StepAddressedLoader(
            self.dataset_train,
            size,
            mesh,
            accumulation_steps=steps,
            preprocess=preprocess,
            read=self._reader(self.dataset_train),
            collator=self._collator,
        )
        held_out = self._held_out_loader(self.dataset_eval) if self.dataset_eval is not None and len(self.dataset_eval) else None
        self._dataloaders = TrainerConfigureDataloaderOutput(train, held_out)
        return self._dataloaders

    def build_validation_units(self) -> Mapping[str, ValidationUnit]:
        """Returns the validation units in the order of their evaluation. Their names begin the names of their metrics. Default:
        those of `evaluation.units`, or one for the held-out data."""
        config, loader = self.arguments.evaluation, self.dataloaders.dataloader_eval
        units = config.units or ({} if loader is None else {DEFAULT_UNIT: UnitConfig()})
        return {name: self._build_unit(name, unit) for name, unit in units.items()}

    def build_evaluation_metrics(self, unit_name: str) -> EvaluationMetrics | None:
        """Returns new metrics of the task's predictions for one evaluation of a unit; None: there are none. Default: those of
        `evaluation.units.NAME.metrics`, which get the arguments."""
        unit = self.arguments.evaluation.units.get(unit_name)
        if unit is not None and unit.exact_match is not None:
            return ExactMatch(self.arguments, unit.exact_match)
        return None if unit is None or unit.metrics is None else load_object(unit.metrics)(self.arguments)

    def build_early_stopper(self) -> Callable[[int, float], bool] | None:
        """Returns a function (step, score) -> whether to stop, which host 0 asks after each evaluation; None: there is none.
        Default: `evaluation.score.early_stopper`. It is used only with `evaluation.score`."""
        score = self.arguments.evaluation.score
        return None if score is None or score.early_stopper is None else load_object(score.early_stopper)

    # ------------------------------------------------------------------ what there is, once configured

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
    def mesh(self) -> Mesh:
        """The devices of the run. Touches them."""
        return self._mesh

    @property
    def frozen(self) -> Mapping[str, Any]:
        """The frozen weights on the devices, in nested dicts, by their names: those of `frozen`, and `base` with `lora`. They are
        read now, if they were not: all hosts must call this alike."""
        return {} if self._frozen is None else self._frozen.arrays[0]

    @cached_property
    def previews(self) -> Previews | None:
        """The previews; None if there are no prompts, or the task cannot generate."""
        config, task = self.arguments.previews, self.task
        if can_generate(task) and config.prompts:
            programs, seed = self._programs, self.arguments.seed
            return Previews.of(task, self.model.merge, config, self._mesh, seed, programs, self._frozen)
        if config.prompts and config.every_steps is not None:
            raise UsageError(f"previews.every_steps = {config.every_steps}: {type(task).__name__} has no encode and decode")
        return None

    def validation_unit(self, name: str, loader: Any, task: Task | None = None, max_batches: int | None = None) -> ValidationUnit:
        """Returns a unit for `build_validation_units`: the data that `loader` reads (see `ValidationUnit`), measured by the
        loss of `task` (default: the one that is trained) with the parameters that are trained. All hosts must call this."""
        function = self.eval_loss_function if task is None else dataclasses.replace(self.eval_loss_function, task=task)
        limit = max_batches or self.arguments.evaluation.max_batches
        return self._unit_builder.unit(name, loader, function, limit, self.build_evaluation_metrics)

    def add_callback(self, callback: Callback) -> None:
        self.callbacks.add(callback)

    # ------------------------------------------------------------------ inside

    def _rows_of_loader(self) -> dict[str, np.ndarray]:
        # Kept for the loop: a second one might go on where this one is.
        self._given_loaders = self._given_loaders or self.configure_dataloaders()
        return first_rows(self._given_loaders.dataloader_train)

    def _configure(self) -> None:
        self.prepare()
        if self._functions is None:
            self._functions = self.configure_functions()
        self._functions = self._with_calls_by_hand(self._with_adapted_steps(self._completed(self._functions)))
        if self._dataloaders is None:
            self._dataloaders = self._as_loaders(self._given_loaders or self.configure_dataloaders())
        if self._validation_units is None:
            self._validation_units = self.build_validation_units()
        _ = self.previews

    def prepare(self) -> None:
        """Does everything that needs no device. Optional: `train` does what was not done."""
        if not self._is_prepared:
            # Also after a call by hand: a subclass's own keeps nothing itself, and its result may have arrays.
            if self._model is None or type(self).configure_model is not ModelBuilder.configure_model:
                made = self.configure_model()
                own = None if self._model is None else self._model.state
                self._model = TrainerConfigureModelOutput(made.model, with_types_of(own, made.state))
            _ = self.loss_layout, self._unit_datasets
            # Once: each evaluation comes here, and the check asks for a user's metrics.
            score_metrics.check(self)
            self._is_prepared = True

    @cached_property
    def _unit_datasets(self) -> dict[str, RandomAccess]:
        """The datasets of the validation units that have their own."""
        units = self.arguments.evaluation.units
        with_dataset = {name: unit.dataset for name, unit in units.items() if unit.dataset is not None}
        # The ids of their samples are their own: no training sample is among them.
        made = {name: load_object(path)(self.arguments) for name, path in with_dataset.items()}
        asking = {name: unit.exact_match for name, unit in units.items() if unit.exact_match is not None}
        made |= {name: questions(config, self.arguments) for name, config in asking.items()}
        return {name: self.collated(held_out_examples(examples, 0)) for name, examples in made.items()}

    def _build_unit(self, name: str, config: UnitConfig) -> ValidationUnit:
        max_batches = config.max_batches or self.arguments.evaluation.max_batches
        loader = self.dataloaders.dataloader_eval
        if name in self._unit_datasets:
            loader = self._held_out_loader(self._unit_datasets[name], config.batch_size)
        elif loader is None:
            raise UsageError(f"evaluation.units.{name}: there is no held-out data; set its dataset, or data.eval_fraction")
        elif config.batch_size is not None:
            # With a program of its own below: one for several shapes would be compiled again at each change.
            loader = self._held_out_loader(self._eval_dataset(name), config.batch_size)
        elif config.task is None and self.build_evaluation_metrics(name) is None:
            step, layout = self.functions.eval_step_fn, self.loss_layout
            return self._unit_builder.around(loader, step, layout, self.eval_loss_function, max_batches, name)
        return self.validation_unit(name, loader, task_of_unit(config, self.arguments), max_batches)

    def _eval_dataset(self, unit: str) -> RandomAccess:
        if self.dataset_eval is None:
            raise UsageError(f"evaluation.units.{unit}.batch_size: there is no dataset_eval to read; set the unit's dataset")
        return self.dataset_eval

    @cached_property
    def _unit_builder(self) -> UnitBuilder:
        params = self._model_state.params

        def layout_of(function: LossFunction, batch: Batch) -> Layout:
            shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in batch.items()}
            rows = shapes_of_rows(self._prepared_shapes(shapes, self._configured(self._model, "model", "configure_model")))
            return self._traced(function, params, rows)

        shardings, prepare = self._state_shardings, self._prepare_held_out
        flops = partial(self._flops_per_token, trained=num_parameters(params))
        return UnitBuilder(self._mesh, shardings, self._programs, layout_of, prepare, flops, self._frozen)

    def _completed(self, functions: Any) -> TrainerConfigureFunctionOutput:
        """Returns what `configure_functions` has returned, with what it left out. Raises UsageError for what cannot be used."""
        if not isinstance(functions, TrainerConfigureFunctionOutput):
            raise UsageError(
                f"configure_functions returned {type(functions).__name__}: expected a trainers.protocol."
                "TrainerConfigureFunctionOutput(train_step_fn=..., eval_step_fn=...)"
            )
        if functions.train_step_fn is None:
            raise UsageError("configure_functions returned no train_step_fn: return super().configure_functions()._replace(...)")
        if functions.mesh not in (None, self._mesh):
            raise UsageError(
                f"configure_functions returned a mesh of its own ({dict(functions.mesh.shape)}): the settings have "
                f"{dict(self._mesh.shape)}; set the section mesh, and leave it out here"
            )
        return TrainerConfigureFunctionOutput(
            functions.train_step_fn,
            self._eval_step() if functions.eval_step_fn is None else functions.eval_step_fn,
            self._mesh,
            self.build_checkpoint_manager() if functions.checkpoint_manager is None else functions.checkpoint_manager,
        )

    def _with_adapted_steps(self, functions: TrainerConfigureFunctionOutput) -> TrainerConfigureFunctionOutput:
        """Returns the functions, with steps (state, batch) of a user's own as those that the loop calls."""
        train, evaluate = functions.train_step_fn, functions.eval_step_fn
        if hasattr(train, "prepare") and hasattr(evaluate, "prepare"):
            return functions
        state = self._model_state
        model = TrainerConfigureModelOutput(self.model, state)
        if not hasattr(train, "prepare"):
            adapted.check_settings(self.arguments, prunes=self.pruner is not None)
            shapes = self._batch_shapes((1, meshes.padded_rows(self._mesh, self.arguments.global_batch_size)), model)
            layout = vars(self)["step_layout"] = adapted.train_layout(train, state, shapes)
            self.has_own_step = True
            step = adapted.adapted_train_step(train, layout, self.arguments, self.scheduler, self.task.tokens_per_example)
            train = self._program("train_step", self._jit_train_step(step))
        if not hasattr(evaluate, "prepare"):
            rows = self._batch_shapes((1, meshes.padded_rows(self._mesh, self.arguments.micro_batch_size)), model)
            layout = vars(self)["loss_layout"] = adapted.eval_layout(evaluate, state, rows)
            step = self._unit_builder.jit_step(adapted.adapted_eval_step(evaluate, layout.with_others(EVALUATION_COUNTS)))
            evaluate = self._program("eval_step", step)
        return functions._replace(train_step_fn=train, eval_step_fn=evaluate)

    def _traced_step(self) -> Any:
        return make_train_step(
            self.loss_function,
            self.step_layout,
            self._update_rule,
            self.scheduler,
            self.arguments,
            self.on_micro_step if self.overrides("on_micro_step") else None,
            self.param_groups,
            self.forward_backward if self.overrides("forward_backward") else None,
            self.pruner,
        )

    @property
    def _micro_batches_shape(self) -> tuple[int, int]:
        """The micro-batches of a step, and the rows of each."""
        return self.arguments.accumulation_steps, meshes.padded_rows(self._mesh, self.arguments.micro_batch_size)

    def _jit_train_step(self, step: Any) -> Any:
        shardings, replicated = self._state_shardings, meshes.replicated(self._mesh)
        batch_sharding = meshes.micro_batches(self._mesh)
        return jax.jit(
            meshes.tracing_for(self._mesh, step),
            in_shardings=(shardings, replicated, batch_sharding, meshes.one_per_device(self._mesh), *self._frozen_shardings),
            # Pinned: XLA may choose other shardings for outputs, and the next step would be compiled again for them.
            out_shardings=StepOutput(shardings, replicated, replicated, replicated, replicated),  # type: ignore[arg-type]
            # State and sums are donated: so the step needs room for one state and not for two.
            donate_argnums=(0, 1),
        )

    @cached_property
    def _frozen(self) -> FrozenWeights | None:
        """What reads the frozen weights, and binds them to the compiled programs; None: there are none."""
        sources = {
            name: Source(model.path, model.asked_by, model.placed(self._mesh)) for name, model in self._frozen_models.items()
        }
        return FrozenWeights(sources, self._run_folder, self._programs, runtime.current().note) if sources else None

    def _of_base(self) -> dict[str, jax.Array]:
        if self.arguments.lora is None or not self.arguments.lora.whole:
            return {}
        trained = parameter_paths(self._model_state.params)
        base = dict(zip(parameter_paths(self.frozen[BASE]), jax.tree.leaves(self.frozen[BASE]), strict=True))
        return {name: base[name] for name in trained if name in base}

    @property
    def _frozen_shardings(self) -> tuple[Any, ...]:
        """The shardings of what `_frozen` adds to the arguments of a program."""
        return () if self._frozen is None else jax.tree.map(lambda leaf: leaf.sharding, self._frozen.shapes)

    def _zeros(self, layout: Layout) -> MetricSums:
        return meshes.put_everywhere(self._mesh, layout.zeros())

    def _report_saved(self, step: int, path: str) -> None:
        """Called on the thread that saves: the queue hands the checkpoint to the callbacks, which run on the main thread."""
        readers.begin(path)  # until `on_save` has returned: a callback may want to read it
        self._saved.append((step, path))

    @property
    def _run_folder(self) -> str:
        return f"{self.arguments.storage}/{self.arguments.name}"

    @cached_property
    def _programs(self) -> ProgramStore:
        key, folder = runtime.current().program_key, distributed.program_folder()
        # All that a program is made from: one of other settings must not be found.
        origin = (key, dataclasses.asdict(self.arguments), jax.process_count(), jax.__version__)
        limit_gb = self.arguments.kept_programs_gb
        max_bytes = None if limit_gb is None else limit_gb * 1e9
        return ProgramStore(folder if key else None, origin, runtime.current().note, max_bytes)


def with_own_parameters(arguments: TrainingArguments) -> TrainingArguments:
    """Returns the arguments with `init_from.exclude` for what the task has beside a decoder, such as a head that gives scores:
    its class names such parameters in `own_parameters`, as patterns. A folder of Hugging Face has none of them."""
    config = arguments.init_from
    if config is None or not is_there(config.path):
        return arguments
    own = getattr(load_object(arguments.task), "own_parameters", ())
    exclude = (*config.exclude, *(pattern for pattern in own if pattern not in config.exclude))
    return dataclasses.replace(arguments, init_from=dataclasses.replace(config, exclude=exclude))
