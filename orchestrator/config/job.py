"""The configuration of a job: what `trainers.settings` reads, with the classes of the sections that concern machines, and what
these and the others together get wrong.

The sections are `hosts` (cluster/hosts/config.py), `driver` (here), `tracking` (orchestrator/tracking) and `notify`
(orchestrator/policies/notices.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from cluster.hosts import config as hosts_config
from gangway.config import near_keys, yaml_source
from gangway.config.conversion import convert_sections
from gangway.config.masking import MASK, masked
from gangway.config.section import Section, default_of, require_none
from gangway.config.yaml_source import ConfigError, Source
from gangway.storage import documents, opening
from gangway.storage.store import StorageRefused
from orchestrator.policies.elasticity import ElasticityPolicy
from orchestrator.policies.notices import NotifyConfig
from orchestrator.policies.quarantine import QuarantinePolicy
from orchestrator.policies.restart import RestartPolicy
from orchestrator.policies.stragglers import StragglerPolicy
from orchestrator.policies.watchdog import WatchdogConfig
from orchestrator.tracking.config import TrackingConfig
from trainers import settings
from trainers.config import attention
from trainers.config.arguments import ORCHESTRATOR_SECTIONS, TrainingArguments
from trainers.config.mesh import SLICE

__all__ = ["ConfigError", "DriverConfig", "JobConfig", "build", "load", "shown", "to_dict", "to_yaml"]

CONFIG, GIVEN = "config.yaml", "#   "
"""The file with the settings of the newest launch, and how its lines begin that say what differs from the defaults."""
SHOWN_LINES_PER_S = 100


@dataclass(frozen=True, kw_only=True)
class DriverConfig(Section):
    """The driver, and the Ray it runs on."""

    address: str | None = None
    """The address of a running Ray cluster. Default: `RAY_ADDRESS`; without that a new, private Ray on this machine."""
    supervise: bool = False
    """Whether Ray Train runs the driver as a supervised process even if this command has started Ray (about 6 s slower to
    start)."""
    dashboard: bool = False
    """Start Ray's dashboard, where this command starts Ray itself. The page asks for a token: set `RAY_AUTH_TOKEN` to one of
    your own before the start, and give it that."""
    console_hosts: Literal["all"] | tuple[int, ...] = ()
    """The hosts whose printed lines the console shows, too: `all`, or numbers such as [0, 3]. Up to 100 lines a second are
    shown, of each host its share. The folder `logs` of the run has the lines of all hosts in any case."""
    agent_lease_s: float = 120.0
    """An agent without a call from a driver for so long ends its processes, gives its machine back and exits. A driver that is
    started again within that time finds the gang still training."""
    replay: str | None = None
    """A JSON file with the `lineage` and `skipped_batches` of another run, such as its summary. The run then trains with the same
    number of hosts at each batch. For comparing runs (`verify`, `chaos`)."""
    precompile: bool | None = None
    """Whether hosts compile ahead, beside the training, the programs of the gang after a host is lost or comes back. Each host
    uses another process for it, which has the data open and no state. Default: true for CPU hosts. On GPUs the memory that
    training leaves must suffice for compiling. It is not possible on TPUs, which only one process at a time can open."""
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    quarantine: QuarantinePolicy = field(default_factory=QuarantinePolicy)
    elasticity: ElasticityPolicy = field(default_factory=ElasticityPolicy)
    stragglers: StragglerPolicy = field(default_factory=StragglerPolicy)

    def __post_init__(self):
        problems = [*convert_sections(self)]
        if not self.agent_lease_s >= 10:
            problems.append(f"agent_lease_s = {self.agent_lease_s}: expected at least 10")
        require_none(problems)

    def shown_lines(self, host: int, num_hosts: int) -> int:
        """Returns how many of the lines that a host prints are shown in a second."""
        shown = range(num_hosts) if self.console_hosts == "all" else self.console_hosts
        return max(1, SHOWN_LINES_PER_S // len(shown)) if host in shown else 0


SECTIONS = {"hosts": hosts_config.HostsConfig, "driver": DriverConfig, "tracking": TrackingConfig, "notify": NotifyConfig}
"""The sections beside the arguments, by their names."""


@dataclass(frozen=True, kw_only=True, repr=False)
class JobConfig:
    """Everything a job was asked to do. Made by `load` or `build`."""

    training: TrainingArguments
    hosts: hosts_config.HostsConfig
    driver: DriverConfig
    tracking: TrackingConfig
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    arguments_class: str = settings.ARGUMENTS_CLASS
    """The key `arguments`: the class of the arguments, `package.module:Class`, a subclass of `TrainingArguments` that has the
    keys of your own trainer."""

    def __repr__(self) -> str:
        """Without secrets: Ray Train shows its arguments to everybody who can see its dashboard."""
        return f"JobConfig({shown(self)})"

    @property
    def run_dir(self) -> str:
        """The run's folder: absolute, or a URL."""
        return documents.join(self.training.storage, self.training.name)


