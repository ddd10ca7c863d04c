"""Meshes that a run may have on its devices. Each is compiled, and of those that fit the one with the fastest step is proposed.
Nothing is started."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cluster.hosts import config as hosts_config
from orchestrator.config.job import ConfigError, JobConfig, build, to_dict
from orchestrator.planning.report import scaled

AXES = ("data", "fsdp", "tensor")
"""The axes that are tried. The others change what a run is for, or what its hosts are: they stay as they are configured."""
TENSORS = (1, 2, 4, 8)
"""Larger ones exchange more in each layer than products can hide."""
DATAS = (1, 2, 4)


def candidates(config: JobConfig) -> list[dict[str, int]]:
    """Returns the sizes of AXES to be tried: the configured ones, then others, those with few exchanges first. Sizes that do not
    divide what the devices share are left out. Raises ConfigError if the configured mesh does not fit the devices."""
    num_devices = hosts_config.num_devices(config.hosts)
    try:
        sizes = config.training.mesh.resolve(num_devices)
    except ValueError as error:
        raise ConfigError(config.training.name, [str(error)]) from error
    share = math.prod(sizes[axis] for axis in AXES)
    tried = [{axis: sizes[axis] for axis in AXES}]
    for tensor in (size for size in TENSORS if share % size == 0):
        replicas = share // tensor
        for data in dict.fromkeys([*(size for size in DATAS if replicas % size == 0), replicas]):
            tried.append({"data": data, "fsdp": replicas // data, "tensor": tensor})
    distinct = [dict(each) for each in dict.fromkeys(tuple(each.items()) for each in tried)]
    return [each for each in distinct if _is_possible(config, each, num_devices)]


def changed(config: JobConfig, mesh: Mapping[str, int]) -> JobConfig:
    """Returns the configuration with these sizes of its mesh. Raises ConfigError."""
    return build(to_dict(config), overrides=[f"mesh.{axis}={size}" for axis, size in mesh.items()])


def _is_possible(config: JobConfig, mesh: Mapping[str, int], num_devices: int) -> bool:
    try:
        changed(config, mesh).training.check_devices(num_devices)
    except (ConfigError, ValueError):
        return False
    return True


def compared(config: JobConfig, planned: Callable[[JobConfig], dict[str, Any]]) -> dict[str, Any]:
    """Returns the plans of all candidates (`meshes`), and which of them is proposed (`proposed`, None if none fits), and why.
    `planned` returns the plan of a configuration, or raises ConfigError."""
    plans: list[dict[str, Any]] = []
    for mesh in candidates(config):
        try:
            found = planned(changed(config, mesh))
        except ConfigError as error:
            found = {"fits": False, "problem": error.last_line}
        plans.append({**found, "tried": mesh})
    fitting = [each for each in plans if each["fits"]]
    best = min(fitting, key=_cost, default=None)
    return {
        "fits": best is not None,
        "meshes": plans,
        "proposed": None if best is None else best["tried"],
        "why": "none of them fits: take more devices" if best is None else _why(best, fitting),
    }


def _cost(plan: Mapping[str, Any]) -> tuple[float, float, float]:
    step_s = plan.get("step_s")
    return (math.inf if step_s is None else step_s, sum(plan["exchanged"].values()), plan["memory"]["peak"])


def _why(best: Mapping[str, Any], fitting: Sequence[Mapping[str, Any]]) -> str:
    exchanged = f"{scaled(sum(best['exchanged'].values()))}B exchanged by a device"
    of = f"of the {len(fitting)} that fit" if len(fitting) > 1 else "the only one that fits"
    if best.get("step_s") is None:
        return f"the fewest exchanges {of} ({exchanged}); the time of a step is not known: {best['not_predicted']}"
    bound = f", bound by {best['bound_by']}" if best.get("bound_by") else ""
    return f"the fastest step {of} ({best['step_s']:.3g} s{bound}, {exchanged})"


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a person reads."""
    yield f"{'mesh':<32}{'memory':>10}{'exchanged':>12}{'step':>12}"
    for plan in found["meshes"]:
        name = " x ".join(f"{axis} {size}" for axis, size in plan["tried"].items())
        mark = " *" if plan["tried"] == found["proposed"] else ""
        if not plan["fits"]:
            yield f"{name:<32}  {plan['problem']}"
            continue
        step = "not known" if plan.get("step_s") is None else f"{plan['step_s']:.3g} s"
        memory, exchanged = (f"{scaled(size)}B" for size in (plan["memory"]["peak"], sum(plan["exchanged"].values())))
        yield f"{name:<32}{memory:>10}{exchanged:>12}{step:>12}{mark}"
    if found["proposed"] is None:
        yield f"proposed         {found['why']}"
    else:
        yield f"proposed         {' '.join(f'mesh.{axis}={size}' for axis, size in found['proposed'].items())}: {found['why']}"
