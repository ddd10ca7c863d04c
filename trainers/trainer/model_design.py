"""The model of a trainer, its loss, its optimizer and the shapes of its state: all that is known of them without a device."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

from gangway.errors import NotConfiguredError, UsageError
from trainers.checkpoint.weights import Adapted
from trainers.config import ParameterGroup, mesh
from trainers.config.arguments import load_object
from trainers.config.frozen import BASE
from trainers.evaluation.validation import shapes_of_rows
from trainers.loop.beginning import with_types_of
from trainers.loop.hooks import overrides
from trainers.loop.prepared_batch import Shapes
from trainers.metrics.accumulator import Kind, Layout
from trainers.models import layers
from trainers.optim import param_groups, pruning
from trainers.optim.optimizers import SCHEDULE_FREE, parameters_to_evaluate
from trainers.optim.param_groups import parameter_paths
from trainers.optim.parameter_kinds import Kinds, KindsOnDemand
from trainers.optim.precision import check_averages
from trainers.protocol import Pruner, Task, TrainerConfigureModelOutput
from trainers.step import divided, frozen
from trainers.step.frozen import FrozenModel
from trainers.step.loss import LossFunction, in_mode, takes
from trainers.step.loss_scale import initial_scaler
from trainers.step.state import (
    ModelParts,
    TrainState,
    abstract_model,
    initial_model,
    num_parameters,
    state_from_parameters,
    update_rule,
    with_loaded,
)
from trainers.step.train_step import StepSpec, make_train_step, step_metrics
from trainers.trainer.batching import Batching

if TYPE_CHECKING:  # it imports this module
    from trainers.trainer.base_trainer import BaseTrainer


class ModelDesign:
    """What a trainer's `task`, `optimizer`, `configure_model`, `build_*` and hooks make of its model. Each part is made once."""

    def __init__(self, trainer: BaseTrainer, batching: Batching):
        self._trainer, self._batching = trainer, batching
        self.made: TrainerConfigureModelOutput | None = None
        """What `configure_model` has returned; None before that."""
        self.axes: Any = None
        self.state_axes: Any = None
        """The names of the axes of the parameters, and of the model's other state, once `configure_model` was called."""
        self.traced_layout: Layout | None = None
        """The layout of the metrics of a step, where `configure_model` has found it already: tracing the loss takes a while."""

    # ------------------------------------------------------------------ the model

    def configure(self) -> TrainerConfigureModelOutput:
        """Does what `BaseTrainer.configure_model` does."""
        trainer, arguments = self._trainer, self._trainer.arguments
        parts, params, self.axes = self._abstract
        self._check_fp8(parts)
        frozen.check_use(trainer.task, arguments, prepares=overrides(trainer, "prepare_batch"))
        trained = param_groups.trainable(self.groups, params)
        if arguments.optimizer.name == SCHEDULE_FREE and arguments.optimizer.master_weights != "float32":
            check_averages(trained)
        if self.pruner is not None:  # before the shapes of a state, of which its own is a part
            pruning.check_pruner(self.pruner, trained)
        # Without data (as in an export) only the shapes of the state are needed.
        self.state_axes = parts.state_axes
        layout = self._step_layout_of(parts, params) if trainer.dataset_train is not None else Layout((), ())
        self.traced_layout = layout
        param_groups.check(self.groups, params)
        pruning.check(arguments.pruning, trained)
        self.made = TrainerConfigureModelOutput(parts, self._abstract_state(parts, params, layout))
        return self.made

    def prepare(self, *, is_own: bool) -> None:
        """Calls `configure_model`, if that was not done. `is_own`: whether a subclass has replaced it. Then it is called also if
        it was called by hand: it keeps nothing itself, and its result may have arrays."""
        if self.made is None or is_own:
            made = self._trainer.configure_model()
            own = None if self.made is None else self.made.state
            self._check_fp8(made.model)
            self.made = TrainerConfigureModelOutput(made.model, with_types_of(own, made.state))

    def _check_fp8(self, model: Any) -> None:
        """Raises UsageError if `model.fp8` asks for what this model does not have, or for what is not installed. What only
        evaluates or exports needs nothing."""
        asked = self._trainer.arguments.model.fp8
        if asked == "none":
            return
        if not getattr(model, "in_fp8", False):
            raise UsageError(
                f"model.fp8 = {asked!r}: only the layers of a trainers.models.decoder.Decoder with its own `hidden` multiply in "
                "8 bits, and the model of the task has none; set model.fp8 = none"
            )
        if self._trainer.dataset_train is not None:
            layers.of_qwix()  # raises if it is not installed

    def forget(self) -> None:
        """Lets `configure_model` be called again."""
        self.made = None

    def around(self, model: TrainerConfigureModelOutput) -> ModelDesign:
        """Returns this design with `model` as what `configure_model` has returned."""
        made = copy.copy(self)
        made.made = model
        return made

    @property
    def output(self) -> TrainerConfigureModelOutput:
        """What `configure_model` has returned. Raises NotConfiguredError."""
        return configured(self._trainer, self.made, "model", "configure_model")

    @property
    def task(self) -> Task:
        return self._trainer.task

    @property
    def model(self) -> ModelParts:
        return self.output.model

    @property
    def state(self) -> TrainState:
        """The shapes of a state; arrays where `configure_model` has returned some."""
        return self.output.state

    @property
    def parameter_kinds(self) -> Kinds:
        """What the parameters are to an optimizer, by name: `trainers.optim.optimizers.build_optimizer` takes it."""
        return KindsOnDemand(lambda: self._abstract[0].kinds)

    @property
    def batches_of_epochs(self) -> int | None:
        """The number of batches in `max_num_data_epochs`; None without it, or if the data has no length."""
        epochs, num_samples = self._trainer.arguments.max_num_data_epochs, len(self._trainer.dataset_train or ())
        if epochs is None or not num_samples:
            return None
        # Rounded up: the last samples of the epochs count, though their batch also has some of the next epoch.
        return math.ceil(epochs * num_samples / self._trainer.arguments.global_batch_size)

    def evaluated_parameters(self, state: TrainState) -> Any:
        """Returns the parameters that are evaluated, previewed and exported."""
        return evaluated_parameters(state)

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.state.params)

    @property
    def adapted(self) -> Adapted | None:
        """What says how an adapter of PEFT is read; None without LoRA."""
        arguments = self._trainer.arguments
        return None if arguments.lora is None else Adapted(arguments.model, arguments.lora)

    def check_mesh(self, sizes: Mapping[str, int]) -> None:
        """Raises UsageError for a mesh with these sizes of its axes, if one of the models cannot be divided over it."""
        frozen = {f"the model of {each.asked_by}": each.parts for each in self.frozen_models.values()}
        divided.check_models(sizes, {"the model of the task": self.model, **frozen})
        divided.check_experts(sizes, *self._named_arrays)

    def left_whole(self, sizes: Mapping[str, int]) -> list[str]:
        """Returns a line for each kind of dimension of the parameters that a mesh with these sizes shall divide and does not, and
        for what devices have in common for another reason."""
        models = [self.model, *(each.parts for each in self.frozen_models.values())]
        common = dict.fromkeys(line for model in models for line in mesh.in_common(model.shared, sizes))
        return [*divided.left_whole(sizes, *self._named_arrays), *common]

    @property
    def _named_arrays(self) -> list[tuple[Any, Any]]:
        """Returns (shapes, logical axes) of all that the models have."""
        of_frozen = [(each.shapes, each.axes) for each in self.frozen_models.values()]
        return [(self.state.params, self.axes), (self.state.model_state, self.state_axes), *of_frozen]

    @cached_property
    def frozen_models(self) -> dict[str, FrozenModel]:
        return frozen.frozen_models(self._trainer.task, self._trainer.arguments)

    def flops_per_token(self, task: Task, trained: int) -> float:
        """Returns the floating-point operations for a token, forward and backward. `trained`: how many parameters are."""
        if self._trainer.arguments.lora is None:
            return task.flops_per_token(trained)
        shapes = self.frozen_models[BASE].shapes
        sizes = dict(zip(parameter_paths(shapes), (math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)), strict=True))
        # What is trained whole is in both.
        base = sum(sizes.values()) - sum(sizes.get(name, 0) for name in parameter_paths(self.state.params))
        # Of three products for each weight, forward and backward, the base has two: no gradient of its weights is computed.
        of_base = task.flops_per_token(base)
        return of_base * 2 / 3 + task.flops_per_token(base + trained) - of_base

    # ------------------------------------------------------------------ the update

    @cached_property
    def groups(self) -> tuple[ParameterGroup, ...]:
        """The groups of parameters; those of `freeze_module` come first."""
        patterns = self._trainer.freeze_module()
        first = map(param_groups.frozen_group, [patterns] if isinstance(patterns, str) else patterns)
        return (*first, *map(param_groups.as_group, self._trainer.build_param_groups()))

    @cached_property
    def pruner(self) -> Pruner | None:
        """What `build_pruner` has returned. Raises UsageError with an optimizer that evaluates averages."""
        pruner = self._trainer.build_pruner()
        if pruner is not None and self._trainer.arguments.optimizer.name == SCHEDULE_FREE:
            raise UsageError(f"build_pruner: expected None with {SCHEDULE_FREE}, which averages zeros away")
        return pruner

    def build_pruner(self) -> Pruner | None:
        """Does what `BaseTrainer.build_pruner` does."""
        arguments = self._trainer.arguments
        if arguments.pruning.pruner is not None:
            return load_object(arguments.pruning.pruner)(arguments)
        return None if arguments.pruning.pattern is None else pruning.Magnitude(arguments.pruning)

    @cached_property
    def _update_rule(self) -> optax.GradientTransformation:
        """The optimizer for the parameters that are not frozen."""
        arguments = self._trainer.arguments
        return update_rule(self._trainer.optimizer, arguments.optimizer, arguments.seed, self.groups)

    def train_step(self, layout: Layout) -> Any:
        """Returns the train step, to be jitted. `layout`: of its metrics."""
        trainer = self._trainer
        spec = StepSpec(
            self.loss,
            layout,
            self._update_rule,
            trainer.scheduler,
            trainer.arguments,
            self.groups,
            self.pruner,
            trainer.on_micro_step if overrides(trainer, "on_micro_step") else None,
            trainer.forward_backward if overrides(trainer, "forward_backward") else None,
        )
        return make_train_step(spec)

    # ------------------------------------------------------------------ the state at step 0

    def initial_state(
        self, loaded: Mapping[str, jax.Array] = MappingProxyType({}), others: Mapping[str, jax.Array] = MappingProxyType({})
    ) -> TrainState:
        """Returns the state at step 0, with the model's arrays of `loaded` and `others`, by name, in place of its own. Traced."""
        loaded, arguments = {**loaded, **others}, self._trainer.arguments
        params, model_state = initial_model(self._trainer.task, arguments.seed, arguments.lora)
        return self._fresh_state(with_loaded(params, loaded), with_loaded(model_state, loaded), self.step_layout)

    def _abstract_state(self, parts: ModelParts, params: Any, layout: Layout) -> TrainState:
        """Returns the shapes of a state. Shapes alone: a standby does this, which must touch no device."""
        return jax.eval_shape(partial(self._fresh_state, layout=layout), params, parts.state_shapes)

    def _fresh_state(self, params: Any, model_state: Any, layout: Layout) -> TrainState:
        """Returns the state at step 0 with these parameters and this other state of the model. Traced."""
        # Of trained parameters alone: neither the optimizer nor the pruner ever sees a frozen one.
        trained = param_groups.trainable(self.groups, params)
        pruner_state = {} if self.pruner is None else self.pruner.init(trained)
        arguments = self._trainer.arguments
        scaler = initial_scaler(arguments.dtype, arguments.loss_scale)
        return state_from_parameters(params, self._update_rule, layout, scaler, model_state, pruner_state)

    # ------------------------------------------------------------------ the loss, and the layouts of its metrics

    @cached_property
    def loss(self) -> LossFunction:
        return self.loss_of(self.model)

    @cached_property
    def eval_loss(self) -> LossFunction:
        """The loss with the model in evaluation mode."""
        return dataclasses.replace(self.loss, training=False)

    def loss_of(self, parts: ModelParts) -> LossFunction:
        models = {name: model.parts for name, model in self.frozen_models.items()}
        trainer, sources = self._trainer, self._trainer.arguments.data.source_names
        return LossFunction(trainer.task, parts, trainer.preforward, trainer.postforward, sources, frozen_parts=models)

    @cached_property
    def step_layout(self) -> Layout:
        """The layout of the metrics of a train step: those of the loss, then those of the step."""
        output = configured(self._trainer, self.made, "step_layout", "configure_model")
        return self.traced_layout or self._step_layout_of(output.model, output.state.params)

    @cached_property
    def loss_layout(self) -> Layout:
        """The layout of the metrics of the task's loss in an evaluation."""
        if takes(self._trainer.task, "training"):  # its parts may be others than in training
            return self.layout_of(self.eval_loss, self.state.params, self.rows(self.output))
        step = self.step_layout
        names = len(step) - len(step_metrics(self.state.params, self._trainer.arguments, self.groups))
        # The metrics of the loss come first.
        return dataclasses.replace(step, names=step.names[:names], kinds=step.kinds[:names], means=())

    def batch_shapes(self, rows: tuple[int, int], sharding: Any = None) -> Shapes:
        """Returns the shapes of a batch [*rows, ...] as a step gets it."""
        return self._batching.shapes(rows, self.output, sharding)

    def rows(self, model: TrainerConfigureModelOutput) -> Mapping[str, Any]:
        """Returns the shapes of a micro-batch as they are passed to the loss."""
        return shapes_of_rows(self._batching.shapes((1, self._trainer.arguments.micro_batch_size), model))

    def layout_of(self, function: LossFunction, params: Any, rows: Mapping[str, Any], **others: Kind) -> Layout:
        """Returns the layout of the metrics of a loss, and of others."""
        step = jax.ShapeDtypeStruct((), np.int32)

        def traced(params: Any, rows: Any, step: Any, model_state: Any, weights: Any) -> Any:
            return function.with_terms(params, rows, step, None, function.rest(model_state, rows, frozen=weights))

        weights = frozen.shapes_of(self.frozen_models)
        loss, terms = jax.eval_shape(traced, params, rows, step, function.parts.state_shapes, weights)
        return dataclasses.replace(
            Layout.of(loss, **others),
            # `postforward` may change the total: then it need not be the sum of the terms.
            terms=() if overrides(self._trainer, "postforward") else tuple(terms),
            of_tokens=getattr(function.task, "has_perplexity", function.task.tokens_per_example > 1),
        )

    @cached_property
    def _abstract(self) -> tuple[ModelParts, Any, Any]:
        return abstract_model(self._trainer.task, self._trainer.arguments.seed, self._trainer.arguments.lora)

    def _step_layout_of(self, parts: ModelParts, params: Any) -> Layout:
        rows = self.rows(TrainerConfigureModelOutput(parts, self._abstract_state(parts, params, Layout((), ()))))
        others = step_metrics(params, self._trainer.arguments, self.groups)
        layout = self.layout_of(self.loss_of(parts), params, rows, **others)
        return layout.with_means(self._trainer.arguments.metrics.running_means)


def evaluated_parameters(state: TrainState) -> Any:
    """Returns the parameters that are evaluated, previewed and exported: those of the state, or the averages that the optimizer
    keeps."""
    return parameters_to_evaluate(state.opt_state, state.params)


def module(trainer: BaseTrainer, state: TrainState) -> Any:
    """Returns the model with the parameters that are evaluated."""
    base = trainer.frozen.get(BASE) if trainer.arguments.lora else None
    model = trainer.model.merge(evaluated_parameters(state), state.model_state, frozen=base)
    return in_mode(model, training=False)


def configured(trainer: object, value: Any, name: str, method: str) -> Any:
    """Returns the value. Raises NotConfiguredError if it is None: `method` makes it."""
    if value is None:
        raise NotConfiguredError(
            f"{type(trainer).__name__}.{name} exists after {method}() only: call train() or {method}() first"
        )
    return value
