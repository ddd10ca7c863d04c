"""Checks what the methods of a user's trainer return, where the trainer calls them: a method without `return` is an error that
names it, and not one of something far behind it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

from gangway.errors import UsageError
from trainers.config import ParameterGroup
from trainers.protocol import (
    Loss,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureModelOutput,
)
from trainers.step.state import TrainState

IS_CHECKED = "_is_checked"


class Expected(NamedTuple):
    holds: Callable[[Any], bool]
    """Whether what a method has returned can be used."""
    text: str
    """What it must return, after `expected`."""


def _tuple_of(first: Callable[[Any], bool], second: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and len(value) == 2 and first(value[0]) and second(value[1])


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_pattern_or_patterns(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list | tuple | set | frozenset) and all(isinstance(item, str) for item in value)
    )


def _are_groups(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, ParameterGroup | Mapping) for item in value)


def _is_function_or_none(value: Any) -> bool:
    return value is None or callable(value)


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda value: all(hasattr(value, name) for name in names)


def _or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


def _rows(value: Any) -> bool:
    return isinstance(value, Mapping) or _tuple_of(_is(Mapping), _is(Mapping))(value)


STATE = Expected(_is(TrainState), "the state, changed or not")
METRICS = Expected(_is(Mapping), "the metrics, a dict of numbers by name")
BATCH = Expected(_is(Mapping), "the batch, a dict of arrays by name")
FUNCTION = "a function, or None"
EXPECTED: Mapping[str, Expected] = {
    **dict.fromkeys(
        (
            "on_training_start",
            "on_training_end",
            "on_epoch_begin",
            "on_epoch_end",
            "on_step_start",
            "on_evaluation_start",
        ),
        STATE,
    ),
    **dict.fromkeys(
        ("on_step_end", "on_evaluation_end"),
        Expected(_tuple_of(_is(TrainState), _is(Mapping)), "(state, metrics), both changed or not"),
    ),
    **dict.fromkeys(("calculate_metrics", "evaluate"), METRICS),
    "preprocess_batch": Expected(_rows, "the batch, a dict of arrays by name, or (batch, metrics)"),
    "prepared_shapes": Expected(_is(Mapping), "shapes by the names of the leaves of a batch"),
    "preforward": BATCH,
    "postforward": Expected(_is(Loss), "the loss, a trainers.protocol.Loss such as the one it gets"),
    "on_micro_step": Expected(_tuple_of(_is(Loss), lambda value: value is not None), "(loss, gradients)"),
    "forward_backward": Expected(
        _tuple_of(_tuple_of(lambda value: value is not None, _is(Loss)), lambda value: value is not None),
        "((value, loss), gradients), as jax.value_and_grad(objective, has_aux=True) returns them",
    ),
    "freeze_module": Expected(
        _is_pattern_or_patterns,
        "patterns of the names of parameters, such as ('embed',), or () to freeze nothing; a change to the model has no effect",
    ),
    "build_param_groups": Expected(
        _are_groups, "a list of trainers.config.ParameterGroup or of dicts with its fields, or [] for no groups"
    ),
    "build_data_transform": Expected(_is_function_or_none, FUNCTION),
    "build_data_collate_info": Expected(_is(Mapping), "a trainers.data.collate.CollateInfo by the name of each leaf, or {}"),
    "build_collator": Expected(_is_function_or_none, FUNCTION),
    "build_early_stopper": Expected(_is_function_or_none, FUNCTION),
    "build_validation_units": Expected(_is(Mapping), "validation units by name, or {} for none"),
    "build_evaluation_metrics": Expected(
        _or_none(_has("names", "add", "state", "merge", "compute")), "a trainers.protocol.EvaluationMetrics, or None"
    ),
    "build_checkpoint_manager": Expected(lambda value: value is not None, "a trainers.protocol.CheckpointManagerProtocol"),
    "configure_model": Expected(_is(TrainerConfigureModelOutput), "a trainers.protocol.TrainerConfigureModelOutput"),
    "configure_dataloaders": Expected(
        _is(TrainerConfigureDataloaderOutput), "a trainers.protocol.TrainerConfigureDataloaderOutput"
    ),
    "task": Expected(_has("build_model", "loss"), "a trainers.protocol.Task"),
    "optimizer": Expected(_has("init", "update"), "an optax.GradientTransformation"),
    "scheduler": Expected(callable, "a function from the step to the learning rate"),
}
"""What each method or property returns that a subclass of BaseTrainer may replace. `prepare_batch`, `configure_functions`,
`build_model_assets`, `build_pruner` and `eval` are checked where they are called."""


def check_returns(cls: type, base: type) -> None:
    """Makes what `cls` overrides of EXPECTED raise UsageError if it returns something else. `base` has the originals."""
    for name, expected in EXPECTED.items():
        theirs = inspect.getattr_static(cls, name)
        if theirs is inspect.getattr_static(base, name) or getattr(_function_of(theirs), IS_CHECKED, False):
            continue
        made = functools.partial(checked, name, expected=expected)
        if isinstance(theirs, staticmethod | classmethod):
            setattr(cls, name, type(theirs)(made(theirs.__func__)))
        elif isinstance(theirs, property) and theirs.fget is not None:
            setattr(cls, name, property(made(theirs.fget)))
        elif isinstance(theirs, functools.cached_property):
            kept: Any = functools.cached_property(made(theirs.func))
            kept.__set_name__(cls, name)
            setattr(cls, name, kept)
        elif isinstance(theirs, FunctionType):  # anything else is refused when the trainer is built
            setattr(cls, name, made(theirs))


def _function_of(member: Any) -> Any:
    parts = (getattr(member, name, None) for name in ("__func__", "fget", "func"))
    return next((part for part in parts if part is not None), member)


def checked(name: str, method: Callable[..., Any], expected: Expected) -> Callable[..., Any]:
    """Returns the method, which raises UsageError if it returns something else than what is expected."""

    @functools.wraps(method)
    def returning_what_is_expected(*args: Any, **kwargs: Any) -> Any:
        value = method(*args, **kwargs)
        if not expected.holds(value):
            forgotten = " (is there a return?)" if value is None else ""
            raise UsageError(f"{name} returned {_shown(value)}{forgotten}: expected {expected.text}")
        return value

    vars(returning_what_is_expected)[IS_CHECKED] = True
    return returning_what_is_expected


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return f"({', '.join(map(_shown, value))})" if type(value) is tuple else type(value).__name__
