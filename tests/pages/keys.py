"""The page of the keys: what each one means, by the docstring of its field, its type, its default, and what is allowed."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from dataclasses import MISSING
from typing import Any, Literal

from gangway.config.conversion import from_dict, hints_of
from orchestrator.config.job import SECTIONS as MACHINES
from tests.pages.docstrings import about, of_fields
from tests.unit.config_keys import Key, every_key
from trainers.config.arguments import TrainingArguments
from trainers.optim import optimizers, schedules

HEAD = """# Configuration keys

A configuration is a YAML file. It needs few of these keys, for each has a default, but for those that *must be given*. Beside the
name of a key stand its type, what is allowed, and its default. Any of them can be changed on the command line, as
`optimizer.learning_rate=1e-3`. `gangway run CONFIG --dry-run --all` shows all values of a run. A key that is not here is an error
that says which one may be meant. All keys are there since version 0.1.0. `make files` writes this page from the code.
"""
UNITS = {"_s": "seconds", "_minutes": "minutes", "_gb": "GB", "_steps": "steps", "_epochs": "epochs", "_bytes": "bytes"}
"""The units of numbers, by the end of the key's name."""
UNITLESS = {"accumulation_steps", "peak_flops_per_s"}
"""Keys whose names end like that, and mean something else."""
NAMES = {"optimizer.name": optimizers.NAMES, "optimizer.schedule.name": schedules.NAMES}
"""What else than its section says which values are allowed: the registries of the code."""
SAMPLES: tuple[Any, ...] = (-1, -1.0, 0, "?", [-1], ["?"], "")
"""Values that most keys do not allow: the error says what they do."""
IN_LISTS = {
    "optimizer.groups": "each item of the list",
    "data.mixture": "each item of the list",
    "frozen": "each `NAME`",
    "evaluation.units": "each `NAME`",
}
"""What the sections are that there may be several of."""


def page() -> str:
    sections: dict[str, list[Key]] = {}
    for key in every_key().values():
        sections.setdefault(key.name.rpartition(".")[0], []).append(key)
    return "\n".join([HEAD, *(section(prefix, keys) for prefix, keys in sections.items())])


def section(prefix: str, keys: list[Key]) -> str:
    title = f"## `{prefix}`" if prefix else "## At the top"
    several = f" These are the keys of {IN_LISTS[prefix]}." if prefix in IN_LISTS else ""
    cls = next(key.section for key in keys if key.name != "arguments")
    text = (about(cls) if prefix else "What is not in a section.") + several
    return "\n".join([title, "", *([text.strip(), ""] if text.strip() else []), *(entry(key) for key in keys)])


def entry(key: Key) -> str:
    kind, allowed, default = type_of(key), allowed_of(key), default_of(key)
    kind = f"{kind}, {allowed}" if allowed and allowed not in kind else kind
    return f"- **`{key.name}`** · {kind} · {default}\n\n    {meaning_of(key)}\n"


def meaning_of(key: Key) -> str:
    """Returns what the key means, as one line; nothing if nobody has said it."""
    return of_fields(key.section).get(key.field.name, "")


def default_of(key: Key) -> str:
    field = key.field
    if field.default is MISSING and field.default_factory is MISSING:
        # The run is named after its file.
        return "default: the name of the file" if key.name == "name" else "must be given"
    value = field.default if field.default_factory is MISSING else field.default_factory()
    is_plain = isinstance(value, str) and value.strip() == value != ""
    return f"default `{value if is_plain else json.dumps(value, ensure_ascii=False)}`"


# ---------------------------------------------------------------------- the type, in words


def type_of(key: Key) -> str:
    hint = hints_of(key.section)[key.field.name]
    unit = next((unit for end, unit in UNITS.items() if key.last.endswith(end) and key.last not in UNITLESS), "")
    return " or ".join(dict.fromkeys(_words(arm, unit) for arm in _arms(hint)))


def _arms(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _words(hint: Any, unit: str = "") -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    of_unit = f" of {unit}" if unit else ""
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in args)
    if hint in PLAIN:
        return PLAIN[hint] + (of_unit if hint in (int, float) else "")
    if dataclasses.is_dataclass(hint):
        return "section"
    if origin in (tuple, list):
        return f"list of {_many(args[0])}" if args[-1] is Ellipsis else f"list of {len(args)} {_many(args[0])}"
    if origin is not None:  # a mapping
        return f"section of {_many(args[1])}, by name"
    raise ValueError(f"no words for the type {hint}")


PLAIN = {int: "whole number", float: "number", bool: "`true` or `false`", str: "text", type(None): "`null`", Any: "anything"}
MANY = {int: "whole numbers", float: "numbers", str: "texts", Any: "values"}


def _many(hint: Any) -> str:
    if hint in MANY:
        return MANY[hint]
    word, _, rest = _words(hint).partition(" ")
    return f"{word}s {rest}".strip()


# ---------------------------------------------------------------------- what is allowed, in the program's own words


def allowed_of(key: Key) -> str:
    """Returns what the section's own checks say of a value that is wrong; nothing if none of the samples is."""
    if key.name in NAMES:
        return "one of " + ", ".join(f"`{name}`" for name in NAMES[key.name])
    for value in SAMPLES:
        for line in problems(key, value):
            if line.startswith(f"{key.field.name} = ") and "expected " in line:
                return _shortened(line.partition("expected ")[2])
    return ""


def problems(key: Key, value: Any) -> list[str]:
    """Returns what the section says of a value of the key. Keys that must be given get one that is right."""
    given = {item.name: NEEDED[item.name] for item in dataclasses.fields(key.section) if item.name in NEEDED and _must(item)}
    if key.section is TrainingArguments:
        given["max_num_steps"] = 1
    if key.section in MACHINES.values() and key.last in ("slices", "min_slices", "max_slices", "topology", "accelerator"):
        return []  # what they may be depends on each other
    try:
        from_dict(key.section, {**given, key.field.name: value})
    except ValueError as error:
        return str(error).splitlines()
    return []


def _must(item: dataclasses.Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


NEEDED = {"name": "run", "pattern": ".", "path": "weights", "paths": ["data.jsonl"]}
"""A value of each key that must be given."""


def _shortened(text: str) -> str:
    """Without what the error adds for the one value: what may be meant, and why."""
    text = re.sub(r" \((nothing to repeat|found|of a step|seconds)[^)]*\)", "", text.partition("; ")[0])
    return re.sub(r"\bpackage\.module:(Name|function)", r"`package.module:\1`", text).strip()
