"""What JSON, YAML or a user's dict gives becomes a section of the configuration. Free of JAX.

The orchestrator checks files with better messages (`orchestrator/config/job.py`); this is for those who run `trainers` alone.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import Any, Literal, TypeVar

from trainers.config.near_keys import arms as arms_of
from trainers.config.near_keys import did_you_mean, near
from trainers.config.section import require

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a section is: the class of the whole configuration, and the section's key in it."""

    root: type
    section: str = ""

    def inside(self, name: str) -> Place:
        return Place(self.root, f"{self.section}.{name}".lstrip("."))


def from_dict(cls: type[T], data: Mapping[str, Any], place: Place | None = None) -> T:
    """Builds a (nested) configuration dataclass; `place`: where it is in a larger one. Raises ValueError with a line for each
    problem: unknown keys, wrong types, and what the checks of the sections find."""
    place = place or Place(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    hints, values, problems = _hints(typing.cast(Hashable, cls)), {}, [*_unknown(cls, data, fields, place)]
    for name in (key for key in data if key in fields):
        try:
            values[name] = convert(hints[name], data[name], name, place)
        except ValueError as error:
            problems += str(error).splitlines()
    problems += [f"{name}: missing; it has no default" for name in fields if name not in data and not _has_default(fields[name])]
    if not problems:
        return cls(**values)
    if all(name in values or _has_default(fields[name]) for name in fields):
        problems += _further(cls, values, data.keys() - values.keys())
    raise ValueError("\n".join(problems))


def convert_sections(config: Any) -> Iterator[str]:
    """Makes sections of what was given in their place: dicts, or a text for those that have a shorthand. Yields the problems; a
    section that is wrong gets its default, so that the rest can be checked. For the `__post_init__` of a class with sections."""
    hints = _hints(typing.cast(Hashable, type(config)))
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        if not _names_section(hint):
            continue
        try:
            made = convert(hint, getattr(config, field.name), field.name, Place(type(config)))
        except ValueError as error:
            yield from str(error).splitlines()
            made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        object.__setattr__(config, field.name, made)  # it is frozen from now on


def convert(hint: Any, value: Any, name: str, place: Place) -> Any:
    """Returns the value in the type of the field `name` of the section at `place`. Raises ValueError."""
    arms = arms_of(hint)
    section = next((arm for arm in arms if dataclasses.is_dataclass(arm)), None)
    if (value is None and type(None) in arms) or (section is not None and isinstance(value, typing.cast(type, section))):
        return value
    if isinstance(value, str) and (key := getattr(section, "shorthand", None)):
        value = {key: value}
    if section is not None:
        require(value is None or isinstance(value, Mapping), f"{name} = {value!r}: expected a section of keys and values")
        return _section(typing.cast(type, section), value or {}, name, place.inside(name))
    present = [arm for arm in arms if arm is not type(None)]
    return _collection(present[0], value, name, place) if len(present) == 1 else _scalar(arms, value, name)


def _collection(hint: Any, value: Any, name: str, place: Place) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        require(isinstance(value, list | tuple), f"{name} = {value!r}: expected a list")
        return tuple(convert(args[0], item, f"{name}[{index}]", place) for index, item in enumerate(value))
    if origin is dict:
        require(isinstance(value, Mapping), f"{name} = {value!r}: expected a section of keys and values")
        return {key: convert(args[1], item, f"{name}.{key}", place) for key, item in value.items()}
    if origin is Literal and value not in args:
        raise ValueError(f"{name} = {value!r}: expected one of {', '.join(map(repr, args))}")
    return _scalar((hint,), value, name)


def _section(cls: type, data: Mapping[str, Any], name: str, place: Place) -> Any:
    try:
        return from_dict(cls, data, place)
    except ValueError as error:
        known = {field.name for field in dataclasses.fields(cls)}
        # The check of a section names its keys without the section.
        lines = (f"{name}.{line}" if _first_word(line) in known else f"{name}: {line}" for line in str(error).splitlines())
        raise ValueError("\n".join(lines)) from None


def _unknown(cls: type, data: Mapping[str, Any], fields: Mapping[str, Any], place: Place) -> Iterator[str]:
    if unknown := sorted(map(str, data.keys() - fields.keys())):
        hints = dict.fromkeys(did_you_mean(near(place.root, place.section, fields, name)) for name in unknown)
        told = "".join(f"; {hint}" for hint in hints if hint)
        yield f"unknown keys of {cls.__name__}: {', '.join(unknown)}; known: {', '.join(sorted(fields))}{told}"


def _further(cls: type, values: Mapping[str, Any], left_out: typing.AbstractSet[str]) -> list[str]:
    """Returns what the checks of the section find in the values that could be converted. What mentions a key that is left out
    here is no problem of its own."""
    try:
        cls(**values)
    except ValueError as error:
        return [line for line in str(error).splitlines() if not left_out & set(re.findall(r"\w+", line))]
    return []


def _scalar(arms: tuple[Any, ...], value: Any, name: str) -> Any:
    scalars = tuple(arm for arm in arms if arm in (bool, int, float, str))
    if not scalars or type(value) in scalars:
        return value
    if type(value) is date and str in scalars:  # YAML takes 2026-11-25 for one
        return value.isoformat()
    try:
        # YAML 1.1 takes 3e-4 for text; 1e3 may stand for an integer.
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is not None and float in scalars:
        return number
    if number is not None and int in scalars and number.is_integer():
        return int(number)
    raise ValueError(f"{name} = {value!r}: expected {' or '.join(kind.__name__ for kind in scalars)}")


@cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _names_section(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(_names_section(arm) for arm in typing.get_args(hint))


def _has_default(field: dataclasses.Field) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _first_word(line: str) -> str:
    found = re.match(r"\w+", line)
    return found[0] if found else ""
