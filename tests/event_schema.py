"""Checks events against their schemas as they pass: an unknown event, an unknown field, a missing one and a wrong type fail."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NotRequired, get_args, get_origin, get_type_hints

from pydantic import PydanticUserError, TypeAdapter

from gangway.wire.console import ConsoleEvent
from gangway.wire.events import Event, HostEvent

SCHEMAS = {"process": Event, "host": HostEvent, "console": ConsoleEvent}


def check_event(event: Mapping[str, Any], sender: Literal["process", "host", "console"]) -> None:
    """Of a training process, of a host (its process or its agent), or for the console. Raises AssertionError."""
    schemas = [schema for schema in get_args(SCHEMAS[sender]) if event.get("ev") in kinds_of(schema)]
    assert schemas, f"no schema has an event {event.get('ev')!r}: {event}"
    problems = [_problem(event, schema) for schema in schemas]
    assert None in problems, f"{event}: {'; '.join(filter(None, problems))}"


def kinds_of(schema: type) -> tuple[str, ...]:
    """The names of the events that a schema is of."""
    return get_args(get_type_hints(schema)["ev"])


@cache
def fields_of(schema: type) -> dict[str, tuple[bool, Any]]:
    """Whether each field must be there, and its type."""
    hints = get_type_hints(schema, include_extras=True)
    return {name: (False, get_args(hint)[0]) if get_origin(hint) is NotRequired else (True, hint) for name, hint in hints.items()}


def _problem(event: Mapping[str, Any], schema: type) -> str | None:
    fields = fields_of(schema)
    missing = {name for name, (required, _) in fields.items() if required} - event.keys()
    if missing or event.keys() - fields.keys():
        return f"{schema.__name__} lacks {sorted(missing)}, does not know {sorted(event.keys() - fields.keys())}"
    for name, value in event.items():
        try:
            _adapter(schema, name).validate_python(value, strict=True)
        except ValueError as error:
            return f"{schema.__name__}.{name}: {error}"
    return None


@cache
def _adapter(schema: type, field: str) -> TypeAdapter:
    try:
        return TypeAdapter(fields_of(schema)[field][1])
    except PydanticUserError:  # lists of a TypedDict, before Python 3.12
        return TypeAdapter(list)
