"""Which machines a run asks for, and what their training processes see: pure functions of the configuration.

*Host*: one TPU VM, one GPU machine, or one CPU process standing for a host; host i of the gang is process i of JAX.
A TPU run counts its hosts slice by slice, and inside a slice by the worker id that the machine has in it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

CHIPS_PER_HOST = {"v2": 4, "v3": 4, "v4": 4, "v5p": 4, "v5litepod": 4, "v6e": 4, "v7x": 4}
"""TPU chips of one VM, by generation: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm."""
EIGHT_CHIP_GENERATIONS = ("v5litepod", "v6e")
"""A slice of at most 8 chips of these is one VM with all of them."""
DEVICES_PER_CHIP = {"v2": 2, "v3": 2, "v7x": 2}
"""JAX devices of one chip where that is not 1: generations whose cores are programmed one by one."""
CORES_PER_CHIP = {"v5litepod": 1, "v6e": 1}
"""Cores of one chip where that is not 2: cloud names count cores (`v4-16` has 8 chips)."""
ALIASES = {"v5e": "v5litepod", "v5lite": "v5litepod", "tpu7x": "v7x", "v7": "v7x"}
MEGASCALE_PORT = 8081

SLICE_NAME_LABEL = "ray.io/tpu-slice-name"
WORKER_ID_LABEL = "ray.io/tpu-worker-id"
POD_TYPE_LABEL = "ray.io/tpu-pod-type"
NODE_ID_LABEL = "ray.io/node-id"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """The hosts of a run and how to get them (configuration section `hosts`)."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    kind: Literal["cpu", "gpu", "tpu"] = "cpu"
    count: int | None = None
    """Hosts of the gang; 1 if not given. On TPU it follows from `topology` and `slices`."""
    spares: int = 0
    """Hosts held ready beside the gang to take the place of one that is lost; a run starts without them if there are none."""
    devices_per_host: int | None = None
    """CPU: devices that each process is made to see; GPU: GPUs of a machine; 1 if not given. On TPU it follows."""
    cpus_per_host: float = 1.0
    """CPUs that Ray sets aside for each host."""
    accelerator: str | None = None
    """TPU generation: v4, v5p, v5e, v6e, ..."""
    topology: str | None = None
    """Shape of one TPU slice in chips: 2x2x2, 4x4, ..."""
    slices: int = 1
    spread: bool = False
    """CPU: each host on a machine of its own. GPU and TPU hosts always are."""
    start_timeout_s: float = 120.0
    """How long to wait for all machines of the gang before giving up and saying what is missing."""
    env: dict[str, str] = field(default_factory=dict)
    """More environment variables for the training processes; these win."""

    def __post_init__(self):
        for name, least in (("count", 1), ("spares", 0), ("devices_per_host", 1), ("slices", 1)):
            value = getattr(self, name)
            _require(value is None or value >= least, f"{name} = {value}: expected a whole number of at least {least}")
        for name in ("cpus_per_host", "start_timeout_s"):
            _require(getattr(self, name) > 0, f"{name} = {getattr(self, name)}: expected more than 0")
        if self.kind == "tpu":
            _check_tpu(self)
        else:
            _check_not_tpu(self)


def _check_not_tpu(config: HostsConfig) -> None:
    for name, default in (("accelerator", None), ("topology", None), ("slices", 1)):
        value = getattr(config, name)
        _require(value == default, f"{name} = {value}: only TPU hosts have one; set kind: tpu, or leave {name} out")


def _check_tpu(config: HostsConfig) -> None:
    _require(bool(config.accelerator and config.topology), "kind: tpu needs accelerator (such as v5e) and topology (such as 4x4)")
    _require(config.spares == 0, f"spares = {config.spares}: a TPU slice is replaced whole; spares are for cpu and gpu hosts")
    chips, per_host = num_chips(config), chips_per_host(config)
    _require(
        chips % per_host == 0,
        f"topology {config.topology} of {config.accelerator}: {chips} chips do not fill hosts of {per_host} chips each",
    )
    for name, derived in (("count", num_hosts(config)), ("devices_per_host", devices_per_host(config))):
        value = getattr(config, name)
        _require(
            value in (None, derived),
            f"{name} = {value}: {config.slices} slice(s) {config.topology} of {config.accelerator} have {derived}; leave it out",
        )


