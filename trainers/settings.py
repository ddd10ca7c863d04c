"""A configuration file and overrides in, checked arguments out, or every error at once: the one reader, for every command.

Top-level keys of the file are the fields of `trainers.config.arguments.TrainingArguments`, or of the subclass that `arguments`
names; beside them lie the sections that concern machines (`hosts`, `driver`, `tracking`). Free of JAX.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gangway.config import conversion, yaml_source
from gangway.config.importable import is_copy
from gangway.config.masking import MASK, masked_keys
from gangway.config.yaml_source import ConfigError, Origin, Source
from gangway.storage import documents
from trainers.config.arguments import ORCHESTRATOR_SECTIONS, TrainingArguments, load_object
from trainers.config.hf_files import BYTES
from trainers.models.hf import pretrained

ARGUMENTS_CLASS = "trainers.config.arguments:TrainingArguments"
"""What `arguments` names by default."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a configuration says."""

    training: TrainingArguments
    arguments_class: str
    machines: Mapping[str, Any]
    """The sections that concern machines, by their names."""


CrossCheck = Callable[[Settings, set[str]], Iterable[str]]
"""Yields problems between sections; the keys in the set have been reported already, and hold defaults."""


def read(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> TrainingArguments:
    """Returns the arguments in a YAML file, changed by `section.key=value`, for a command that uses no machines.

    Raises ConfigError with every problem, in the order of the file.
    """
    return load(path, overrides).training


def recorded(name: str, data: Mapping[str, Any], overrides: Iterable[str] = ()) -> TrainingArguments:
    """Returns the arguments that plain data say, such as a checkpoint has recorded, changed by `section.key=value`; `name` is for
    the error. Raises ConfigError."""
    source = Source(name, dict(data))
    yaml_source.override(source, overrides)
    return build(source).training


def load(
    path: str | os.PathLike[str],
    overrides: Iterable[str] = (),
    sections: Mapping[str, type] | None = None,
    cross_check: CrossCheck | None = None,
) -> Settings:
    """Reads a YAML file; each override is `section.key=value`. The run is named after the file, unless it says `name`. Raises
    ConfigError; for the others see `build`."""
    source = yaml_source.read(path)
    yaml_source.override(source, overrides)
    # After the overrides, which may give the name.
    source.data.setdefault("name", Path(path).stem)
    return build(source, sections, cross_check)


def build(source: Source, sections: Mapping[str, type] | None = None, cross_check: CrossCheck | None = None) -> Settings:
    """Makes the settings of what a source says. `sections` are the classes of the sections that concern machines; without them
    only the keys and the types there are checked. Raises ConfigError."""
    hidden = _masked(source, used=ORCHESTRATOR_SECTIONS if sections else ())
    problems: list[tuple[Origin | None, str]] = [*source.problems, *hidden]
    try:
        cls, class_error = _arguments_class(source.data.get("arguments") or ARGUMENTS_CLASS), None
    except ValueError as error:  # the rest of the file is checked against the default class
        cls, class_error = TrainingArguments, error
        problems.append((source.origin(("arguments",)), str(error)))
    schema = schema_of(cls, sections)
    value, by_path = conversion.check(schema, source)
    if class_error:
        # Keys of the class that could not be loaded would all look unknown.
        keys = {item.name for item in dataclasses.fields(schema)}
        by_path = {path: texts for path, texts in by_path.items() if not path or path[0] in keys}
    problems += [(source.origin(path), text) for path, texts in by_path.items() for text in texts]
    try:
        settings = None if value is None else _split(cls, value)
    except ValueError as error:  # of `model.pretrained`, which has been read only now
        settings, problems = None, [*problems, (source.origin(("model", "pretrained")), str(error))]
    if settings is not None and cross_check is not None:
        problems += [(None, text) for text in cross_check(settings, {str(path[0]) for path in by_path if path})]
    if settings is None or problems:
        raise _error(source, problems)
    return settings


def schema_of(cls: type[TrainingArguments], sections: Mapping[str, type] | None = None) -> type:
    """Returns one dataclass with all keys that a file may have, so that everything is checked together."""
    return _schema(typing.cast(Hashable, cls), tuple((sections or _of_machines()).items()))


@cache
def _of_machines() -> Mapping[str, type]:
    """Returns the sections that concern machines, with their keys and types alone. What else their classes check is checked where
    there are machines."""
    paths = {name: path.split(":") for name, path in ORCHESTRATOR_SECTIONS.items()}
    return {name: _keys_alone(getattr(importlib.import_module(module), cls)) for name, (module, cls) in paths.items()}


def _keys_alone(cls: Any) -> type:
    hints = typing.get_type_hints(cls)
    kinds = {item.name: hints[item.name] for item in dataclasses.fields(cls)}
    fields = [
        (name, _keys_alone(kind) if dataclasses.is_dataclass(kind) else kind, field(default=None)) for name, kind in kinds.items()
    ]
    return dataclasses.make_dataclass(cls.__name__, fields, frozen=True, kw_only=True)


@cache
def _schema(cls: Any, sections: tuple[tuple[str, type], ...]) -> type:
    extra: list[tuple[str, Any, Any]] = [(name, kind, field(default_factory=kind)) for name, kind in sections]
    extra.append(("arguments", str, field(default=ARGUMENTS_CLASS)))
    return dataclasses.make_dataclass("Configuration", extra, bases=(cls,), frozen=True, kw_only=True)


def _masked(source: Source, used: Iterable[str]) -> Iterator[tuple[Origin | None, str]]:
    """Yields the values that were masked when they were stored, in `config.yaml` of a run; of the sections that concern machines,
    in those that are used."""
    hosts = source.data.get("hosts")
    env = hosts.get("env") if isinstance(hosts, Mapping) else None
    hidden = [("hosts", "env", name) for name, value in (env.items() if isinstance(env, Mapping) else ()) if value == MASK]
    not_used = set(ORCHESTRATOR_SECTIONS) - set(used)
    for path in (*hidden, *masked_keys(source.data)):
        if path[0] not in not_used:
            # An override reaches no item of a list.
            keys = tuple(itertools.takewhile(lambda part: isinstance(part, str), path))
            value = "VALUE" if keys == path else "[VALUE, ...]"
            text = f"{yaml_source.shown(path)}: masked, for it had a secret; give {yaml_source.shown(keys)}={value}"
            yield source.origin(path), text


def _split(cls: type[TrainingArguments], value: Any) -> Settings:
    """Splits a value of `schema_of(cls)` into the parts of the settings. Raises ValueError if the folder `model.pretrained` has
    no model that is understood."""
    training = cls(**{item.name: getattr(value, item.name) for item in dataclasses.fields(cls) if item.init})
    if not documents.is_url(training.storage):
        # Made absolute here: the processes of a job have other working directories.
        training = dataclasses.replace(training, storage=_absolute(training.storage))
    if training.model.pretrained is not None:
        model = dataclasses.replace(training.model, pretrained=_absolute(training.model.pretrained))
        training = pretrained.resolved(dataclasses.replace(training, model=model))
    if training.data.tokenizer is not None and training.data.tokenizer != BYTES:
        data = dataclasses.replace(training.data, tokenizer=_absolute(training.data.tokenizer))
        training = dataclasses.replace(training, data=data)
    if training.init_from is not None:
        init_from = dataclasses.replace(training.init_from, path=_absolute(training.init_from.path))
        training = dataclasses.replace(training, init_from=init_from)
    return Settings(
        training=training,
        arguments_class=value.arguments,
        machines={name: getattr(value, name) for name in ORCHESTRATOR_SECTIONS},
    )


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.join(_base_folder(os.getcwd()), os.path.expanduser(path)))


