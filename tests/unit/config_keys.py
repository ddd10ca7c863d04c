"""Every key that a configuration may have, and how to make the program ignore one."""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field
from functools import cache
from typing import Any

import yaml

from cluster.hosts.config import HostsConfig
from orchestrator.config.job import DriverConfig, JobConfig
from orchestrator.policies.notices import NotifyConfig
from orchestrator.tracking.config import TrackingConfig
from tests import ROOT
from trainers.config.arguments import TrainingArguments

TABLE = ROOT / "tests" / "unit" / "data" / "tests_of_keys.yaml"
SECTIONS = {
    "": TrainingArguments,
    "hosts.": HostsConfig,
    "driver.": DriverConfig,
    "tracking.": TrackingConfig,
    "notify.": NotifyConfig,
}


@dataclasses.dataclass(frozen=True)
class Key:
    """A key such as `optimizer.groups.frozen`, and the field that holds its value."""

    name: str
    section: type
    field: Field[Any]

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    def ignore(self) -> None:
        """Makes the field of every section that is made from now on read as its default. The section has checked the value that
        was given before. Of no default: a text that names nothing. It is for a process of one's own."""
        before_init, before_check = self.section.__init__, getattr(self.section, "__post_init__", None)

        def reset(section: Any) -> None:
            object.__setattr__(section, self.field.name, self._default())

        def init(section: Any, *args: Any, **kwargs: Any) -> None:
            before_init(section, *args, **kwargs)
            reset(section)

        # Of a subclass, which has an `__init__` of its own.
        def check(section: Any) -> None:
            if before_check:
                before_check(section)
            reset(section)

        self.section.__init__, self.section.__post_init__ = init, check  # type: ignore[misc, attr-defined]

    def _default(self) -> Any:
        if self.field.default_factory is not MISSING:
            return self.field.default_factory()
        return "ignored" if self.field.default is MISSING else self.field.default


@cache
def every_key() -> dict[str, Key]:
    """Returns the keys by name. Sections in lists and mappings are named after what holds them: `optimizer.groups.pattern`."""
    keys = [key for prefix, section in SECTIONS.items() for key in _keys(prefix, section)]
    (arguments,) = (field for field in dataclasses.fields(JobConfig) if field.name == "arguments_class")
    return {key.name: key for key in [*keys, Key("arguments", JobConfig, arguments)]}


def _keys(prefix: str, section: type) -> Iterator[Key]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        inner = next((kind for kind in _kinds(hints[field.name]) if dataclasses.is_dataclass(kind)), None)
        if inner is None or inner is not hints[field.name]:
            yield Key(prefix + field.name, section, field)
        if inner is not None:
            yield from _keys(f"{prefix}{field.name}.", inner)


def _kinds(hint: Any) -> Iterator[Any]:
    yield hint
    for part in typing.get_args(hint):
        yield from _kinds(part)


@cache
def declared() -> dict[str, str]:
    """Returns the test of each key, from the table: `path::test`."""
    return yaml.safe_load(TABLE.read_text())


@cache
def read_tests(path: str) -> dict[str, list[ast.AST]]:
    """Returns the tests of a file by name, each with the other parts of the file that it uses: constants, helpers, fixtures."""
    tree = ast.parse((ROOT / path).read_text())
    parts: dict[str, ast.AST] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node]
        parts |= {name: node for target in targets if (name := getattr(target, "id", getattr(target, "name", None)))}
    return {name: _with_what_it_uses(name, parts) for name in parts if name.startswith("test_")}


def _with_what_it_uses(test: str, parts: dict[str, ast.AST]) -> list[ast.AST]:
    found, names = [], [test]
    for name in names:  # grows meanwhile
        found.append(parts[name])
        inside = {getattr(node, "id", getattr(node, "arg", None)) for node in ast.walk(parts[name])}
        names += sorted(inside & parts.keys() - set(names))
    return found


def sets(parts: Iterable[ast.AST], key: Key) -> bool:
    """Says whether the text of a test sets a key: as a keyword, or in a text such as `key`, `section.key=1` or `key: 1`."""
    text = re.compile(rf"(^|[^A-Za-z0-9_]){key.last}(\s*[:=]|$)", re.M)
    for node in (node for part in parts for node in ast.walk(part)):
        if isinstance(node, ast.keyword) and node.arg == key.field.name:
            return True
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and text.search(node.value):
            return True
    return False
