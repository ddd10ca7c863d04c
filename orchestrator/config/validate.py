"""Checks data against a configuration dataclass: reports all problems, each with what is allowed and the likely intention."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.config.yaml_source import KeyPath, Source, shown
from trainers.config import near_keys
from trainers.config.masking import masked
from trainers.config.near_keys import arms, section_of
from trainers.config.section import did_you_mean

T = TypeVar("T")
Problems = dict[KeyPath, list[str]]

EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list, such as [a, b]",
    "list": "a list, such as [a, b]",
    "dict": "a section of keys and values",
    "none": "null",
}
"""By the first word of pydantic's error types."""


def check(cls: type[T], source: Source) -> tuple[T | None, Problems]:
    """Returns the value and all problems, by path; a problem of the whole value is at ().

    Wrong keys are left out of the value, so that the rest can be checked. It is None if there is no valid value even so.
    """
    data = as_written(cls, source.data, (), source)
    adapter = _adapter(cls)  # type: ignore[arg-type]  # mypy: a class is not hashable
    problems: Problems = {}
    removed: set[KeyPath] = set()
    while True:
        try:
            return adapter.validate_python(data), problems
        except ValidationError as error:
            details = [_where(detail, data) for detail in error.errors()]
            for path, detail in details:
                _add_problem(problems, cls, path, detail, removed)
        # Pydantic does not run the checks of a section while one of its keys is wrong: without these keys the rest is checked.
        wrong = {path for path, _ in details if _present(data, path)}
        if not wrong:
            return None, problems
        data = _without(data, wrong)
        removed |= wrong


@cache
def _adapter(cls: type) -> TypeAdapter:
    return TypeAdapter(cls)


def as_written(hint: Any, value: Any, path: KeyPath, source: Source) -> Any:
    """Corrects what YAML cannot know without the type of a value: text stays as written, an empty section counts as absent."""
    text = source.origins[path].text if path in source.origins else None
    if isinstance(value, str | int | float) and (key := getattr(section_of(hint), "shorthand", None)):
        return {key: str(value) if text is None else text}
    if text is not None and _is_text(hint) and not _means_null(hint, value, text):
        return text
    if isinstance(value, Mapping):
        return _mapping_as_written(hint, value, path, source)
    if isinstance(value, list):
        return [as_written(_item_hint(hint), item, (*path, number), source) for number, item in enumerate(value)]
    # Python, and so pydantic, takes True for 1.
    return json.dumps(value) if isinstance(value, bool) and _is_number(hint) else value


def _mapping_as_written(hint: Any, values: Mapping[Any, Any], path: KeyPath, source: Source) -> dict[Any, Any]:
    section = section_of(hint)
    hints = typing.get_type_hints(section) if section else {}
    result = {}
    for key, item in values.items():
        item_hint = hints.get(key, _item_hint(hint))
        is_empty = item is None and section_of(item_hint) and not _admits(item_hint, type(None))
        if is_empty and section is not None:
            continue  # an empty section: its defaults hold
        # Sections whose names the user gives: an empty one exists.
        result[key] = as_written(item_hint, {} if is_empty else item, (*path, key), source)
    return result


def _admits(hint: Any, arm: type) -> bool:
    return arm in arms(hint)


def _means_null(hint: Any, value: Any, text: str) -> bool:
    """Returns whether a YAML null means null. An empty value is empty text where null is not allowed."""
    return value is None and (text.strip().lower() in ("~", "null") or (text == "" and _admits(hint, type(None))))


def _is_text(hint: Any) -> bool:
    return set(arms(hint)) <= {str, type(None)}


def _is_number(hint: Any) -> bool:
    return set(arms(hint)) <= {int, float, type(None)}


def _item_hint(hint: Any) -> Any:
    """Returns the type of the items of a list, or of the values of a mapping."""
    for arm in arms(hint):
        args = typing.get_args(arm)
        if typing.get_origin(arm) in (tuple, list):
            return args[0] if args else Any
        if typing.get_origin(arm) in (dict, Mapping):
            return args[1]
    return Any


def _where(detail: ErrorDetails, data: Any) -> tuple[KeyPath, ErrorDetails]:
    """Returns the error with its path in the data. Pydantic's path also names the arms of unions."""
    path: list[str | int] = []
    for part in detail["loc"]:
        if _has(data, part):
            path, data = [*path, part], data[part]
    if detail["type"] == "missing" and isinstance(detail["loc"][-1], str):
        path.append(detail["loc"][-1])
    return tuple(path), detail


