"""Whether a JSON object has the fields of a TypedDict. It looks at numbers, text and objects, and lets everything else pass."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NotRequired, get_args, get_origin, get_type_hints

NAMES: dict[type, str] = {int: "int", str: "str", Mapping: "an object"}


def problem_in(schema: type, value: Any) -> str:
    """Returns what is wrong with the fields of a JSON object, as `host = '3': expected int`; "" if nothing is."""
    if not isinstance(value, Mapping):
        return f"{value!r:.50}: expected an object"
    for name, (kind, required) in _fields(schema).items():
        if name not in value:
            if required:
                return f"{name} is missing"
        elif not _is(value[name], kind):
            return f"{name} = {value[name]!r:.50}: expected {NAMES[kind]}"
    return ""


def _is(value: Any, kind: type) -> bool:
    # By the exact type: True is an int for Python.
    return isinstance(value, Mapping) if kind is Mapping else type(value) is kind


@functools.cache
def _fields(schema: type) -> dict[str, tuple[type, bool]]:
    """Returns the type of each field that is checked, and whether it must be there."""
    found = {}
    for name, hint in get_type_hints(schema, include_extras=True).items():
        optional = get_origin(hint) is NotRequired
        inner = get_args(hint)[0] if optional else hint
        kind = get_origin(inner) or inner
        if kind in NAMES:
            found[name] = (kind, not optional)
    return found
