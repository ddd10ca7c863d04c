"""The models whose weights a step reads and does not change: the base of LoRA, and those of `frozen`. Shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gangway.errors import UsageError
from trainers.config.arguments import TrainingArguments
from trainers.config.frozen import BASE
from trainers.models.lora import axis_of_tokens
from trainers.parallel import mesh as meshes
from trainers.protocol import Task
from trainers.step.loss import takes
from trainers.step.state import ModelParts, abstract_frozen


class FrozenModel(NamedTuple):
    parts: ModelParts
    shapes: Any
    """The shapes and types of its weights, as one tree."""
    axes: Any
    """Their logical axes."""
    path: str
    asked_by: str
    """The setting that names the path."""

    def placed(self, mesh: Mesh) -> Any:
        """Returns the shapes with shardings, by the rules for parameters."""

        def with_sharding(leaf: Any, names: Any) -> jax.ShapeDtypeStruct:
            sharding = meshes.parameter_sharding(mesh, names, leaf.shape)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(with_sharding, self.shapes, self.axes)


def frozen_models(task: Task, arguments: TrainingArguments) -> dict[str, FrozenModel]:
    """Returns the models by their names in the configuration; the base of LoRA is `base`. Touches no device."""
    models = {}
    for name, config in arguments.frozen.items():
        build_frozen = getattr(task, "build_frozen", None)
        build = task.build_model if build_frozen is None else partial(build_frozen, name)
        models[name] = _model(build, config.dtype, config.path, f"frozen.{name}")
    if arguments.lora is not None:
        assert arguments.lora.base is not None  # checked, or put there by `model.pretrained`
        base = _model(task.build_model, arguments.lora.base_dtype, arguments.lora.base, "lora.base")
        models[BASE] = base._replace(shapes=_without_new_tokens(base, arguments.lora.new_tokens))
    return models


def _without_new_tokens(model: FrozenModel, number: int) -> Any:
    """Returns the shapes of a model that has so many tokens less."""

    def cut(leaf: jax.ShapeDtypeStruct, axes: Any) -> jax.ShapeDtypeStruct:
        shape, axis = list(leaf.shape), axis_of_tokens(axes)
        if axis is not None:
            shape[axis] -= number
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    return jax.tree.map(cut, model.shapes, model.axes)


def check_use(task: Task, arguments: TrainingArguments, *, prepares: bool) -> None:
    """Raises UsageError if nothing reads the weights of `frozen`. `prepares`: the trainer has a hook that may."""
    if arguments.frozen and not takes(task, "frozen") and not prepares:
        raise UsageError(
            f"frozen: the loss of {type(task).__name__} has no parameter `frozen`, which would get {', '.join(arguments.frozen)} "
            "as models by name: add it, or leave the section out"
        )
    if arguments.lora is not None and arguments.lora.new_tokens and takes(task, "frozen") and _reads_base(task):
        raise UsageError(
            f"lora.new_tokens = {arguments.lora.new_tokens}: the loss of {type(task).__name__} compares the model with its base, "
            f"which has no such tokens; add them to the folder of the base first, and set lora.new_tokens: 0"
        )


def _reads_base(task: Task) -> bool:
    """Whether a loss may read the base; one of the user's own may."""
    return getattr(task, "reads_base", True)


def _model(build: Callable[[Any], Any], dtype: str | None, path: str, asked_by: str) -> FrozenModel:
    parts, shapes, axes = abstract_frozen(build)

    def cast(leaf: Any) -> jax.ShapeDtypeStruct:
        kept = dtype is None or not jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if kept else jnp.dtype(dtype))

    return FrozenModel(parts, jax.tree.map(cast, shapes), axes, path, asked_by)


def shapes_of(models: Mapping[str, FrozenModel]) -> dict[str, Any]:
    return {name: model.shapes for name, model in models.items()}
