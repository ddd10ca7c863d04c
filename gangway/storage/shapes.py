"""Whether a value that came as JSON is what a type says: a TypedDict, a dataclass, or what they are made of. Without JAX."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Literal

from gangway.text import shortened

Check = Callable[[Any, str], str]
"""Takes a value and its name. Returns what is wrong with it as a sentence; "" if nothing is."""


@functools.cache
def check_of(hint: Any, only: frozenset[str] | None = None) -> Check:
    """Returns the check for a type; with `only`, of these fields of a TypedDict alone. Keys that a TypedDict or a dataclass does
    not have are allowed, for a newer program may have written them. An integer passes as a float, and a list as a tuple, as in
    JSON."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if typing.is_typeddict(hint):
        # Not `__required_keys__`, which does not see NotRequired in annotations that are text.
        hints = typing.get_type_hints(hint, include_extras=True)
        fields = {key: (check_of(field), typing.get_origin(field) is not typing.NotRequired) for key, field in hints.items()}
        return _fields(fields if only is None else {name: fields[name] for name in only})
    if dataclasses.is_dataclass(hint):
        return _fields(_of_dataclass(typing.cast(type, hint)))
    if origin is None:
        return _plain(hint)
    if origin in (typing.Required, typing.NotRequired, typing.Union, types.UnionType):
        return _one_of(tuple(check_of(arm) for arm in args))
    if origin is Literal:
        return lambda value, name: "" if value in args else _wrong(name, value, f"one of {', '.join(map(repr, args))}")
    return _mapping(check_of(args[1])) if issubclass(origin, Mapping) else _sequence(origin, args)


def problem(hint: Any, value: Any, name: str = "", only: frozenset[str] | None = None) -> str:
    """Returns what is wrong with a value of that type, such as `step = 'a': expected int`; "" if nothing is."""
    return check_of(hint, only)(value, name)


def _plain(hint: Any) -> Check:
    if hint is Any:
        return lambda value, name: ""
    if hint in (None, type(None)):
        return lambda value, name: "" if value is None else _wrong(name, value, "null")
    if isinstance(hint, type) and issubclass(hint, Enum):
        values = {member.value for member in hint}
        return lambda value, name: (
            "" if isinstance(value, str | int | float | None) and value in values else _wrong(name, value, f"a {hint.__name__}")
        )
    # By the exact type: True is an int for Python, and none for a step.
    allowed = (int, float) if hint is float else (hint,)
    return lambda value, name: "" if type(value) in allowed else _wrong(name, value, hint.__name__)


def _one_of(arms: tuple[Check, ...]) -> Check:
    def check(value: Any, name: str) -> str:
        problems = []
        for arm in arms:
            problems.append(arm(value, name))
            if not problems[-1]:
                return ""
        # The longest: it is about a key inside the value, and the others say only that the value is no null.
        return max(problems, key=len)

    return check


def _fields(fields: Mapping[str, tuple[Check, bool]]) -> Check:
    def check(value: Any, name: str) -> str:
        if not isinstance(value, Mapping):
            return _wrong(name, value, "an object")
        for key, (check_field, required) in fields.items():
            # The name of what is right is not made: files have a hundred thousand lines.
            if key not in value:
                if required:
                    return f"{_below(name, key)} is missing"
            elif check_field(value[key], ""):
                return check_field(value[key], _below(name, key))
        return ""

    return check


def _of_dataclass(cls: type) -> dict[str, tuple[Check, bool]]:
    hints = typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    return {
        field.name: (check_of(hints[field.name]), field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(cls)
    }


def _mapping(check_value: Check) -> Check:
    def check(value: Any, name: str) -> str:
        if not isinstance(value, Mapping):
            return _wrong(name, value, "an object")
        for key, item in value.items():
            if type(key) is not str:
                return _wrong(f"a key of {name}", key, "text")
            if check_value(item, ""):
                return check_value(item, f"{name}.{key}")
        return ""

    return check


def _sequence(origin: type, args: tuple[Any, ...]) -> Check:
    # `tuple[str, str]` has a check for each place, `tuple[int, ...]` and `list[int]` one for all.
    places = tuple(check_of(arg) for arg in args if arg is not ...)
    each = origin is not tuple or ... in args

    def check(value: Any, name: str) -> str:
        if not isinstance(value, list | tuple):
            return _wrong(name, value, "a list")
        if not each and len(value) != len(places):
            return _wrong(name, value, f"{len(places)} entries")
        checks = places * len(value) if each else places
        found = (one(item, f"{name}[{index}]") for index, (one, item) in enumerate(zip(checks, value, strict=True)))
        return next(filter(None, found), "")

    return check


def _below(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _wrong(name: str, value: Any, expected: str) -> str:
    text = shortened(repr(value))
    return f"{name} = {text}: expected {expected}" if name else f"{text}: expected {expected}"
