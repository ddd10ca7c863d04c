"""The machines that a run asks for, and the devices that their training processes see. Pure functions of the configuration.

*Host*: one TPU VM, one GPU machine, or one CPU process standing for a host; host i of the gang is process i of JAX.
A TPU run counts its hosts slice by slice, and inside a slice by the worker id that the machine has in it.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.hosts import environment
from cluster.hosts.tpu import CHIPS_PER_HOST, CORES_PER_CHIP, DEVICES_PER_CHIP, EIGHT_CHIP_GENERATIONS, generation, topology_dims

SLICE_NAME_LABEL = "ray.io/tpu-slice-name"
WORKER_ID_LABEL = "ray.io/tpu-worker-id"
POD_TYPE_LABEL = "ray.io/tpu-pod-type"
NODE_ID_LABEL = "ray.io/node-id"


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """The hosts of a run and how to get them (configuration section `hosts`)."""

    kind: Literal["cpu", "gpu", "tpu"] = "cpu"
    """`cpu`: processes that stand for hosts. `gpu`: machines with GPUs. `tpu`: TPU VMs, in whole slices."""
    count: int | None = None
    """Hosts of the gang, no fewer and no more; 1 if not given. On TPU it follows from `topology` and `slices`."""
    min: int | None = None
    """CPU and GPU, with `max` and instead of `count`: the run goes on with any number of hosts from `min` to `max`."""
    max: int | None = None
    """See `min`: how many hosts the run has when all are there."""
    spares: int = 0
    """Hosts (on TPU: whole slices) held ready beside the gang. A spare replaces a host that is lost. A run starts without spares
    if the cluster has none."""
    wait_for_max_s: float = 5.0
    """How long a start that has `min` hosts (`min_slices`) waits for more of them, up to `max` (`max_slices`)."""
    devices_per_host: int | None = None
    """CPU: devices that each process is made to see; GPU: GPUs of a machine; 1 if not given. On TPU it follows."""
    cpus_per_host: float = 1.0
    """CPUs that Ray sets aside for each host."""
    accelerator: str | None = None
    """TPU generation: v4, v5p, v5e, v6e, ..."""
    topology: str | None = None
    """Shape of one TPU slice in chips: 2x2x2, 4x4, ..."""
    slices: int = 1
    """TPU slices of the gang, no fewer and no more."""
    min_slices: int | None = None
    """TPU, with `max_slices` and instead of `slices`: the run goes on with any number of slices between them."""
    max_slices: int | None = None
    """See `min_slices`: how many slices the run has when all are there."""
    spread: bool = False
    """CPU: each host on a machine of its own. GPU and TPU hosts always are."""
    start_timeout_s: float = 120.0
    """How long a start waits for the machines of the gang (`count`, or `min`). Then it gives up and says what is missing."""
    replacement_timeout_s: float | None = None
    """The same for a run that has lost hosts, when too few are left and there is no spare. None: no limit. The run shows that it
    waits, and a stop request ends the wait."""
    notice_file: str | None = None
    """A path on each machine. When a file appears there, the machine is about to be taken away: the run saves and goes on without
    it. The file may hold JSON with `reason` and `deadline_s`."""
    metadata: Literal["none", "gce"] = "none"
    """Another source of preemption notices: `gce` asks Google Cloud's metadata server."""
    log_dir: str = "~/.cache/gangway/logs"
    """A folder on a local disk of each machine, for the logs of the training processes. On a shared disk that hangs, the agent
    would hang too. The ends of the logs are copied to the run's folder."""
    env: dict[str, str] = field(default_factory=dict, repr=False)
    """More environment variables for the training processes. They override all others. Their values are never shown or stored."""
    compiler_flags: bool = True
    """Whether XLA gets the flags that are known to help on hosts of this kind; the dry run shows them. What `env`, or a machine's
    own environment, sets in XLA_FLAGS (on TPU: LIBTPU_INIT_ARGS) comes over them."""
    private_files: bool = True
    """Whether only the user of the run can read the files that it writes, on its hosts and in its storage (0600, folders 0700).
    false: the umask of the processes decides, which a folder that a group shares needs."""

    def __post_init__(self):
        if problems := list(_problems(self)):
            raise ValueError("\n".join(problems))


