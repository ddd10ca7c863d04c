"""Configuration as text: a YAML file and `key=value` overrides become plain data that remembers where each value was said."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainers.config.masking import MASK, masked
from trainers.config.section import did_you_mean
from trainers.surroundings import of_a_copy

KeyPath = tuple[str | int, ...]
"""Keys of sections and numbers of list items, from the top: `("data", "paths", 0)`."""


class ConfigError(Exception):
    """A configuration that cannot be used: `problems` has a line for each thing that is wrong with it."""

    def __init__(self, name: str, problems: Iterable[str]):
        self.name, self.problems = name, tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{name}: {count}", *self.problems]))


@dataclass(frozen=True)
class Origin:
    """Where a value comes from."""

    line: int | None
    """In the file; None: an override."""
    text: str | None
    """As it was written, where YAML might have made something else of it: `1.10` is a number, unless text was asked for."""

    def __str__(self) -> str:
        return f"line {self.line}" if self.line is not None else "override"


@dataclass
class Source:
    """What a file and its overrides say. `problems` are (line, text): what is wrong with the text itself."""

    name: str
    data: dict[str, Any]
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[tuple[Origin | None, str]] = field(default_factory=list)

    def origin(self, path: KeyPath) -> Origin | None:
        """Of the value at `path`, of the nearest section around it, or of something in it; None for what nobody said."""
        around = (path[:length] for length in range(len(path), 0, -1))
        inside = (inner for inner in self.origins if path and inner[: len(path)] == path)
        return next((self.origins[key] for key in (*around, *inside) if key in self.origins), None)


def shown(path: KeyPath) -> str:
    """`data.paths[0]`"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def shown_override(item: str) -> str:
    """`key=value`, to be shown or stored: an environment variable without its value, a URL without its user."""
    key, equals, _ = item.partition("=")
    return f"{key}={MASK}" if equals and key.strip().startswith("hosts.env") else masked(item)


def read(path: str | os.PathLike[str]) -> Source:
    """Raises ConfigError when there is no such file, or it is not a YAML mapping. Duplicate keys are among the problems."""
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(name, [f"no such file{_similar_file(Path(path))}{of_a_copy()}"]) from None
    except IsADirectoryError:
        raise ConfigError(name, ["is a folder: expected a YAML file"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(name, [f"is not text in UTF-8 (byte {error.start})"]) from None
    except OSError as error:
        raise ConfigError(name, [f"cannot be read: {error.strerror}"]) from None
    return parse(text, name)


def parse(text: str, name: str) -> Source:
    """See `read`."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        data = loader.construct_document(node) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        raise ConfigError(name, [_syntax_problem(error)]) from None
    except yaml.YAMLError as error:
        raise ConfigError(name, [f"not YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(data, dict):
        raise ConfigError(name, [f"expected keys and values, such as `seed: 1` (found {type(data).__name__})"])
    source = Source(name, {})
    for path, child in _walk(node, (), name, source.problems):
        plain = isinstance(child, yaml.ScalarNode) and child.style is None
        source.origins[path] = Origin(child.start_mark.line + 1, child.value if plain else None)
    source.data = _with_text_keys(data)
    return source


def override(source: Source, overrides: Iterable[str]) -> None:
    """Sets each `section.key=value` in `source`, the value read as YAML; a later one wins. Problems are added to the source's."""
    for item in overrides:
        key, equals, text = item.partition("=")
        path = tuple(key.strip().split("."))
        said = f"override {shown_override(item)!r}"
        if not equals or not all(path):
            source.problems.append((None, f"{said}: expected key=value, such as optimizer.learning_rate=3e-4"))
        elif (blocked := _set(source.data, path, _value(text))) is not None:
            source.problems.append((None, f"{said}: {shown(blocked)} is not a section: it has no keys"))
        else:
            # Quoted text is text already: YAML has made nothing else of it.
            quoted = text.lstrip()[:1] in ("'", '"')
            # What the file says inside a section that was replaced does not count any more.
            for old in [old for old in source.origins if old[: len(path)] == path]:
                del source.origins[old]
            source.origins[path] = Origin(None, None if quoted else text)


def _plain_values() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """What unquoted text stands for, by its first letter, in the form that PyYAML looks it up."""
    digits = "[0-9][0-9_]*"
    exponent = "[eE][-+]?[0-9]+"
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first_letters in (
        ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
        ("int", "[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
        ("float", rf"[-+]?(?:(?:{digits}\.[0-9_]*|\.[0-9]+)(?:{exponent})?|{digits}{exponent}|\.inf)|\.nan", "-+.0123456789"),
        ("merge", "<<", "<"),
    ):
        for letter in first_letters:
            table.setdefault(letter, []).append((f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$")))
    return table


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values: `no` is text, `3e-4` a number, `1:30`, `010` and dates are text."""

    yaml_implicit_resolvers = _plain_values()


def _walk(
    node: yaml.Node | None, path: KeyPath, name: str, problems: list, ancestors: tuple[yaml.Node, ...] = ()
) -> Iterator[tuple[KeyPath, yaml.Node]]:
    """Every value below `node` with its path; reports keys given twice, of which YAML would silently take the last."""
    # Else this walk would never end.
    if node in ancestors:
        raise ConfigError(name, [f"line {node.start_mark.line + 1}: {shown(path)} is an alias of what it lies in"])
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            inner, line = (*path, str(key.value)), key.start_mark.line + 1
            if (first := seen.setdefault(str(key.value), line)) != line:
                problems.append((Origin(line, None), f"{shown(inner)}: given twice, first in line {first}; keep one of them"))
            yield inner, value
            yield from _walk(value, inner, name, problems, (*ancestors, node))
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield (*path, number), item
            yield from _walk(item, (*path, number), name, problems, (*ancestors, node))


def _set(data: dict[str, Any], path: tuple[str, ...], value: Any) -> KeyPath | None:
    """Sets the value at `path`, making sections on the way; returns the path of what is in the way."""
    for depth, key in enumerate(path[:-1], 1):
        inner = data.get(key)
        if inner is not None and not isinstance(inner, dict):
            return path[:depth]
        data[key] = data = dict(inner or {})
    data[path[-1]] = value
    return None


def _value(text: str) -> Any:
    """Text that is not YAML stays text: it is checked against the type of its key like everything else."""
    try:
        return _with_text_keys(yaml.load(text, _Loader))
    except yaml.YAMLError:
        return text


def _with_text_keys(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(key): _with_text_keys(value) for key, value in data.items()}
    return [_with_text_keys(item) for item in data] if isinstance(data, list) else data


def _syntax_problem(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    context = f" {error.context}" if error.context else ""
    return f"{where}not YAML: {error.problem or 'unreadable'}{context}"


def _similar_file(path: Path) -> str:
    folder = path.parent
    names = [entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml")] if folder.is_dir() else []
    if hint := did_you_mean(path.name, names, prefix="" if folder == Path() else f"{folder}/"):
        return hint
    return f"; {folder} has {', '.join(sorted(names))}" if names else ""