def _base_folder(working_dir: str) -> str:
    """Returns the base of relative storage paths: the working folder; in a submitted job the home folder.

    The working folder of a submitted job is a temporary copy that Ray deletes. The next job would not find its checkpoints there.
    """
    return os.path.expanduser("~") if is_copy(working_dir) else working_dir


def _arguments_class(path: Any) -> type[TrainingArguments]:
    """Returns the class that `arguments` names. Raises ValueError."""
    try:
        cls = load_object(path if isinstance(path, str) else str(path))
    except ValueError as error:
        raise ValueError(f"arguments: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, TrainingArguments) and dataclasses.is_dataclass(cls)):
        raise ValueError(f"arguments: {path!r} is {cls!r}: expected a dataclass that extends TrainingArguments")
    taken = [item.name for item in dataclasses.fields(cls) if item.name in (*ORCHESTRATOR_SECTIONS, "arguments")]
    if taken:
        raise ValueError(f"arguments: {path!r} has a field {taken[0]!r}: that key has a meaning already")
    return cls


def _error(source: Source, problems: list[tuple[Origin | None, str]]) -> ConfigError:
    """Problems in the order of the file, then those of overrides and of the whole."""

    def line(problem: tuple[Origin | None, str]) -> float:
        origin = problem[0]
        return origin.line if origin is not None and origin.line is not None else float("inf")

    return ConfigError(source.name, (f"{origin}: {text}" if origin else text for origin, text in sorted(problems, key=line)))
