"""Plain data becomes sections of the configuration: the one converter, for files, overrides, JSON and a user's dicts.

It reports all problems at once, each with the value found, what is allowed and the likely intention. Free of JAX.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
import types
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import Any, Literal, TypeVar

from gangway.config import near_keys
from gangway.config.masking import masked
from gangway.config.section import Section, default_of, did_you_mean, require_none
from gangway.config.yaml_source import KeyPath, Source, shown
from gangway.text import shortened

T = TypeVar("T")
Problems = dict[KeyPath, list[str]]

EXPECTED = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list, such as [a, b]",
    dict: "a section of keys and values",
    types.NoneType: "null",
}
TRUTH = {
    **dict.fromkeys(("true", "yes", "on", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "off", "f", "n", "0"), False),
}
LISTS, MAPPINGS = (tuple, list, Sequence), (dict, Mapping)


def check(cls: type[T], source: Source) -> tuple[T | None, Problems]:
    """Returns the value and all problems, by path; a problem of the whole value is at ().

    Wrong keys are left out of the value, so that the rest can be checked. It is None if there is no valid value even so.
    """
    conversion = _Conversion(cls)
    try:
        return conversion.section(cls, as_written(cls, source.data, (), source), ()), conversion.problems
    except _WrongError:
        return None, conversion.problems


def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
    """Builds a (nested) configuration dataclass. Raises ValueError with a line for each problem: unknown keys, wrong types, and
    what the checks of the sections find."""
    value, problems = check(cls, Source(cls.__name__, dict(data)))
    if problems or value is None:
        raise ValueError("\n".join(chain.from_iterable(problems.values())))
    return value


def convert_sections(config: Any) -> Iterator[str]:
    """Makes sections of what was given in their place: dicts, or a text for those that have a shorthand. Yields the problems; a
    section that is wrong gets its default, so that the rest can be checked. For the `__post_init__` of a class with sections."""
    cls = type(config)
    hints = hints_of(typing.cast(Hashable, cls))
    for item in (item for item in dataclasses.fields(config) if _names_section(hints[item.name])):
        path, conversion = (item.name,), _Conversion(cls)
        source = Source(cls.__name__, {item.name: getattr(config, item.name)})
        data = as_written(cls, source.data, (), source)
        try:
            made = conversion.value(hints[item.name], data[item.name], path) if data else default_of(item)
        except _WrongError:
            made = default_of(item)
        yield from chain.from_iterable(conversion.problems.values())
        object.__setattr__(config, item.name, made)  # it is frozen from now on


# ---------------------------------------------------------------------- what was written


def as_written(hint: Any, value: Any, path: KeyPath, source: Source) -> Any:
    """Corrects what YAML cannot know without the type of a value: text stays as written, an empty section counts as absent."""
    text = source.origins[path].text if path in source.origins else None
    if isinstance(value, str | int | float) and (key := getattr(near_keys.section_of(hint), "shorthand", None)):
        return {key: str(value) if text is None else text}
    if text is not None and _is_text(hint) and not _means_null(hint, value, text):
        return text
    if isinstance(value, Mapping):
        return _mapping_as_written(hint, value, path, source)
    if isinstance(value, list | tuple):
        items = (as_written(_item_hint(hint, number), item, (*path, number), source) for number, item in enumerate(value))
        return type(value)(items) if type(value) in (list, tuple) else value
    # Python takes True for 1.
    return json.dumps(value) if isinstance(value, bool) and _is_number(hint) else value


def _mapping_as_written(hint: Any, values: Mapping[Any, Any], path: KeyPath, source: Source) -> dict[Any, Any]:
    section = near_keys.section_of(hint)
    hints = hints_of(section) if section else {}
    result = {}
    for key, item in values.items():
        item_hint = hints.get(key, _item_hint(hint))
        is_empty = item is None and near_keys.section_of(item_hint) and types.NoneType not in near_keys.arms(item_hint)
        if is_empty and section is not None:
            continue  # an empty section: its defaults hold
        # Sections whose names the user gives: an empty one exists.
        result[key] = as_written(item_hint, {} if is_empty else item, (*path, key), source)
    return result


def _means_null(hint: Any, value: Any, text: str) -> bool:
    """Returns whether a YAML null means null. An empty value is empty text where null is not allowed."""
    return value is None and (text.strip().lower() in ("~", "null") or (text == "" and types.NoneType in near_keys.arms(hint)))


def _is_text(hint: Any) -> bool:
    return set(near_keys.arms(hint)) <= {str, types.NoneType}


def _is_number(hint: Any) -> bool:
    return set(near_keys.arms(hint)) <= {int, float, types.NoneType}


def _item_hint(hint: Any, number: int = 0) -> Any:
    """Returns the type of an item of a list, or of the values of a mapping."""
    for arm in near_keys.arms(hint):
        args = typing.get_args(arm)
        if typing.get_origin(arm) in LISTS:
            return args[number if number < len(args) and args[-1] is not Ellipsis else 0] if args else Any
        if typing.get_origin(arm) in MAPPINGS:
            return args[1]
    return Any


# ---------------------------------------------------------------------- conversion


class _WrongError(Exception):
    """A value that is wrong: its problems are reported already. Whatever holds it leaves it out."""


class _Conversion:
    """Converts values for the fields of `root`, and collects the problems."""

    def __init__(self, root: type):
        self.root = root
        self.problems: Problems = {}

    def value(self, hint: Any, value: Any, path: KeyPath) -> Any:
        """Returns the value in the type of `hint`. Raises _WrongError."""
        arms = near_keys.arms(hint)
        section = near_keys.section_of(hint)
        if Any in arms or (value is None and types.NoneType in arms) or (section and isinstance(value, section)):
            return value
        if isinstance(value, str) and (key := getattr(section, "shorthand", None)):
            value = {key: value}
        present = [arm for arm in arms if arm is not types.NoneType] or [types.NoneType]
        if section is not None and (len(present) == 1 or isinstance(value, Mapping)):
            return self.section(section, value, path)
        if len(present) == 1:
            return self._arm(present[0], value, path)
        # The very type comes before those that could be made of the value.
        for arm in sorted(present, key=lambda arm: arm is not type(value)):
            with suppress(_WrongError):
                return _Conversion(self.root)._arm(arm, value, path)
        raise self._wrong(path, f"expected {' or '.join(dict.fromkeys(map(_expected, present)))}", value)

    def section(self, cls: type[T], data: Any, path: KeyPath) -> T:
        """Returns the section. Raises _WrongError if a key without a default is missing or wrong, or if its own check fails."""
        fields = {item.name: item for item in dataclasses.fields(cls) if item.init}  # type: ignore[arg-type]
        if not isinstance(data, Mapping):
            expected = f"expected a section with keys among {', '.join(fields)}"
            raise self._wrong(path, f"{expected}{_elsewhere(path, data)}", data)
        hints, values = hints_of(typing.cast(Hashable, cls)), {}
        for key, item in data.items():
            if key not in fields:
                inner = (*path, key)
                suggestion = self._suggestion(fields, key, path)
                self._add_line(inner, f"{shown(inner)}: unknown key ({_found(item, inner)}); {suggestion}")
                continue
            with suppress(_WrongError):
                values[key] = self.value(hints[key], item, (*path, key))
        needed = {name for name, item in fields.items() if item.default is item.default_factory is dataclasses.MISSING}
        for name in (name for name in fields if name in needed - data.keys()):
            self._add((*path, name), "missing; it has no default")
        if needed - values.keys():
            raise _WrongError
        try:
            return cls(**values)
        except (ValueError, AssertionError) as error:
            self._add_of_check(cls, str(error) or f"the check of {cls.__name__} fails", path)
            raise _WrongError from None

    def _arm(self, hint: Any, value: Any, path: KeyPath) -> Any:
        """Returns the value in a type that is no union."""
        origin = typing.get_origin(hint) or hint
        if origin is Literal:
            return self._choice(hint, value, path)
        if origin in LISTS:
            return self._list(hint, value, path)
        if origin in MAPPINGS:
            return self._mapping(hint, value, path)
        if hint not in SCALARS:
            return self._other(hint, value, path)
        try:
            return SCALARS[hint](value)
        except OverflowError:
            raise self._wrong(path, "expected a finite number", value) from None
        except ValueError:
            raise self._wrong(path, f"expected {EXPECTED[hint]}", value) from None

    def _choice(self, hint: Any, value: Any, path: KeyPath) -> Any:
        choices = typing.get_args(hint)
        if any(type(value) is type(choice) and value == choice for choice in choices):
            return value
        near = _elsewhere(path, value) or did_you_mean(str(value), map(str, choices))
        raise self._wrong(path, f"expected {_expected(hint)}", value, near)

    def _list(self, hint: Any, value: Any, path: KeyPath) -> Any:
        """A wrong item makes the whole list wrong: its length may matter."""
        args = typing.get_args(hint) or (Any, Ellipsis)
        if not isinstance(value, list | tuple):
            raise self._wrong(path, f"expected {EXPECTED[list]}", value)
        is_fixed = typing.get_origin(hint) is tuple and args[-1] is not Ellipsis
        if is_fixed and len(value) != len(args):
            raise self._wrong(path, f"expected {len(args)} values", value)
        items = []
        for number, item in enumerate(value):
            with suppress(_WrongError):
                items.append(self.value(args[number] if is_fixed else args[0], item, (*path, number)))
        if len(items) < len(value):
            raise _WrongError
        return items if typing.get_origin(hint) is list or hint is list else tuple(items)

    def _mapping(self, hint: Any, value: Any, path: KeyPath) -> dict[Any, Any]:
        key_hint, item_hint = typing.get_args(hint) or (Any, Any)
        if not isinstance(value, Mapping):
            raise self._wrong(path, f"expected {EXPECTED[dict]}", value)
        made = {}
        for key, item in value.items():
            with suppress(_WrongError):
                made[self.value(key_hint, key, (*path, key))] = self.value(item_hint, item, (*path, key))
        return made

    def _other(self, hint: Any, value: Any, path: KeyPath) -> Any:
        """Of a type that no file can say: an object of it, which a program has given."""
        if isinstance(hint, type) and not typing.is_typeddict(hint) and isinstance(value, hint):
            return value
        name = getattr(hint, "__name__", hint)
        raise self._wrong(path, f"a value of the type {name} cannot be given here: let its field be of another type", value)

    def _wrong(self, path: KeyPath, text: str, value: Any, hint: str = "") -> _WrongError:
        self._add(path, f"{text} ({_found(value, path)}){hint}")
        return _WrongError()

    def _add(self, path: KeyPath, text: str) -> None:
        self._add_line(path, f"{shown(path)}: {text}" if path else text)

    def _add_line(self, path: KeyPath, line: str) -> None:
        lines = self.problems.setdefault(path, [])
        if line not in lines:
            lines.append(line)

    def _add_of_check(self, cls: type, message: str, path: KeyPath) -> None:
        """Adds what the check of a section has found, a line each: it names its keys without the section. What mentions a key
        that was left out is a consequence of that."""
        fields = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
        depth = len(path)
        left_out = {str(inner[depth]) for inner in self.problems if inner[:depth] == path and len(inner) > depth} & fields
        for line in message.splitlines():
            if left_out & set(re.findall(r"\w+", line)):
                continue
            key = line.partition(" ")[0].rstrip(":")
            if key in fields:
                self._add_line((*path, key), f"{shown(path)}.{line}" if path else line)
            else:
                self._add_line(path, f"{shown(path)}: {line}" if path else line)

    def _suggestion(self, fields: Mapping[str, Any], key: Any, section: KeyPath) -> str:
        if keys := near_keys.near(self.root, shown(section), fields, str(key)):
            return near_keys.did_you_mean(keys)
        return f"known keys{f' of {shown(section)}' if section else ''}: {', '.join(fields)}"


def _elsewhere(path: KeyPath, value: Any) -> str:
    """Returns what does here what this value does in another program; empty if nothing is known."""
    instead = near_keys.VALUES_ELSEWHERE.get(shown(path), {}).get(str(value).lower())
    return "" if instead is None else f"; {instead}"


def _integer(value: Any) -> int:
    if isinstance(value, str):
        with suppress(ValueError):
            return int(value)
    number = value if isinstance(value, int) else _number(value)
    if isinstance(value, bool) or number != int(number):
        raise ValueError
    return int(number)


def _number(value: Any) -> float:
    """Raises ValueError for what is no number, and OverflowError for one that is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise OverflowError
    return number


