"""The model of a trainer, its loss, its optimizer and the shapes of its state. Touches no device by itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax

from trainers.batches import BatchBuilder
from trainers.callbacks import RunInfo
from trainers.checkpoint.weights import Adapted
from trainers.config import ParameterGroup
from trainers.config.arguments import load_object
from trainers.config.frozen import BASE
from trainers.errors import NotConfiguredError, UsageError
from trainers.evaluation.validation import shapes_of_rows
from trainers.metrics.accumulator import Kind, Layout
from trainers.optim import param_groups, pruning
from trainers.optim.optimizers import SCHEDULE_FREE, build_grouped, parameters_to_evaluate
from trainers.optim.param_groups import parameter_paths
from trainers.optim.parameter_kinds import Kinds, KindsOnDemand
from trainers.optim.precision import check_averages, in_float32
from trainers.optim.schedules import build_schedule
from trainers.protocol import (
    Pruner,
    Task,
    TrainerConfigureModelOutput,
)
from trainers.step import frozen
from trainers.step.frozen import FrozenModel
from trainers.step.loss import LossFunction, takes
from trainers.step.loss_scale import initial_scaler
from trainers.step.state import (
    ModelParts,
    TrainState,
    abstract_model,
    arrays_of_model,
    initial_model,
    state_from_parameters,
    state_shardings,
    with_loaded,
    with_shardings,
)
from trainers.step.train_step import step_metrics


class ModelBuilder(BatchBuilder):
    """Builds the model, and what is computed of it in a step. A subclass may replace `configure_model`, every `build_*` and every
    property by itself."""

    info: RunInfo
    _model: TrainerConfigureModelOutput | None = None
    _layout: Layout | None = None
    _state: TrainState | None = None

    # ------------------------------------------------------------------ what a subclass may replace

    def configure_model(self) -> TrainerConfigureModelOutput:
        """Returns (the parts of the model, the shapes of the state). Touches no device. May be called by hand: `model` is there
        from then on. A leaf of the state that is an array, and no shape, is what a new run begins with (`initial_state`)."""
        parts, params, self._axes = self._abstract_model
        frozen.check_use(self.task, self.arguments, prepares=self.overrides("prepare_batch"))
        trained = param_groups.trainable(self.param_groups, params)
        if self.arguments.optimizer.name == SCHEDULE_FREE:
            check_averages(trained)
        if self.pruner is not None:  # before the shapes of a state, of which its own is a part
            pruning.check_pruner(self.pruner, trained)
        # Without data (as in an export) only the shapes of the state are needed.
        self._state_axes = parts.state_axes
        layout = self._step_layout_of(parts, params) if self.dataset_train is not None else Layout((), ())
        self._layout = layout  # kept: tracing the loss takes a while
        param_groups.check(self.param_groups, params)
        pruning.check(self.arguments.pruning, trained)
        self._model = TrainerConfigureModelOutput(parts, self._abstract_state(parts, params, layout))
        return self._model

    @cached_property
    def task(self) -> Task:
        return load_object(self.arguments.task)(self.arguments)

    @cached_property
    def scheduler(self) -> optax.Schedule:
        """The learning rate by step."""
        config = self.arguments.optimizer
        return build_schedule(config.schedule, config.learning_rate, self.arguments.max_num_steps or self._batches_of_epochs)

    @property
    def _batches_of_epochs(self) -> int | None:
        """The number of batches in `max_num_data_epochs`; None without it, or if the data has no length."""
        epochs, num_samples = self.arguments.max_num_data_epochs, len(self.dataset_train or ())
        if epochs is None or not num_samples:
            return None
        # Rounded up: the last samples of the epochs count, though their batch also has some of the next epoch.
        return math.ceil(epochs * num_samples / self.arguments.global_batch_size)

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return build_grouped(self.arguments.optimizer, self.scheduler, self.parameter_kinds, self.param_groups)

    @property
    def parameter_kinds(self) -> Kinds:
        """What the parameters are to an optimizer, by name: `trainers.optim.optimizers.build_optimizer` takes it."""
        return KindsOnDemand(lambda: self._abstract_model[0].kinds)

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
        config = self.arguments.pruning
        if config.pruner is not None:
            return load_object(config.pruner)(self.arguments)
        return None if config.pattern is None else pruning.Magnitude(config)

    # ------------------------------------------------------------------ what there is, once configured

    @property
    def model(self) -> ModelParts:
        return self._configured(self._model, "model", "configure_model").model

    @property
    def _model_state(self) -> TrainState:
        """The current state, after `train` and where callbacks may read it (`RunInfo.train_state`); elsewhere its shapes."""
        return self.info.shown_state or self._state or self._configured(self._model, "_model_state", "configure_model").state

    @property
    def state_shardings(self) -> TrainState:
        """The sharding of each array of the state."""
        return self._state_shardings

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
    def eval_loss_function(self) -> LossFunction:
        """The loss with the model in evaluation mode."""
        return dataclasses.replace(self.loss_function, training=False)

    @cached_property
    def loss_layout(self) -> Layout:
        """The layout of the metrics of the task's loss in an evaluation."""
        if takes(self.task, "training"):  # its parts may be others than in training
            model = TrainerConfigureModelOutput(self.model, self._model_state)
            return self._traced(self.eval_loss_function, model.state.params, self._rows(model))
        names = len(self.step_layout) - len(step_metrics(self._model_state.params, self.arguments, self.param_groups))
        step = self.step_layout
        # The metrics of the loss come first.
        return dataclasses.replace(step, names=step.names[:names], kinds=step.kinds[:names], means=())

    @cached_property
    def step_layout(self) -> Layout:
        """The layout of the metrics of a train step: those of the loss, then those of the step."""
        model = self._configured(self._model, "step_layout", "configure_model")
        return self._layout or self._step_layout_of(self.model, model.state.params)

    @cached_property
    def param_groups(self) -> tuple[ParameterGroup, ...]:
        patterns = self.freeze_module()
        frozen = map(param_groups.frozen_group, [patterns] if isinstance(patterns, str) else patterns)
        return (*frozen, *map(param_groups.as_group, self.build_param_groups()))

    @cached_property
    def pruner(self) -> Pruner | None:
        """What `build_pruner` has returned. Raises UsageError with an optimizer that evaluates averages."""
        pruner = self.build_pruner()
        if pruner is not None and self.arguments.optimizer.name == SCHEDULE_FREE:
            raise UsageError(f"build_pruner: expected None with {SCHEDULE_FREE}, which averages zeros away")
        return pruner

    def parameters_to_evaluate(self, state: TrainState) -> Any:
        """Returns the parameters that are evaluated, previewed and exported: those of the state, or the averages that the
        optimizer keeps."""
        return parameters_to_evaluate(state.opt_state, state.params)

    def initial_state(self) -> TrainState:
        """Returns the state at step 0, on the devices: parameters from the seed, and a new optimizer state. `configure_model` of
        a subclass may call it after that of its base class, and return it with other arrays. All hosts must call this."""
        first = jax.jit(self._initial_state, out_shardings=self._state_shardings)
        return first({}, self._of_base())

    # ------------------------------------------------------------------ inside

    @cached_property
    def _abstract_model(self) -> tuple[ModelParts, Any, Any]:
        return abstract_model(self.task, self.arguments.seed, self.arguments.lora)

    @cached_property
    def _update_rule(self) -> optax.GradientTransformation:
        """The optimizer for the parameters that are not frozen."""
        # In float32 also where it is the user's own.
        return param_groups.freezing(in_float32(self.optimizer), self.param_groups)

    def _abstract_state(self, parts: ModelParts, params: Any, layout: Layout) -> TrainState:
        """Returns the shapes of a state. Shapes alone: a standby does this, which must touch no device."""
        return jax.eval_shape(partial(self._fresh_state, layout=layout), params, parts.state_shapes)

    def _fresh_state(self, params: Any, model_state: Any, layout: Layout) -> TrainState:
        """Returns the state at step 0 with these parameters and this other state of the model. Traced."""
        # Of trained parameters alone: neither the optimizer nor the pruner ever sees a frozen one.
        trained = param_groups.trainable(self.param_groups, params)
        pruner_state = {} if self.pruner is None else self.pruner.init(trained)
        return state_from_parameters(params, self._update_rule, layout, initial_scaler(self.arguments), model_state, pruner_state)

    def _initial_state(
        self, loaded: Mapping[str, jax.Array] = MappingProxyType({}), others: Mapping[str, jax.Array] = MappingProxyType({})
    ) -> TrainState:
        """Returns the state at step 0, with the model's arrays of `loaded` and `others`, by name, in place of its own. Traced."""
        loaded = {**loaded, **others}
        params, model_state = initial_model(self.task, self.arguments.seed, self.arguments.lora)
        return self._fresh_state(with_loaded(params, loaded), with_loaded(model_state, loaded), self.step_layout)

    @property
    def adapted(self) -> Adapted | None:
        """What says how an adapter of PEFT is read; None without LoRA."""
        lora = self.arguments.lora
        return None if lora is None else Adapted(self.arguments.model, lora)

    def _of_base(self) -> dict[str, jax.Array]:
        """Returns the base's own values of the parameters that are trained whole (`lora.whole`), by name, on the devices."""
        return {}

    @property
    def _model_arrays(self) -> Any:
        """The shapes of the parameters and of the model's other state, with shardings, as one tree."""
        shapes = with_shardings(self._model_state, self._state_shardings)
        return arrays_of_model(shapes.params, shapes.model_state)

    @cached_property
    def _state_shardings(self) -> TrainState:
        state = self._configured(self._model, "state", "configure_model").state
        return state_shardings(self._mesh, state, self._axes, self._state_axes)

    def _loss_function_of(self, parts: ModelParts) -> LossFunction:
        models = {name: model.parts for name, model in self._frozen_models.items()}
        sources = self.arguments.data.source_names
        return LossFunction(self.task, parts, self.preforward, self.postforward, sources, frozen_parts=models)

    @cached_property
    def _frozen_models(self) -> dict[str, FrozenModel]:
        return frozen.frozen_models(self.task, self.arguments)

    def _flops_per_token(self, task: Task, trained: int) -> float:
        """Returns the floating-point operations for a token, forward and backward. `trained`: how many parameters are."""
        if self.arguments.lora is None:
            return task.flops_per_token(trained)
        shapes = self._frozen_models[BASE].shapes
        sizes = dict(zip(parameter_paths(shapes), (math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)), strict=True))
        # What is trained whole is in both.
        base = sum(sizes.values()) - sum(sizes.get(name, 0) for name in parameter_paths(self._model_state.params))
        # Of three products for each weight, forward and backward, the base has two: no gradient of its weights is computed.
        of_base = task.flops_per_token(base)
        return of_base * 2 / 3 + task.flops_per_token(base + trained) - of_base

    def _step_layout_of(self, parts: ModelParts, params: Any) -> Layout:
        rows = self._rows(TrainerConfigureModelOutput(parts, self._abstract_state(parts, params, Layout((), ()))))
        layout = self._traced(
            self._loss_function_of(parts), params, rows, **step_metrics(params, self.arguments, self.param_groups)
        )
        return layout.with_means(self.arguments.metrics.running_means)

    def _rows(self, model: TrainerConfigureModelOutput) -> Mapping[str, Any]:
        """Returns the shapes of a micro-batch as they are passed to the loss."""
        return shapes_of_rows(self._batch_shapes((1, self.arguments.micro_batch_size), model))

    def _traced(self, function: LossFunction, params: Any, rows: Mapping[str, Any], **others: Kind) -> Layout:
        """Returns the layout of the metrics of a loss, and of others."""
        step = jax.ShapeDtypeStruct((), np.int32)

        def traced(params: Any, rows: Any, step: Any, model_state: Any, weights: Any) -> Any:
            return function.with_terms(params, rows, step, None, function.rest(model_state, rows, frozen=weights))

        weights = frozen.shapes_of(self._frozen_models)
        loss, terms = jax.eval_shape(traced, params, rows, step, function.parts.state_shapes, weights)
        return dataclasses.replace(
            Layout.of(loss, **others),
            # `postforward` may change the total: then it need not be the sum of the terms.
            terms=() if self.overrides("postforward") else tuple(terms),
            of_tokens=getattr(function.task, "has_perplexity", function.task.tokens_per_example > 1),
        )

    def _configured(self, value: Any, name: str, method: str) -> Any:
        if value is None:
            raise NotConfiguredError(
                f"{type(self).__name__}.{name} exists after {method}() only: call train() or {method}() first"
            )
        return value
