"""The text of a configuration: a YAML file and `key=value` overrides become plain data that remembers where each value was said;
and plain data become the text of a file, which reads back equal.

Unquoted values are those of YAML 1.2, for every command. Free of JAX; PyYAML is imported where a text is read or written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangway.config.importable import of_a_copy
from gangway.config.masking import MASK, masked
from gangway.config.section import did_you_mean
from gangway.text import shortened

if TYPE_CHECKING:
    import yaml

KeyPath = tuple[str | int, ...]
"""Keys of sections and numbers of list items, from the top: `("data", "paths", 0)`."""
MOST_VALUES = 100_000
"""The limit on the values of a file. Aliases of aliases can stand for more than fit into memory."""
YAML = "tag:yaml.org,2002:"
"""What the tags of YAML's own types begin with."""
TAGS = {
    "ScalarNode": ("null", "bool", "int", "float", "str", "merge"),
    "SequenceNode": ("seq",),
    "MappingNode": ("map",),
}
"""The types that a value may have, by the kind of its node."""
LINE_BREAKS = frozenset("\x85\u2028\u2029")
"""Those of YAML beside the common ones."""


class ConfigError(ValueError):
    """A configuration that cannot be used: `problems` has a line for each thing that is wrong with it, without secrets."""

    def __init__(self, name: str, problems: Iterable[str]):
        self.name, self.problems = name, tuple(map(masked, problems))
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{name}: {count}", *self.problems]))

    @property
    def last_line(self) -> str:
        """Of the last problem: where a compiler has said much, what it comes to."""
        return str(self).strip().splitlines()[-1].strip()


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
    import yaml

    source, loader = Source(name, {}), None
    try:
        loader = _loader_class()(text)
        node = loader.get_single_node()
        data = None if node is None else _Reading(loader, source).value(node, ())
    except yaml.MarkedYAMLError as error:
        raise ConfigError(name, [_syntax_problem(error)]) from None
    except yaml.YAMLError as error:
        raise ConfigError(name, [f"not YAML: {' '.join(str(error).split())}"]) from None
    except RecursionError:
        raise ConfigError(name, ["its sections and lists lie too deep in each other to be read"]) from None
    if data is None:  # a document without a word
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(name, [f"expected keys and values, such as `seed: 1` (found {type(data).__name__})"])
    source.data = data
    return source


def override(source: Source, overrides: Iterable[str]) -> None:
    """Sets each `section.key=value` in `source`, the value read as YAML; a later one wins. Problems are added to the source's."""
    for item in overrides:
        key, equals, text = item.partition("=")
        path = tuple(key.strip().split("."))
        said = f"override {shown_override(item)!r}"
        if not equals or not all(path):
            source.problems.append((None, f"{said}: expected key=value, such as optimizer.learning_rate=3e-4"))
            continue
        value, inner = _value(text)
        source.problems += [(None, f"{said}: {problem}") for _, problem in inner.problems]
        if (blocked := _set(source.data, path, value)) is not None:
            source.problems.append((None, f"{said}: {shown(blocked)} is not a section: it has no keys"))
            continue
        # Quoted text is text already: YAML has made nothing else of it.
        quoted = text.lstrip()[:1] in ("'", '"')
        # What the file says inside a section that was replaced does not count any more.
        for old in [old for old in source.origins if old[: len(path)] == path]:
            del source.origins[old]
        source.origins |= {(*path, *rest): Origin(None, origin.text) for rest, origin in inner.origins.items()}
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
            table.setdefault(letter, []).append((f"{YAML}{tag}", re.compile(f"^(?:{pattern})$")))
    return table


PLAIN_VALUES = _plain_values()


@cache
def _loader_class() -> type[yaml.SafeLoader]:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.2's plain values: `no` is text, `3e-4` a number, `1:30`, `010` and dates are text."""

        yaml_implicit_resolvers = PLAIN_VALUES

    return Loader