def _add_problem(problems: Problems, cls: type, path: KeyPath, detail: ErrorDetails, removed: set[KeyPath]) -> None:
    """Adds the problem, unless it mentions a key that was left out before: then it is a consequence of that."""
    left_out = {str(inner[len(path)]) for inner in removed if inner[: len(path)] == path and len(inner) > len(path)}
    section_check = detail["type"] == "value_error"
    texts = [_of_section(cls, path, line) for line in _lines(detail)] if section_check else [(path, _text(cls, path, detail))]
    for about, text in texts:
        earlier = problems.get(about, [])
        if text not in earlier and not left_out & set(re.findall(r"\w+", text.removeprefix(shown(path)))):
            problems[about] = [*earlier, text]


def _lines(detail: ErrorDetails) -> list[str]:
    """The check of a section may raise several problems, a line each."""
    return str(detail["ctx"]["error"]).splitlines()


def _of_section(cls: type, path: KeyPath, text: str) -> tuple[KeyPath, str]:
    """Returns the path and the text of a message of a section's own check, which names its keys without the section."""
    key = text.partition(" ")[0].rstrip(":")
    if key in {field.name for field in dataclasses.fields(_section_at(cls, path))}:
        return (*path, key), f"{shown(path)}.{text}" if path else text
    return path, f"{shown(path)}: {text}" if path else text


def _text(cls: type, path: KeyPath, detail: ErrorDetails) -> str:
    kind, value = detail["type"], _shown_value(detail["input"], path)
    if kind == "unexpected_keyword_argument":
        return f"{shown(path)}: unknown key ({value}); {_suggestion(cls, path)}"
    if kind in ("too_long", "too_short") or (kind == "missing" and isinstance(detail["loc"][-1], int)):
        return f"{shown(path)}: expected {_length(cls, path)} values ({value})"
    if kind == "missing":
        return f"{shown(path)}: missing; it has no default"
    if kind == "literal_error":
        return f"{shown(path)}: expected one of {_choices(detail)} ({value}){_close(detail)}"
    if kind == "dataclass_type":
        keys = ", ".join(field.name for field in dataclasses.fields(_section_at(cls, path)))
        return f"{shown(path)}: expected a section with keys among {keys} ({value})"
    expected = EXPECTED.get(kind.split("_", maxsplit=1)[0])
    return f"{shown(path)}: {f'expected {expected}' if expected else detail['msg']} ({value})"


def _length(cls: type, path: KeyPath) -> int:
    """Returns the length of the fixed-length list at `path`."""
    hint = typing.get_type_hints(_section_at(cls, path[:-1]))[str(path[-1])]
    return next(len(typing.get_args(arm)) for arm in arms(hint) if typing.get_origin(arm) is tuple)


def _section_at(cls: type, path: KeyPath) -> Any:
    hint: Any = cls
    for part in path:
        section = section_of(hint)
        hint = typing.get_type_hints(section).get(str(part)) if section else _item_hint(hint)
    return section_of(hint) or _Empty


@dataclasses.dataclass
class _Empty:
    """Stands for anything that is not a section: it has no keys."""


def _suggestion(cls: type, path: KeyPath) -> str:
    key, section = str(path[-1]).lstrip("-"), path[:-1]
    here = [field.name for field in dataclasses.fields(_section_at(cls, section))]
    if keys := near_keys.near(cls, shown(section), here, key):
        return near_keys.did_you_mean(keys)
    return f"known keys{f' of {shown(section)}' if section else ''}: {', '.join(here)}"


def _choices(detail: ErrorDetails) -> str:
    return detail["ctx"]["expected"].replace("'", "").replace(" or ", ", ")


def _close(detail: ErrorDetails) -> str:
    return did_you_mean(str(detail["input"]), _choices(detail).split(", "))


def _shown_value(value: Any, path: KeyPath) -> str:
    if value is None or value == "":
        return "found nothing"
    if path[:2] == ("hosts", "env") or (path[:1] == ("hosts",) and isinstance(value, Mapping | list)):
        return f"found {_kind(value)}"  # values of environment variables are not shown, and not if one is in the wrong place
    text = json.dumps(masked(value), default=str)
    return f"found {text if len(text) <= 60 else text[:57] + '...'}"


def _kind(value: Any) -> str:
    return "a section" if isinstance(value, Mapping) else "a list" if isinstance(value, list) else "text"


def _has(data: Any, part: str | int) -> bool:
    if isinstance(data, list):
        return part in range(len(data))
    return isinstance(data, Mapping) and part in data


def _present(data: Any, path: KeyPath) -> bool:
    for part in path:
        if not _has(data, part):
            return False
        data = data[part]
    return bool(path)


def _without(data: Any, wrong: set[KeyPath]) -> Any:
    """Returns the data without the wrong paths. A wrong item of a list removes the whole list: its length may matter."""
    if not isinstance(data, Mapping):
        return data
    whole = {path[0] for path in wrong if len(path) == 1 or isinstance(path[1], int)}
    return {
        key: _without(value, {path[1:] for path in wrong if len(path) > 1 and path[0] == key})
        for key, value in data.items()
        if key not in whole
    }