def _truth(value: Any) -> bool:
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    if not isinstance(value, str) or value.lower() not in TRUTH:
        raise ValueError
    return TRUTH[value.lower()]


def _text(value: Any) -> str:
    if type(value) is datetime.date:  # of a program: a file has texts alone
        return value.isoformat()
    if not isinstance(value, str):
        raise ValueError
    return value


def _nothing(value: Any) -> None:
    if value is not None:
        raise ValueError


SCALARS: dict[Any, Any] = {int: _integer, float: _number, bool: _truth, str: _text, types.NoneType: _nothing}


# ---------------------------------------------------------------------- in words


def _expected(hint: Any) -> str:
    origin = typing.get_origin(hint) or hint
    if origin is Literal:
        choices = [str(choice) for choice in typing.get_args(hint)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if dataclasses.is_dataclass(hint):
        return "a section"
    plain = dict if origin in MAPPINGS else list if origin in LISTS else origin
    return EXPECTED.get(plain, f"a value of the type {getattr(hint, '__name__', hint)}")


def _found(value: Any, path: KeyPath) -> str:
    if value is None or value == "":
        return "found nothing"
    if path[:2] == ("hosts", "env") or (path[:1] == ("hosts",) and isinstance(value, Mapping | list)):
        return f"found {_kind(value)}"  # values of environment variables are not shown, and not if one is in the wrong place
    text = json.dumps(masked(value), default=str, skipkeys=True)
    return f"found {shortened(text)}"


def _kind(value: Any) -> str:
    return "a section" if isinstance(value, Mapping) else "a list" if isinstance(value, list | tuple) else "text"


# ---------------------------------------------------------------------- the classes


@cache
def hints_of(cls: Hashable) -> dict[str, Any]:
    """Returns the types of the fields of a dataclass, by their names."""
    return typing.get_type_hints(cls)


def _names_section(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(_names_section(arm) for arm in typing.get_args(hint))


class CheckedSection(Section):
    """A section that raises ValueError with a line for each of its problems, and of those of the sections in it."""

    def __post_init__(self):
        require_none([*convert_sections(self), *self._problems()])

    def _problems(self) -> Iterator[str]:
        """Yields what is wrong with the values, a line each."""
        raise NotImplementedError