def to_text(data: Mapping[str, Any]) -> str:
    """Returns plain data as YAML, in the order of its keys; `parse` makes the same data of it."""
    import yaml

    tables = (yaml.SafeDumper.yaml_implicit_resolvers, PLAIN_VALUES)
    of_both = {letter: [each for table in tables for each in table.get(letter, ())] for letter in {**tables[0], **tables[1]}}

    class Dumper(yaml.SafeDumper):
        """Quotes text that a reader of YAML 1.1 or of 1.2 would take for something else: `no`, `1e5`. Text of several lines keeps
        them, where it can."""

        yaml_implicit_resolvers = of_both

        def analyze_scalar(self, scalar: str) -> Any:
            found = super().analyze_scalar(scalar)
            if set(scalar) & LINE_BREAKS:  # only double quotes escape them; in others they are read as blanks
                found.allow_single_quoted = found.allow_block = False
            return found

    def of_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        return dumper.represent_scalar(f"{YAML}str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, of_text)
    return yaml.dump(dict(data), Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)


class _Reading:
    """Makes plain data of the nodes of a text; tells `source` where each value was said, and which keys are given twice, of which
    YAML would silently take the last."""

    def __init__(self, loader: yaml.SafeLoader, source: Source):
        self._loader, self._source = loader, source
        self._within: list[yaml.Node] = []
        self._num_values = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        """Raises ConfigError for what is no plain data."""
        import yaml

        self._check(node, path)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        self._within.append(node)
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self._inner(item, (*path, number)) for number, item in enumerate(node.value)]
            return {key: self._inner(item, (*path, key)) for key, item in self._items(node, path).items()}
        finally:
            self._within.pop()

    def _inner(self, node: yaml.Node, path: KeyPath) -> Any:
        import yaml

        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        self._source.origins[path] = Origin(_line(node), node.value if plain else None)
        return self.value(node, path)

    def _items(self, node: yaml.Node, path: KeyPath) -> dict[str, yaml.Node]:
        """Returns the values by their keys: those of the mapping itself, and before them those that it merges (`<<`)."""
        own: dict[str, yaml.Node] = {}
        merged: dict[str, yaml.Node] = {}
        lines: dict[str, int] = {}
        for key_node, item in node.value:
            key = self._key(key_node, path)
            if key in lines:
                text = f"{shown((*path, key))}: given twice, first in line {lines[key]}; keep one of them"
                self._source.problems.append((Origin(_line(key_node), None), text))
            lines[key] = _line(key_node)
            if key_node.tag == f"{YAML}merge":
                merged = self._merged(item, (*path, key))
            else:
                own[key] = item
        return merged | own

    def _merged(self, node: yaml.Node, path: KeyPath) -> dict[str, yaml.Node]:
        """Returns the values of the mapping, or of the list of mappings, that another one merges; of a list the first counts."""
        import yaml

        several = node.value if isinstance(node, yaml.SequenceNode) else [node]
        found: dict[str, yaml.Node] = {}
        for each in several:
            self._check(each, path)
            if not isinstance(each, yaml.MappingNode):
                raise self._error(each, path, f"expected a section to merge, or a list of sections (found {each.value!r})")
            self._within.append(each)
            found = self._items(each, path) | found
            self._within.pop()
        return found

    def _key(self, node: yaml.Node, path: KeyPath) -> str:
        import yaml

        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, path, "a key is a list or a section: expected text")
        if node.tag == f"{YAML}null":
            raise self._error(
                node, path, f"a key is {node.value or 'empty'}: expected text; write it in quotes if it is meant so"
            )
        return node.value

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        if node.tag == f"{YAML}merge":  # as a value it means nothing
            return node.value
        try:
            return self._loader.construct_object(node)
        # Of a tag that does not fit (`!!int x`), or of a number with thousands of digits.
        except (ValueError, LookupError, ArithmeticError):
            value = shortened(node.value)
            raise self._error(node, path, f"is no {node.tag.rpartition(':')[2]} that can be read (found {value!r})") from None

    def _check(self, node: yaml.Node, path: KeyPath) -> None:
        if node in self._within:  # else this would never end
            raise self._error(node, path, "is an alias of what it lies in", " ")
        self._num_values += 1
        if self._num_values > MOST_VALUES:
            raise self._error(node, path, f"the aliases of this file stand for more than {MOST_VALUES:,} values")
        if node.tag not in {f"{YAML}{kind}" for kind in TAGS[type(node).__name__]}:
            where = f"line {_line(node)}, column {node.start_mark.column + 1}"
            tag = f"could not determine a constructor for the tag {node.tag!r}"
            raise ConfigError(self._source.name, [f"{where}: not YAML: {tag}: expected plain values; leave the tag out"])

    def _error(self, node: yaml.Node, path: KeyPath, text: str, between: str = ": ") -> ConfigError:
        where = f"{shown(path)}{between}" if path else ""
        return ConfigError(self._source.name, [f"line {_line(node)}: {where}{text}"])


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _set(data: dict[str, Any], path: tuple[str, ...], value: Any) -> KeyPath | None:
    """Sets the value at `path`, making sections on the way; returns the path of what is in the way."""
    for depth, key in enumerate(path[:-1], 1):
        inner = data.get(key)
        if inner is not None and not isinstance(inner, dict):
            return path[:depth]
        data[key] = data = dict(inner or {})
    data[path[-1]] = value
    return None


def _value(text: str) -> tuple[Any, Source]:
    """Returns the value of an override, and where its parts were said, with what is wrong there. Text that is not YAML stays
    text: it is checked against the type of its key like everything else."""
    import yaml

    source = Source("override", {})
    try:
        loader = _loader_class()(text)
        node = loader.get_single_node()
        return None if node is None else _Reading(loader, source).value(node, ()), source
    except (yaml.YAMLError, ConfigError, RecursionError):
        return text, Source("override", {})


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