def generation(accelerator: str) -> str:
    """The TPU generation as Ray spells it: `TPU-V6E` is `v6e`, `v5e` is `v5litepod`. Raises ValueError for an unknown one."""
    name = accelerator.lower().removeprefix("tpu-")
    name = ALIASES.get(name, name)
    if name not in CHIPS_PER_HOST:
        known = sorted({*CHIPS_PER_HOST, "v5e"})
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"accelerator = {accelerator!r}: not a TPU generation; known: {', '.join(known)}{hint}")
    return name


def topology_dims(topology: str) -> tuple[int, ...]:
    """`2x2x4` as (2, 2, 4). Raises ValueError when it is not of that form."""
    parts = topology.strip().lower().split("x")
    good = len(parts) in (2, 3) and all(part.isdigit() and int(part) > 0 for part in parts)
    _require(good, f"topology = {topology!r}: expected two or three sizes such as 4x4 or 2x2x2")
    return tuple(int(part) for part in parts)


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
    return config.count or 1


def num_hosts(config: HostsConfig) -> int:
    """Hosts of the gang, spares not counted."""
    return hosts_per_slice(config) * config.slices


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


def bundle(config: HostsConfig) -> dict[str, float]:
    """What one host takes of its machine, in Ray's resources."""
    resources: dict[str, float] = {"CPU": config.cpus_per_host}
    if config.kind == "gpu":
        resources["GPU"] = devices_per_host(config)
    if config.kind == "tpu":
        resources["TPU"] = chips_per_host(config)
    return resources


def strategy(config: HostsConfig) -> str:
    """Ray's placement strategy for the hosts of the gang."""
    return "STRICT_SPREAD" if config.kind != "cpu" or config.spread else "PACK"


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


def process_env(config: HostsConfig, host: int, cache_dir: str) -> dict[str, str]:
    """Environment of the training process of `host`; a spare has the number that follows the last host's.

    On CPU each host has a compile cache of its own: the keys hold a fingerprint of the process's place, so a shared one is
    never hit. On TPU and GPU all hosts should read the same directory.
    """
    own = {
        "JAX_PLATFORMS": {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}[config.kind],
        "JAX_COMPILATION_CACHE_DIR": f"{cache_dir}/host-{host:04d}" if config.kind == "cpu" else cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    flags = config.env.get("XLA_FLAGS", "")
    if config.kind == "cpu":
        flags = f"{flags} --xla_force_host_platform_device_count={devices_per_host(config)}".strip()
    return {**own, **config.env, **({"XLA_FLAGS": flags} if flags else {})}


def megascale_env(slice_id: int, num_slices: int, coordinator_ip: str, port: int = MEGASCALE_PORT) -> dict[str, str]:
    """Tells a process of a run on several TPU slices where the others are; empty for one slice."""
    if num_slices == 1:
        return {}
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": coordinator_ip,
        "MEGASCALE_PORT": str(port),
        "MEGASCALE_NUM_SLICES": str(num_slices),
        "MEGASCALE_SLICE_ID": str(slice_id),
    }


@dataclass(frozen=True, kw_only=True)
class Node:
    """A living machine of the cluster as Ray sees it."""

    node_id: str
    ip: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class SliceState:
    """What the cluster has of one TPU slice."""

    name: str
    nodes: tuple[Node, ...]
    missing_workers: tuple[int, ...]
    busy: bool


def find_slices(config: HostsConfig, nodes: Sequence[Node]) -> list[SliceState]:
    """The slices of the wanted type in the cluster, broken and busy ones included."""
    by_name: dict[str, list[Node]] = {}
    for node in nodes:
        if node.labels.get(POD_TYPE_LABEL) == pod_type(config):
            name = node.labels.get(SLICE_NAME_LABEL) if hosts_per_slice(config) > 1 else node.node_id
            by_name.setdefault(name or f"(node {node.node_id} without the label {SLICE_NAME_LABEL})", []).append(node)
    return [_slice_state(config, name, members) for name, members in sorted(by_name.items())]


def _slice_state(config: HostsConfig, name: str, nodes: Sequence[Node]) -> SliceState:
    present = {node.labels.get(WORKER_ID_LABEL) for node in nodes}
    return SliceState(
        name=name,
        nodes=tuple(nodes),
        missing_workers=tuple(w for w in range(hosts_per_slice(config)) if str(w) not in present),
        busy=any(not _fits(bundle(config), node.free) for node in nodes),
    )


