"""Functions of optax by name, `optax.<function>`, with arguments from the configuration."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax

from gangway.config.section import did_you_mean
from gangway.errors import UsageError

PREFIX = "optax."


def call(section: str, name: str, arguments: Mapping[str, Any], candidates: Sequence[str], value: Any) -> Any:
    """Calls `name`, a function of optax, with `arguments`, and with `value` for the first of the parameters `candidates` that
    it has.

    `section` is the section of the configuration, such as `optimizer`. Raises UsageError that says what is allowed.
    """
    function = _function(section, name)
    parameters = inspect.signature(function).parameters
    # Optax names the same thing differently from function to function.
    given = next((parameter for parameter in candidates if parameter in parameters), None)
    if given is None:
        raise UsageError(
            f"{section}.name = {name!r}: it takes no {' or '.join(candidates)}; expected a function of optax that does, or "
            "package.module:function"
        )
    if problems := list(_problems(section, name, arguments, parameters, given)):
        raise UsageError("\n".join(problems))
    return function(**{given: value}, **{key: _from_yaml(argument) for key, argument in arguments.items()})


def _function(section: str, name: str) -> Callable[..., Any]:
    path = name.removeprefix(PREFIX).split(".")
    try:
        function = functools.reduce(getattr, path, optax)
    except AttributeError:
        function = None
    if not callable(function):
        public_names = [public_name for public_name in dir(optax) if not public_name.startswith("_")]
        hint = did_you_mean(path[-1], public_names, prefix=PREFIX, at_most=3)
        raise UsageError(f"{section}.name = {name!r}: optax {optax.__version__} has no such function{hint}")

    return function


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
    """Converts a value from YAML: YAML 1.1 reads 3e-4 as text, and keys that are numbers come as text from JSON."""
    if isinstance(value, Mapping):
        return {int(key) if str(key).isdigit() else key: _from_yaml(item) for key, item in value.items()}
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
