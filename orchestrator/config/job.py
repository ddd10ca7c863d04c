"""The configuration of a job: a YAML file and overrides in, checked dataclasses out, or every error at once.

Top-level keys of the file are the fields of `trainers.config.arguments.TrainingArguments`, or of the subclass that
`arguments` names; beside them lie the sections `hosts` (cluster/hosts/config.py), `driver` (here) and `tracking`
(orchestrator/tracking).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from cluster.agent.watchdog import WatchdogConfig
from cluster.hosts import config as topology
from cluster.hosts.config import HostsConfig
from orchestrator.config import validate, yaml_source
from orchestrator.config.yaml_source import ConfigError, Origin, Source
from orchestrator.policies.elasticity import ElasticityPolicy
from orchestrator.policies.quarantine import QuarantinePolicy
from orchestrator.policies.restart import RestartPolicy
from orchestrator.policies.stragglers import StragglerPolicy
from orchestrator.tracking.config import TrackingConfig
from trainers.config.arguments import ORCHESTRATOR_SECTIONS, TrainingArguments, load_object
from trainers.config.masking import MASK, masked
from trainers.config.section import Section, require
from trainers.storage import documents

__all__ = ["ConfigError", "DriverConfig", "JobConfig", "build", "load", "shown", "to_dict", "to_yaml"]

ARGUMENTS_CLASS = "trainers.config.arguments:TrainingArguments"
UNPACKED_BY_RAY = "/runtime_resources/working_dir_files/"
"""In the path of the working folder of a job that was submitted with `--working-dir`."""


@dataclass(frozen=True, kw_only=True)
class DriverConfig(Section):
    """The driver, and the Ray it runs on."""

    address: str | None = None
    """Of a running Ray cluster; default: `RAY_ADDRESS`, and without that a Ray of its own on this machine."""
    supervise: bool = False
    """Under real Ray Train even where this command started Ray itself (some 6 s slower to start)."""
    dashboard: bool = False
    """Start Ray's dashboard, where this command starts Ray itself."""
    agent_lease_s: float = 120.0
    """An agent that hears from no driver for so long ends its processes, gives its machine back and leaves. A driver that dies
    and is started again within that time finds the training going on."""
    replay: str | None = None
    """A JSON file with another run's `lineage` and `skipped_batches` (its summary will do): trains along it, on as many hosts at
    each batch. For comparing runs (`verify`, `chaos`)."""
    precompile: bool | None = None
    """Whether hosts compile ahead, beside the training, for the gang that there will be if a host is lost, or comes back: each
    with another process, that has the data open and no state. Default: CPU hosts do. On GPUs what training leaves of their memory
    must be enough to compile in; the processes of TPUs have them to themselves."""
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    quarantine: QuarantinePolicy = field(default_factory=QuarantinePolicy)
    elasticity: ElasticityPolicy = field(default_factory=ElasticityPolicy)
    stragglers: StragglerPolicy = field(default_factory=StragglerPolicy)

    def __post_init__(self):
        require(self.agent_lease_s >= 10, f"agent_lease_s = {self.agent_lease_s}: expected at least 10")


@dataclass(frozen=True, kw_only=True, repr=False)
class JobConfig:
    """Everything a job was asked to do. Made by `load` or `build`."""

    training: TrainingArguments
    hosts: HostsConfig
    driver: DriverConfig
    tracking: TrackingConfig
    arguments_class: str = ARGUMENTS_CLASS

    def __repr__(self) -> str:
        """Without secrets: Ray Train shows what it is given to all who may see its dashboard."""
        return f"JobConfig({shown(self)})"

    @property
    def run_dir(self) -> str:
        """The run's folder: absolute, or a URL."""
        return documents.join(self.training.storage, self.training.name)


def load(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> JobConfig:
    """Reads a YAML file; each override is `section.key=value`. The run is named after the file, unless it says `name`.

    Raises ConfigError with every problem, in the order of the file.
    """
    source = yaml_source.read(path)
    yaml_source.override(source, overrides)
    source.data.setdefault("name", Path(path).stem)
    return _build(source)


def build(data: Mapping[str, Any], name: str = "configuration") -> JobConfig:
    """From data of the form that the file has, such as `to_dict` gives. Raises ConfigError."""
    return _build(Source(name, dict(data)))


def to_dict(config: JobConfig) -> dict[str, Any]:
    """Plain data, for JSON and YAML: `build(to_dict(config)) == config`."""
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in ORCHESTRATOR_SECTIONS}
    named = {} if config.arguments_class == ARGUMENTS_CLASS else {"arguments": config.arguments_class}
    return _plain(named | dataclasses.asdict(config.training) | sections)


def shown(config: JobConfig) -> dict[str, Any]:
    """`to_dict`, to be shown or stored: without the values of environment variables and the user information of URLs."""
    data = masked(to_dict(config))
    return {**data, "hosts": {**data["hosts"], "env": dict.fromkeys(data["hosts"]["env"], MASK)}}


def to_yaml(config: JobConfig) -> str:
    """`shown`, for people."""
    return yaml.safe_dump(shown(config), sort_keys=False, width=120, allow_unicode=True)


