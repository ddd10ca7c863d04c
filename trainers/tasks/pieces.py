"""A task that is put together of a model and a loss function (`trainers.library`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gangway.errors import UsageError
from trainers.config.arguments import load_object
from trainers.config.keywords import PiecesArguments
from trainers.protocol import Batch, PerExample

ELSEWHERE = "was given as an object to the training that made this run: only that program has it"
EXAMPLE = "such as `lambda rngs: MyModel(64, rngs=rngs)`"


class PiecesTask:
    """The task of the model and the loss that `pieces` names."""

    tokens_per_example = 1

    def __init__(self, arguments: PiecesArguments):
        pieces = arguments.pieces
        if pieces.model is None or pieces.loss is None:
            raise UsageError(f"pieces.{'loss' if pieces.model else 'model'} {ELSEWHERE}")
        self._use(load_object(pieces.model), load_object(pieces.loss))

    @classmethod
    def of(cls, model: Any, loss: Callable[..., Any]) -> PiecesTask:
        """Returns the task of these objects."""
        task = cls.__new__(cls)
        task._use(model, loss)
        return task

    def _use(self, model: Any, loss: Callable[..., Any]) -> None:
        self._model, self._loss = model, loss
        self._loss_takes_training = "training" in inspect.signature(loss).parameters

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        if isinstance(self._model, nnx.Module):
            # A copy in the present trace: the user's own module stays as it is.
            return nnx.clone(self._model)
        parameters = parameters_of(self._model)
        needed = [each.name for each in parameters if each.default is each.empty and each.kind not in VARIADIC]
        if unknown := [name for name in needed if name != "rngs"]:
            raise UsageError(
                f"model {name_of(self._model)} needs {', '.join(unknown)}: give a function that returns a model, {EXAMPLE}"
            )
        model = self._model(rngs=rngs) if any(each.name == "rngs" for each in parameters) else self._model()
        if not isinstance(model, nnx.Module):
            raise UsageError(
                f"model {name_of(self._model)} returned {type(model).__name__}: expected a Flax NNX module "
                "(trainers.models.adapters makes one of a Linen module or of plain functions)"
            )
        return model

    def loss(self, model: Any, batch: Batch, training: bool) -> Any:
        value = self._loss(model, batch, training=training) if self._loss_takes_training else self._loss(model, batch)
        # A pair of numbers would be a sum and the number of its targets, as in any task.
        if type(value) is tuple and len(value) == 2 and isinstance(value[1], Mapping):
            value = PerExample(*value)
        losses = value.losses if isinstance(value, PerExample) else value
        if isinstance(losses, jax.Array) and jnp.ndim(losses) == 0:
            raise UsageError(
                f"loss {name_of(self._loss)} returned one number for the batch: expected one for each example, an array "
                f"[{len(batch['weight'])}]; leave out the mean over the first dimension, which would also count rows that only "
                "fill up a batch"
            )
        return value

    def flops_per_token(self, num_parameters: int) -> float:
        return 6.0 * num_parameters


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters_of(model: Any) -> list[inspect.Parameter]:
    """Returns the parameters of a class, a function, or a partial of one."""
    if isinstance(model, functools.partial):
        return [each for each in parameters_of(model.func)[len(model.args) :] if each.name not in model.keywords]
    # The metaclass of NNX hides those of a class behind (*args, **kwargs).
    if isinstance(model, type):
        return list(inspect.signature(model.__init__).parameters.values())[1:]  # type: ignore[misc]
    return list(inspect.signature(model).parameters.values())


def name_of(piece: Any) -> str:
    return getattr(piece, "__qualname__", None) or type(piece).__qualname__