def _problems(config: HostsConfig) -> Iterator[str]:
    """Yields a line for each problem of the section."""
    for name in ("count", "min", "max", "spares", "devices_per_host", "slices", "min_slices", "max_slices"):
        value, least = getattr(config, name), 0 if name == "spares" else 1
        if value is not None and value < least:
            yield f"{name} = {value}: expected a whole number of at least {least}"
    for name in ("cpus_per_host", "start_timeout_s", "replacement_timeout_s"):
        value = getattr(config, name)
        if value is not None and value <= 0:
            yield f"{name} = {value}: expected more than 0"
    if config.wait_for_max_s < 0:
        yield f"wait_for_max_s = {config.wait_for_max_s}: expected at least 0"
    yield from environment.problems(config.env)
    if problem := _log_dir_problem(config.log_dir):
        yield problem
    yield from _tpu_problems(config) if config.kind == "tpu" else _elastic_problems(config)


def _log_dir_problem(path: str) -> str | None:
    """Returns what is wrong with `log_dir`. `~` is that of this machine: a user mostly has the same one everywhere."""
    home, full = os.path.expanduser("~"), os.path.normpath(os.path.expanduser(path))
    advice = "expected a folder for logs alone, such as ~/.cache/gangway/logs or /scratch/logs"
    if "://" in path or not (os.path.isabs(full) or path.startswith("~/")):
        return f"log_dir = {path!r}: a path that begins at / or ~/, on a disk of each machine; {advice}"
    # Also through links, and folders above: what is in them is the user's.
    real, home = os.path.realpath(full), os.path.realpath(home)
    if real in (home, os.getcwd()) or os.path.commonpath([real, home]) == real:
        return f"log_dir = {path!r}: this is {real}, which holds other things than logs; {advice}"
    return None


def _elastic_problems(config: HostsConfig) -> Iterator[str]:
    for name in ("accelerator", "topology", "slices", "min_slices", "max_slices"):
        value = getattr(config, name)
        if value != (1 if name == "slices" else None):
            yield f"{name} = {value}: only TPU hosts have one; set kind: tpu, or leave {name} out"
    yield from _range_problems(config, "count", "min", "max", given=config.count is not None)


def _range_problems(config: HostsConfig, fixed: str, low: str, high: str, *, given: bool) -> Iterator[str]:
    """Yields what is wrong with a fixed number and a range. `given`: whether the fixed number was set."""
    least, most = getattr(config, low), getattr(config, high)
    if given and (least is not None or most is not None):
        yield f"{fixed} = {getattr(config, fixed)}, {low} = {least}, {high} = {most}: give either {fixed}, or {low} and {high}"
    elif (least is None) != (most is None):
        name, missing = (high, low) if least is None else (low, high)
        yield f"{name} = {getattr(config, name)}: give {missing} too, or {fixed} instead"
    elif least is not None and most is not None and least > most:
        yield f"{low} = {least}: expected at most {high}, which is {most}"


def _tpu_problems(config: HostsConfig) -> Iterator[str]:
    for name in ("min", "max"):
        if getattr(config, name) is not None:
            value = getattr(config, name)
            yield f"{name} = {value}: a TPU run grows and shrinks by whole slices; set {name}_slices instead"
    yield from _range_problems(config, "slices", "min_slices", "max_slices", given=config.slices != 1)
    if not (config.accelerator and config.topology):
        yield "kind: tpu needs accelerator (such as v5e) and topology (such as 4x4)"
        return
    problems = []
    for parse, text in ((generation, config.accelerator), (topology_dims, config.topology)):
        try:
            parse(text)
        except ValueError as error:
            problems.append(str(error))
    yield from problems
    # The chips of a slice can be counted only if both could be parsed.
    if not problems and config.slices >= 1:
        yield from _shape_problems(config)


def _shape_problems(config: HostsConfig) -> Iterator[str]:
    chips, per_host = num_chips(config), chips_per_host(config)
    if chips % per_host:
        yield f"topology {config.topology} of {config.accelerator}: {chips} chips do not fill hosts of {per_host} chips each"
        return
    for name, derived in (("count", num_hosts(config)), ("devices_per_host", devices_per_host(config))):
        value = getattr(config, name)
        if value not in (None, derived):
            shape = f"{max_slices(config)} slice(s) {config.topology} of {config.accelerator}"
            yield f"{name} = {value}: {shape} have {derived}; leave it out"