def unusable_slices(config: HostsConfig, nodes: Sequence[Node], avoid_nodes: Sequence[str] = ()) -> list[str]:
    """Names of slices that lack a host, or hold a host to avoid: a gang placed there would wait for ever."""
    return [s.name for s in find_slices(config, nodes) if s.missing_workers or any(n.node_id in avoid_nodes for n in s.nodes)]


def explain_missing(config: HostsConfig, nodes: Sequence[Node], avoid_nodes: Sequence[str] = ()) -> str:
    """Why the gang cannot be placed: what was asked for, and what the cluster has and has free."""
    if config.kind == "tpu":
        return _explain_missing_slices(config, nodes, avoid_nodes)
    need, count, allowed = bundle(config), num_hosts(config), [n for n in nodes if n.node_id not in avoid_nodes]
    lines = [f"asked for {_hosts(count)} with {_show(need)} each" + (", on different machines" if _spread(config) else "")]
    for name, per_host in need.items():
        total, free = (sum(getattr(node, at).get(name, 0.0) for node in allowed) for at in ("total", "free"))
        short = "" if free >= per_host * count else f": {_number(per_host * count - free)} missing"
        lines.append(f"{name}: {_number(per_host * count)} needed, the cluster has {_number(total)}, {_number(free)} free{short}")
    could, can = (_room(need, [getattr(n, at) for n in allowed], _spread(config)) for at in ("total", "free"))
    avoided = f" ({len(nodes) - len(allowed)} more avoided)" if len(nodes) > len(allowed) else ""
    lines.append(f"{len(allowed)} machine(s){avoided}: room for {_hosts(could)} when idle, for {_hosts(can)} now")
    lines.append("wait for the machines that are in use, or ask for less" if could >= count else _advice(config, could))
    return "; ".join(lines)


def _advice(config: HostsConfig, could: int) -> str:
    less = f"set hosts.count to at most {could}" if could else "ask for less on each host"
    return f"add machines to the cluster, or {less}" + (", or hosts.cpus_per_host lower" if config.kind == "cpu" else "")


def _explain_missing_slices(config: HostsConfig, nodes: Sequence[Node], avoid_nodes: Sequence[str]) -> str:
    wanted = (
        f"asked for {config.slices} slice(s) {config.topology} of {config.accelerator} (type {pod_type(config)}: "
        f"{_hosts(hosts_per_slice(config))} with {_show(bundle(config))} each)"
    )
    found = find_slices(config, nodes)
    if not found:
        types = sorted({node.labels[POD_TYPE_LABEL] for node in nodes if POD_TYPE_LABEL in node.labels})
        return (
            f"{wanted}; the cluster has none; TPU types it has: {', '.join(types) or 'none'}; add such slices, or change topology"
        )
    ready = [s for s in found if _slice_trouble(s, avoid_nodes) == "free"]
    states = ", ".join(f"{s.name}: {_slice_trouble(s, avoid_nodes)}" for s in found)
    missing = max(0, config.slices - len(ready))
    return f"{wanted}; the cluster has {len(found)} ({states}); {missing} slice(s) missing; wait for them, or ask for fewer"


def _slice_trouble(state: SliceState, avoid_nodes: Sequence[str]) -> str:
    if state.missing_workers:
        return f"worker {', '.join(map(str, state.missing_workers))} missing"
    if any(node.node_id in avoid_nodes for node in state.nodes):
        return "has a host to avoid"
    return "in use" if state.busy else "free"


def _spread(config: HostsConfig) -> bool:
    return strategy(config) == "STRICT_SPREAD"


def _fits(need: Mapping[str, float], have: Mapping[str, float]) -> bool:
    return all(have.get(name, 0.0) >= amount for name, amount in need.items())


def _room(need: Mapping[str, float], machines: Sequence[Mapping[str, float]], spread: bool) -> int:
    """Hosts that fit on machines with these resources."""
    each = [min(int(have.get(name, 0.0) / amount) for name, amount in need.items() if amount) for have in machines]
    return sum(min(room, 1) if spread else room for room in each)


def _hosts(count: int) -> str:
    return f"{count} host" if count == 1 else f"{count} hosts"


def _show(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_number(amount)}" for name, amount in resources.items())


def _number(value: float) -> str:
    return f"{value:g}"
