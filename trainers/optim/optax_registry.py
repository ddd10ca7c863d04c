"""Functions of optax by name, `optax.<function>`, with arguments from the configuration."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax

from trainers.config.section import did_you_mean
from trainers.errors import UsageError

PREFIX = "optax."


def call(section: str, name: str, arguments: Mapping[str, Any], own: Sequence[str], value: Any) -> Any:
    """`name`, a function of optax, called with `arguments`, and with `value` for the first parameter that it has of `own`.

    `section` is that of the configuration, such as `optimizer`. Raises UsageError that says what is allowed.
    """
    function = _function(section, name)
    parameters = inspect.signature(function).parameters
    given = next((parameter for parameter in own if parameter in parameters), None)
    if given is None:
        raise UsageError(
            f"{section}.name = {name!r}: it takes no {' or '.join(own)}; expected a function of optax that does, or "
            "package.module:function"
        )
    if problems := list(_problems(section, name, arguments, parameters, given)):
        raise UsageError("\n".join(problems))
    return function(**{given: value}, **{key: _from_yaml(argument) for key, argument in arguments.items()})


def _function(section: str, name: str) -> Callable[..., Any]:
    path = name.removeprefix(PREFIX).split(".")
    try:
        found = functools.reduce(getattr, path, optax)
    except AttributeError:
        found = None
    if not callable(found):
        known = [one for one in dir(optax) if not one.startswith("_")]
        hint = did_you_mean(path[-1], known, prefix=PREFIX, at_most=3)
        raise UsageError(f"{section}.name = {name!r}: optax {optax.__version__} has no such function{hint}")
    return found


def _problems(section: str, name: str, arguments: Mapping[str, Any], parameters: Mapping[str, Any], given: str) -> Any:
    allowed = [parameter for parameter in parameters if parameter != given]
    for key in arguments:
        if key == given:
            yield f"{section}.arguments.{key}: it is optimizer.learning_rate; leave it out"
        elif key not in allowed:
            yield f"{section}.arguments.{key}: {name} has no such argument; expected among {', '.join(allowed)}"
    needed = [key for key in allowed if parameters[key].default is inspect.Parameter.empty and key not in arguments]
    if needed:
        yield f"{section}.arguments: {name} needs {', '.join(needed)}"


def _from_yaml(value: Any) -> Any:
    """YAML 1.1 takes 3e-4 for text, and JSON any key."""
    if isinstance(value, Mapping):
        return {int(key) if str(key).isdigit() else key: _from_yaml(item) for key, item in value.items()}
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