def num_chips(config: HostsConfig) -> int:
    """Chips of one TPU slice."""
    return math.prod(topology_dims(config.topology or ""))


def chips_per_host(config: HostsConfig) -> int:
    """TPU chips of one host."""
    name, chips = generation(config.accelerator or ""), num_chips(config)
    if name in EIGHT_CHIP_GENERATIONS and chips <= 8:
        return chips
    return CHIPS_PER_HOST[name]


def hosts_per_slice(config: HostsConfig) -> int:
    """Hosts that share one fast interconnect: those of a TPU slice; all hosts elsewhere."""
    if config.kind == "tpu":
        return num_chips(config) // chips_per_host(config)
    return config.count or config.max or 1


def num_hosts(config: HostsConfig) -> int:
    """Hosts of the gang when it has all it asks for, spares not counted."""
    return hosts_per_slice(config) * max_slices(config)


def min_hosts(config: HostsConfig) -> int:
    """Hosts without which the run cannot go on."""
    if config.kind == "tpu":
        return hosts_per_slice(config) * min_slices(config)
    return config.min or num_hosts(config)


def min_slices(config: HostsConfig) -> int:
    """TPU slices without which the run cannot go on."""
    return config.min_slices or config.slices


def max_slices(config: HostsConfig) -> int:
    """TPU slices of the gang when it has all it asks for, spares not counted."""
    return config.max_slices or config.slices


def hosts_at_a_time(config: HostsConfig) -> int:
    """By how many hosts a gang grows and shrinks: a TPU run by those of a slice."""
    return hosts_per_slice(config) if config.kind == "tpu" else 1


def slots_of_slices(config: HostsConfig, numbers: Collection[int]) -> set[int]:
    """These slots, and those that share a TPU slice with one of them."""
    size = hosts_at_a_time(config)
    return {number // size * size + worker for number in numbers for worker in range(size)}


def slots_of_whole_slices(config: HostsConfig, numbers: Collection[int]) -> set[int]:
    """Returns the slots of which the whole TPU slice is among `numbers`."""
    size, present = hosts_at_a_time(config), set(numbers)
    counts = Counter(number // size for number in present)
    return {number for number in present if counts[number // size] == size}


def devices_per_host(config: HostsConfig) -> int:
    """Devices that JAX sees in each training process."""
    if config.kind == "tpu":
        return chips_per_host(config) * DEVICES_PER_CHIP.get(generation(config.accelerator or ""), 1)
    return config.devices_per_host or 1


def num_devices(config: HostsConfig) -> int:
    """Devices of the whole run."""
    return num_hosts(config) * devices_per_host(config)


def slice_of(config: HostsConfig, host: int) -> int:
    """The slice that a host belongs to."""
    return host // hosts_per_slice(config)


def pod_type(config: HostsConfig) -> str:
    """The cloud's name of one slice: `v4-16` is a v4 slice of 16 cores."""
    name = generation(config.accelerator or "")
    return f"{name}-{num_chips(config) * CORES_PER_CHIP.get(name, 2)}"


def bundle_resources(config: HostsConfig) -> dict[str, float]:
    """Returns the Ray resources that one host takes of its machine."""
    resources: dict[str, float] = {"CPU": config.cpus_per_host}
    if config.kind == "gpu":
        resources["GPU"] = devices_per_host(config)
    if config.kind == "tpu":
        resources["TPU"] = chips_per_host(config)
    return resources


def strategy(config: HostsConfig) -> str:
    """Ray's placement strategy for the hosts of the gang."""
    return "STRICT_SPREAD" if config.kind != "cpu" or config.spread else "PACK"


def spreads(config: HostsConfig) -> bool:
    """Whether hosts must not share a machine."""
    return strategy(config) == "STRICT_SPREAD"


def slice_bundle_labels(config: HostsConfig, slice_names: Sequence[str | None]) -> list[dict[str, str]]:
    """One label selector for each host in gang order, so that process ids follow the worker ids that the machines have.

    A slice of one host has no name of its own (None): any machine of the right type will do.
    """
    return [
        {
            POD_TYPE_LABEL: pod_type(config),
            WORKER_ID_LABEL: str(worker),
            **({SLICE_NAME_LABEL: name} if name is not None else {}),
        }
        for name in slice_names
        for worker in range(hosts_per_slice(config))
    ]
