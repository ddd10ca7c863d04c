"""How many hosts fit on the machines of a cluster. Pure functions of the configuration and of what Ray reports of its nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cluster.hosts.config import (
    POD_TYPE_LABEL,
    SLICE_NAME_LABEL,
    WORKER_ID_LABEL,
    HostsConfig,
    bundle_resources,
    hosts_per_slice,
    min_hosts,
    min_slices,
    pod_type,
    spreads,
)


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
    """The machines of one TPU slice that are in the cluster, and whether they can be used."""

    name: str
    nodes: tuple[Node, ...]
    missing_workers: tuple[int, ...]
    busy: bool


def find_slices(config: HostsConfig, nodes: Sequence[Node]) -> list[SliceState]:
    """Returns the slices of the configured type in the cluster, broken and busy ones included."""
    by_name: dict[str, list[Node]] = {}
    for node in nodes:
        if node.labels.get(POD_TYPE_LABEL) == pod_type(config):
            # A slice of one host has no name label: its node stands for it.
            name = node.labels.get(SLICE_NAME_LABEL) if hosts_per_slice(config) > 1 else node.node_id
            by_name.setdefault(name or f"(node {node.node_id} without the label {SLICE_NAME_LABEL})", []).append(node)
    return [_slice_state(config, name, members) for name, members in sorted(by_name.items())]


def _slice_state(config: HostsConfig, name: str, nodes: Sequence[Node]) -> SliceState:
    present = {node.labels.get(WORKER_ID_LABEL) for node in nodes}
    return SliceState(
        name=name,
        nodes=tuple(nodes),
        missing_workers=tuple(w for w in range(hosts_per_slice(config)) if str(w) not in present),
        busy=any(not _fits(bundle_resources(config), node.free) for node in nodes),
    )


def whole_slices(config: HostsConfig, nodes: Sequence[Node], avoid_nodes: Collection[str] = ()) -> list[str]:
    """Returns the names of the slices that are complete, free, and have none of the machines to avoid."""
    return [s.name for s in find_slices(config, nodes) if _slice_status(s, avoid_nodes) == "free"]


def explain_missing(config: HostsConfig, nodes: Sequence[Node], avoid_nodes: Sequence[str] = ()) -> str:
    """Explains why the gang cannot be placed: what the run asks for, what the cluster has, and what of that is free."""
    if config.kind == "tpu":
        return _explain_missing_slices(config, nodes, avoid_nodes)
    need, count = bundle_resources(config), min_hosts(config)
    allowed = [node for node in nodes if node.node_id not in avoid_nodes]
    lines = [f"asked for {_hosts(count)} with {_show(need)} each" + (", on different machines" if spreads(config) else "")]
    for name, per_host in need.items():
        total = sum(node.total.get(name, 0.0) for node in allowed)
        free = sum(node.free.get(name, 0.0) for node in allowed)
        short = "" if free >= per_host * count else f": {per_host * count - free:g} missing"
        lines.append(f"{name}: {per_host * count:g} needed, the cluster has {total:g}, {free:g} free{short}")
    # Sums may suffice where no single machine has room for a host: hosts are counted machine by machine.
    when_idle = _room(need, [node.total for node in allowed], spreads(config))
    now = _room(need, [node.free for node in allowed], spreads(config))
    avoided = f" ({len(nodes) - len(allowed)} more avoided)" if len(nodes) > len(allowed) else ""
    lines.append(f"{len(allowed)} machine(s){avoided}: room for {_hosts(when_idle)} when idle, for {_hosts(now)} now")
    lines.append("wait for the machines that are in use, or ask for less" if when_idle >= count else _advice(config, when_idle))
    return "; ".join(lines)


def _advice(config: HostsConfig, room: int) -> str:
    """Advice for a cluster with room for `room` hosts, fewer than the run needs."""
    name = "count" if config.min is None else "min"
    less = f"set hosts.{name} to at most {room}" if room else "ask for less on each host"
    return f"add machines to the cluster, or {less}" + (", or hosts.cpus_per_host lower" if config.kind == "cpu" else "")


def _explain_missing_slices(config: HostsConfig, nodes: Sequence[Node], avoid_nodes: Sequence[str]) -> str:
    request = (
        f"asked for {min_slices(config)} slice(s) {config.topology} of {config.accelerator} (type {pod_type(config)}: "
        f"{_hosts(hosts_per_slice(config))} with {_show(bundle_resources(config))} each)"
    )
    slices = find_slices(config, nodes)
    if not slices:
        types = sorted({node.labels[POD_TYPE_LABEL] for node in nodes if POD_TYPE_LABEL in node.labels})
        shown = ", ".join(types) or "none"
        return f"{request}; the cluster has none; TPU types it has: {shown}; add such slices, or change topology"
    ready = [s for s in slices if _slice_status(s, avoid_nodes) == "free"]
    states = ", ".join(f"{s.name}: {_slice_status(s, avoid_nodes)}" for s in slices)
    missing = max(0, min_slices(config) - len(ready))
    return f"{request}; the cluster has {len(slices)} ({states}); {missing} slice(s) missing; wait for them, or ask for fewer"


def _slice_status(state: SliceState, avoid_nodes: Collection[str]) -> str:
    """Says why a slice cannot be taken now; `free` if it can."""
    if state.missing_workers:
        return f"worker {', '.join(map(str, state.missing_workers))} missing"
    if any(node.node_id in avoid_nodes for node in state.nodes):
        return "has a host to avoid"
    return "in use" if state.busy else "free"


def _fits(need: Mapping[str, float], have: Mapping[str, float]) -> bool:
    return all(have.get(name, 0.0) >= amount for name, amount in need.items())


def _room(need: Mapping[str, float], machines: Sequence[Mapping[str, float]], spread: bool) -> int:
    """Returns how many hosts fit on machines with these resources."""
    each = [min(int(have.get(name, 0.0) / amount) for name, amount in need.items() if amount) for have in machines]
    return sum(min(room, 1) if spread else room for room in each)


def _hosts(count: int) -> str:
    return f"{count} host" if count == 1 else f"{count} hosts"


def _show(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())