def load(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> JobConfig:
    """Reads a YAML file; each override is `section.key=value`. The run is named after the file, unless it says `name`.

    Raises ConfigError with every problem, in the order of the file.
    """
    return _job(settings.load(path, overrides, SECTIONS, _cross_check))


def build(data: Mapping[str, Any], name: str = "configuration", overrides: Iterable[str] = ()) -> JobConfig:
    """Makes a configuration from data in the form of the file, such as `to_dict` returns; `overrides` are those of `load`. Raises
    ConfigError."""
    source = Source(name, dict(data))
    yaml_source.override(source, overrides)
    return _job(settings.build(source, SECTIONS, _cross_check))


def to_dict(config: JobConfig) -> dict[str, Any]:
    """Returns plain data, for JSON and YAML: `build(to_dict(config)) == config`."""
    sections = {name: asdict(getattr(config, name)) for name in ORCHESTRATOR_SECTIONS}
    named = {} if config.arguments_class == settings.ARGUMENTS_CLASS else {"arguments": config.arguments_class}
    return _plain(named | asdict(config.training) | sections)


def shown(config: JobConfig) -> dict[str, Any]:
    """Returns `to_dict` for showing or storing: without values of environment variables and user information in URLs."""
    data = masked(to_dict(config))
    hidden = {"webhook": config.notify.shown()}  # whoever knows it may write there
    return {
        **data,
        "hosts": {**data["hosts"], "env": dict.fromkeys(data["hosts"]["env"], MASK)},
        "notify": {**data["notify"], **hidden},
    }


def to_yaml(config: JobConfig) -> str:
    """Returns `shown` as YAML text."""
    return yaml_source.to_text(shown(config))


def given_yaml(config: JobConfig) -> str:
    """Returns what of `shown` differs from the defaults, as YAML text."""
    return yaml_source.to_text(among(shown(config), given(config)))


def resolved_yaml(config: JobConfig) -> str:
    """Returns the file `config.yaml` of a run: all settings, so that `load` gives the same configuration, below those that differ
    from the defaults, as comments. Secrets are masked; `load` asks for them."""
    differs = "".join(f"{GIVEN}{line}\n" for line in given_yaml(config).splitlines())
    return f"# What differs from the defaults:\n{differs}# All settings, as they were resolved:\n{to_yaml(config)}"


def given_in(text: str) -> str:
    """Returns what differs from the defaults, as YAML text, of a text of `resolved_yaml`; empty of another one."""
    return "\n".join(line.removeprefix(GIVEN) for line in text.splitlines() if line.startswith(GIVEN))


def given(config: JobConfig) -> dict[str, Any]:
    """Returns the keys whose values differ from the defaults, in sections; a value that is no section is None here."""
    sections = {name: found for name in ORCHESTRATOR_SECTIONS if (found := _differing(getattr(config, name)))}
    named = {} if config.arguments_class == settings.ARGUMENTS_CLASS else {"arguments": None}
    return named | _differing(config.training) | sections


def _differing(section: Any) -> dict[str, Any]:
    """Returns the keys of a section that differ from its defaults: a section, or None for a value. A section that is null by
    default is there as a whole."""
    found: dict[str, Any] = {}
    for item in fields(section):
        value, default = getattr(section, item.name), default_of(item)
        if is_dataclass(default) and type(value) is type(default):
            if inner := _differing(value):
                found[item.name] = inner
        elif value != default:
            found[item.name] = None
    return found


def among(data: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the data at these keys."""
    return {name: data[name] if inner is None else among(data[name], inner) for name, inner in keys.items()}


def as_settings(options: str) -> str:
    """Returns how options that a command does not know, such as `--learning_rate=1e-3`, are given to it: as settings."""
    schema: Any = settings.schema_of(TrainingArguments, SECTIONS)
    known, detail = {".".join(key) for key in near_keys.all_keys(schema)}, []
    for name, value in re.findall(r"--([\w.-]+)(?:[= ](?!-)(\S+))?", options):
        key = name.replace("-", "_")
        section, _, last = key.rpartition(".")
        here = [each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == section]
        found = [key] if key in known else near_keys.near(schema, section, here, last)
        detail += [f"{each}={value or 'VALUE'}" for each in found[:1]]
    return f"settings are given as key=value{f': {chr(32).join(detail)}' if detail else ', such as optimizer.learning_rate=1e-3'}"


def _job(made: settings.Settings) -> JobConfig:
    return JobConfig(training=made.training, arguments_class=made.arguments_class, **made.machines)


def _problems_of_slices(sizes: Mapping[str, int], hosts: hosts_config.HostsConfig, count: int) -> Iterator[str]:
    """Yields why the axis `slice` of a mesh does not fit so many hosts."""
    asked = sizes.get(SLICE, 1)
    if asked == 1:
        return
    if hosts.kind == "tpu":
        slices = count // hosts_config.hosts_per_slice(hosts)
        if asked != slices:
            yield f"mesh.slice = {asked}: expected {slices}, the slices of {count} hosts, or 1"
    elif count > 1 and count % asked:  # of one host the slices are groups of its devices
        fits = ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
        yield f"mesh.slice = {asked}: expected a divisor of the {count} hosts ({fits}): a slice is whole hosts"


def _cross_check(made: settings.Settings, wrong: set[str]) -> Iterator[str]:
    """Yields problems between sections. Keys in `wrong` have been reported already and hold defaults here: they are not
    checked."""
    config = _job(made)
    if not wrong & {"mesh", "global_batch_size", "accumulation_steps", "hosts"}:
        hosts, per_host = config.hosts, hosts_config.devices_per_host(config.hosts)
        for count in sorted({hosts_config.min_hosts(hosts), hosts_config.num_hosts(hosts)}):
            try:
                yield from _problems_of_slices(config.training.check_devices(count * per_host), hosts, count)
            except ValueError as error:
                yield f"{error} (hosts: {count} x {per_host} devices)"
    if not wrong & {"model", "hosts"}:
        yield from attention.check_platform(config.training.model.attention, config.hosts.kind)
    if "hosts" not in wrong and config.driver.console_hosts != "all":
        last = hosts_config.num_hosts(config.hosts) - 1
        if absent := [host for host in config.driver.console_hosts if not 0 <= host <= last]:
            given = list(config.driver.console_hosts)
            yield f"driver.console_hosts = {given}: there is no host {absent[0]}; expected 0 to {last}, or all"
    if config.driver.precompile and config.hosts.kind == "tpu":
        yield "driver.precompile = true: expected null or false with hosts.kind = tpu, whose devices are one process's at a time"
    model = None if "tracking" in wrong else config.tracking.register_model
    if model is not None and not config.training.checkpoint.save_at_end:
        yield (
            f"tracking.register_model = {model!r}: checkpoint.save_at_end = false keeps no model of the end; set it to true, or "
            "leave register_model out"
        )
    if not wrong & {"storage", "name"} and (problem := _storage_problem(config.run_dir)):
        yield f"storage: {problem}; set storage=PATH to a folder or bucket that this user and every host can write to"


def _storage_problem(run_dir: str) -> str | None:
    """Returns why the run's folder cannot be created or written, without creating it; None if it can. Nothing is asked of a
    bucket."""
    if documents.is_url(run_dir):
        try:
            opening.parse(run_dir)
        except StorageRefused as error:
            return f"{run_dir}: {error.strerror}"
        return None
    folder = Path(run_dir)
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not nearest.is_dir():
        return f"{folder} cannot be made: {nearest} is a file"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"{folder} cannot be written: no permission to write to {nearest}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