def _build(source: Source) -> JobConfig:
    problems = list(source.problems)
    arguments_class = source.data.get("arguments") or ARGUMENTS_CLASS
    cls, problem = _arguments_class(arguments_class)
    if problem:
        problems.append((source.origin(("arguments",)), problem))
    form = _whole(cls)  # type: ignore[arg-type]  # mypy: a class is not hashable
    whole, found = validate.check(form, source)
    if problem:
        # Keys of the class that could not be had would all look unknown.
        known = {item.name for item in dataclasses.fields(form)}
        found = {path: texts for path, texts in found.items() if not path or path[0] in known}
    problems += [(source.origin(path), text) for path, texts in found.items() for text in texts]
    config = None if whole is None else _split(cls, whole)
    if config is not None:
        problems += [(None, text) for text in _cross_check(config, wrong={str(path[0]) for path in found})]
    if config is None or problems:
        raise _error(source, problems)
    return config


def _split(cls: type[TrainingArguments], whole: Any) -> JobConfig:
    training = cls(**{item.name: getattr(whole, item.name) for item in dataclasses.fields(cls) if item.init})
    if not documents.is_url(training.storage):
        # Made absolute here: the driver and the training processes have working directories of their own.
        folder = os.path.join(_base_folder(os.getcwd()), os.path.expanduser(training.storage))
        training = dataclasses.replace(training, storage=os.path.abspath(folder))
    sections = {name: getattr(whole, name) for name in ORCHESTRATOR_SECTIONS}
    return JobConfig(training=training, arguments_class=whole.arguments, **sections)


def _base_folder(working_dir: str) -> str:
    """What a relative storage path is relative to: the working folder; in a submitted job, the home folder, since the working
    folder is then a copy of the submitter's that Ray deletes, and the next job would look for its checkpoints in another."""
    return os.path.expanduser("~") if UNPACKED_BY_RAY in working_dir else working_dir


def _arguments_class(path: Any) -> tuple[type[TrainingArguments], str | None]:
    """The class that `arguments` names, and what is wrong with it; the rest is then checked against the default."""
    try:
        cls = load_object(path if isinstance(path, str) else str(path))
    except ValueError as error:
        return TrainingArguments, f"arguments: {error}"
    if not (isinstance(cls, type) and issubclass(cls, TrainingArguments) and dataclasses.is_dataclass(cls)):
        return TrainingArguments, f"arguments: {path!r} is {cls!r}: expected a dataclass that extends TrainingArguments"
    taken = [item.name for item in dataclasses.fields(cls) if item.name in (*ORCHESTRATOR_SECTIONS, "arguments")]
    if taken:
        return TrainingArguments, f"arguments: {path!r} has a field {taken[0]!r}: that key has a meaning already"
    return cls, None


@cache
def _whole(cls: type[TrainingArguments]) -> type:
    """One dataclass for everything that a file may say, so that everything is checked together."""
    sections = {"hosts": HostsConfig, "driver": DriverConfig, "tracking": TrackingConfig}
    extra: list[tuple[str, Any, Any]] = [(name, kind, field(default_factory=kind)) for name, kind in sections.items()]
    extra.append(("arguments", str, field(default=ARGUMENTS_CLASS)))
    return dataclasses.make_dataclass("Configuration", extra, bases=(cls,), frozen=True, kw_only=True)


def _cross_check(config: JobConfig, wrong: set[str]) -> Iterator[str]:
    """What only the sections together can get wrong. Those of `wrong` have been told; they hold defaults here."""
    if not wrong & {"mesh", "global_batch_size", "accumulation_steps", "hosts"}:
        hosts, per_host = config.hosts, topology.devices_per_host(config.hosts)
        for count in sorted({topology.min_hosts(hosts), topology.num_hosts(hosts)}):
            try:
                config.training.check_devices(count * per_host)
            except ValueError as error:
                yield f"{error} (hosts: {count} x {per_host} devices)"
    if config.driver.precompile and config.hosts.kind == "tpu":
        yield "driver.precompile = true: expected null or false with hosts.kind = tpu, whose devices are one process's at a time"
    if (
        not wrong & {"storage", "name"}
        and not documents.is_url(config.run_dir)
        and (problem := _in_the_way(Path(config.run_dir)))
    ):
        yield f"storage: {problem}; set storage=PATH to a folder or bucket that this user and every host can write to"


def _in_the_way(folder: Path) -> str | None:
    """Why the folder could not be made or written to, without making it."""
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not nearest.is_dir():
        return f"{folder} cannot be made: {nearest} is a file"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"{folder} cannot be written: no permission to write to {nearest}"


def _error(source: Source, problems: list[tuple[Origin | None, str]]) -> ConfigError:
    """Problems in the order of the file, then those of overrides and of the whole."""

    def line(problem: tuple[Origin | None, str]) -> float:
        origin = problem[0]
        return origin.line if origin is not None and origin.line is not None else float("inf")

    return ConfigError(source.name, (f"{origin}: {text}" if origin else text for origin, text in sorted(problems, key=line)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
