"""What `gangway plan` finds out about a run, and says: memory, the time of a step, days, goodput, requests, a price."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gangway.storage.opening import is_url
from orchestrator.commands import compile as compiling
from orchestrator.config.job import ConfigError, build, to_dict
from orchestrator.planning import hardware, report, roofline, trial
from orchestrator.planning.report import scaled
from trainers.config.arguments import absent_paths
from trainers.console.text import seconds

SAVE_BYTES_PER_S = 1e9
"""What one host writes of a checkpoint, to a bucket or a shared disk: an assumption."""
COPY_BYTES_PER_S = 5e9
"""What one device copies to the memory of its host, for which a save holds up training: an assumption."""
OF_HOST = "read and written in a step (its time is not in that of a step)"
SMALLER = (
    ("model.remat=full", "keeps less of the forward pass"),
    ("accumulation_steps={twice}", "halves the micro-batch"),
    ("optimizer.moment_dtype=bfloat16", "halves the moments"),
)
"""What makes a step need less memory, tried in this order where it does not fit."""


def planned(config: Any, options: argparse.Namespace, *, remedies: bool = True) -> dict[str, Any]:
    """Returns the plan; with `remedies` also what makes a step fit that does not. Raises ConfigError with what is wrong, and
    PlanError if the compiler failed."""
    wrong, elsewhere = absent_paths(config.training)
    if wrong:
        raise ConfigError(config.training.name, wrong)
    estimate = report.check(config, elsewhere)
    device = hardware.of(config.hosts.kind, config.hosts.accelerator, options.on)
    room = hardware.room(config.hosts, device)
    step = compiled(config, room, remedies=remedies)
    facts = step["facts"]
    found: dict[str, Any] = {
        "name": config.training.name,
        "on": options.on,
        "not_looked_at": [*elsewhere.values()],
        "devices": estimate.num_devices,
        "hosts": estimate.num_hosts,
        "mesh": estimate.mesh,
        "parameters": estimate.parameters,
        "tokens_per_step": estimate.tokens_per_step,
        "flops_per_step": estimate.flops_per_step,
        "checkpoint_bytes": estimate.checkpoint_bytes,
        "max_steps": estimate.max_steps,
        "fits": step["problem"] is None,
        "problem": step["problem"],
        "remedy": step["remedy"],
        "memory": dict(facts.get("memory", {})),
        "memory_of_device": None if room is None else room.of_device,
        "state_bytes_per_device": estimate.state_bytes_per_device,
        "exchanged": exchanged(facts),
    }
    if tried := facts.get("remat"):
        # A trial takes the time of what was chosen.
        config = build(to_dict(config), overrides=[f"model.remat={tried[-1][0]}"])
        found["remat"] = compiling.remat(tried)
    return found | timed(config, estimate, found, device, options)


def compiled(config: Any, room: Any = None, *, remedies: bool = True) -> dict[str, Any]:
    """Returns the facts of the compiled step. If it does not fit, also why, and the first of SMALLER with which it does. `room`
    (`orchestrator.planning.hardware`) judges where the compiler knows no limit."""

    def facts_of(config: Any) -> dict[str, Any]:
        facts = compiling.facts(config, None if room is None else room.of_device)
        if room is not None and (why := room.lacks(facts["memory"])):
            raise ConfigError(config.training.name, [why])
        return facts

    try:
        return {"facts": facts_of(config), "problem": None, "remedy": None}
    except ConfigError as error:
        if hardware.DOES_NOT_FIT not in str(error):
            raise
        problem = error.last_line
    for override, why in SMALLER if remedies else ():
        if override == "model.remat=full" and config.training.model.remat == "auto":
            continue  # tried already
        changed = override.format(twice=2 * config.training.accumulation_steps)
        try:
            facts = facts_of(build(to_dict(config), overrides=[changed]))
        except ConfigError:
            continue
        return {"facts": facts, "problem": problem, "remedy": f"{changed} ({why})"}
    return {"facts": {}, "problem": problem, "remedy": None}


def exchanged(facts: Mapping[str, Any]) -> dict[str, int]:
    """Returns the bytes that one device exchanges in a step, by kind."""
    found: dict[str, int] = {}
    for kind, _, _, size in facts.get("exchanged", ()):
        found[kind] = found.get(kind, 0) + size
    return found


def timed(config: Any, estimate: Any, found: Mapping[str, Any], device: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Returns what follows from the time of a step; nothing where that is not known, but why."""
    if estimate.flops_per_step is None or not found["fits"]:
        return {"step_s": None, "not_predicted": "the model's FLOPs are not known" if found["fits"] else "it does not fit"}
    if device is not None:
        step = by_figures(config, estimate, found, device)
    elif config.hosts.kind == "cpu":
        try:
            step = by_trial(trial.of(config, flops=estimate.flops_per_step, peak_bytes=found["memory"]["peak"]))
        except trial.NotTried as error:
            return {"step_s": None, "not_predicted": str(error)}
    else:
        return {"step_s": None, "not_predicted": "there are no figures for this hardware (--on NAME)"}
    step_s = step["step_s"]
    save_every_s = save_interval_s(config.training.checkpoint, step_s)
    hours = options.hours_between_failures
    goodput = roofline.expected_goodput(estimate.num_devices, save_every_s, hours_between_failures=hours)
    days = None if estimate.max_steps is None else estimate.max_steps * step_s / goodput / roofline.DAY_S
    per_day = goodput * roofline.DAY_S / step_s * (estimate.tokens_per_step or 0)
    written_s = (estimate.checkpoint_bytes or 0) / estimate.num_hosts / SAVE_BYTES_PER_S
    held_s = (estimate.checkpoint_bytes or 0) / estimate.num_devices / COPY_BYTES_PER_S
    best_s = roofline.best_save_interval_s(estimate.num_devices, held_s, hours)
    in_bucket = is_url(config.run_dir)
    return step | {
        "save_every_s": save_every_s,
        "save_s": written_s,
        "best_save_steps": max(1, round(max(best_s, written_s) / step_s)),
        "goodput": goodput,
        "tokens_per_day": per_day,
        "days": days,
        "requests": asked_of_bucket(estimate.num_hosts, save_every_s, days) if in_bucket else None,
        "price": None if options.price is None or days is None else days * 24 * estimate.num_devices * options.price,
    }


def asked_of_bucket(num_hosts: int, save_every_s: float, days: float | None) -> dict[str, float | None]:
    """Returns how many requests a save, an hour with its saves, and the whole run make; the last is None without an end."""

    hour = HOUR + requests_of_save(num_hosts).times(3600.0 / save_every_s)
    whole = None if days is None else round(sum(hour.times(24 * days)))
    share = hour.writes / sum(hour)
    return {"save": sum(requests_of_save(num_hosts)), "hour": round(sum(hour)), "whole_run": whole, "share_of_writes": share}


def by_figures(config: Any, estimate: Any, found: Mapping[str, Any], device: Any) -> dict[str, Any]:
    """Returns the time of a step by the figures of the hardware, with the range of published runs."""
    within, network = by_distance(config.hosts, estimate, roofline.over_links(found["exchanged"]))
    work = roofline.Work(
        flops=estimate.flops_per_step / estimate.num_devices,
        state_bytes=estimate.state_bytes_per_device or 0,
        exchanged_bytes=within,
        network_bytes=network,
    )
    step = roofline.step_time(work, device)
    low, high = device.spread
    return {
        "step_s": step.seconds,
        "step_s_range": [step.seconds * device.reached / high, step.seconds * device.reached / low],
        # None was published with this project's products of 8 bits.
        "source": "published runs" if config.training.model.fp8 == "none" else "published runs in bfloat16, not in 8 bits",
        "bound_by": step.bound_by,
        "network_bytes": network,
        "mfu": roofline.utilization(work, device),
    }


def by_distance(hosts: Any, estimate: Any, exchanged: float) -> tuple[float, float]:
    """Returns the bytes of a step that a device sends (within its slice or machine, to others), of those that the compiler tells
    as `exchanged`. Of machines with GPUs it is not known which axis goes between them: all do. Of TPUs the compiler tells what
    goes within a slice alone; between slices goes a device's share of the gradients, in float32."""
    if hosts.kind == "gpu":
        return (0.0, exchanged) if estimate.num_hosts > 1 else (exchanged, 0.0)
    slices = estimate.mesh.get("slice", hosts.slices)
    if slices == 1 or not estimate.checkpoint_bytes:
        return exchanged, 0.0
    share = (estimate.state_bytes_per_device or 0) / estimate.checkpoint_bytes
    return exchanged, roofline.summed_over_slices(4 * (estimate.parameters or 0) * share, slices)


def by_trial(tried: Any) -> dict[str, Any]:
    """Returns the time of a step as it was measured on this machine: there is no peak of a CPU to compare it with."""
    span = [tried.fastest_s, tried.slowest_s]
    return {"step_s": tried.fastest_s, "step_s_range": span, "source": "a trial on this machine", "bound_by": None, "mfu": None}


def save_interval_s(checkpoint: Any, step_s: float) -> float:
    """Returns the time between saves; a day, if only the end saves."""
    by_steps = [] if checkpoint.save_steps is None else [checkpoint.save_steps * step_s]
    by_minutes = [] if checkpoint.save_minutes is None else [checkpoint.save_minutes * 60.0]
    return min([*by_steps, *by_minutes, 86400.0])


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a person reads."""
    where = f" on {found['on']}" if found["on"] else ""
    mesh = " x ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    devices, hosts = (f"{found[one]} {one if found[one] != 1 else one[:-1]}" for one in ("devices", "hosts"))
    yield f"{found['name']}{where}: {devices} on {hosts}, mesh {mesh}"
    notes = [("note", line) for line in found["not_looked_at"]]
    yield from (f"{label:<17}{text}" for label, text in [*notes, *_of_model(found), *_of_time(found)] if text)


def _of_model(found: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    memory, limit, number = found["memory"], found["memory_of_device"], found["parameters"]
    of_device = found["problem"] and (found["remedy"] or "none of the usual changes is enough: take more devices")
    peak, state, of_host = (memory.get(name, 0) for name in ("peak", "arguments", "host"))
    of = f" of {scaled(limit)}B ({peak / limit:.0%})" if limit else ""
    parts = f"state and batch {scaled(state)}B, the rest {scaled(max(0, peak - state))}B"
    kinds = ", ".join(f"{kind} {scaled(size)}B" for kind, size in found["exchanged"].items())
    network, flops = found.get("network_bytes"), found["flops_per_step"]
    return [
        ("parameters", f"{number:,} ({scaled(number).strip()})" if number else None),
        ("memory", found["problem"]),
        ("to make it fit", of_device),
        ("memory", f"{scaled(peak)}B of a device at the peak{of}: {parts}" if memory else None),
        (
            "  of its host",
            f"{scaled(of_host)}B, {OF_HOST}" if of_host else None,
        ),
        ("remat", found.get("remat")),
        ("exchanged", f"{kinds}, by one device in a step" if kinds else None),
        ("over a network", f"{scaled(network)}B, to other slices or machines" if network else None),
        ("FLOPs a step", f"{scaled(flops)}FLOP, {scaled(found['tokens_per_step'])}tokens" if flops else None),
    ]


def _of_time(found: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    if found["step_s"] is None:
        return [("step", f"not predicted: {found['not_predicted']}")]
    low, high = found["step_s_range"]
    reached = "" if found["mfu"] is None else f", MFU {found['mfu']:.0%}, bound by {found['bound_by']}"
    number, unit = (1e3, "ms") if low < 0.01 else (1, "s")
    span = f"{number * low:.3g} to {number * high:.3g} by {found['source']}"
    every, written = _time(found["save_every_s"]), _time(found["save_s"])
    days, price = found["days"], found["price"]
    return [
        ("step", f"{number * found['step_s']:.3g} {unit} ({span}){reached}"),
        ("tokens", f"{scaled(found['tokens_per_day']).strip()} a day"),
        ("checkpoint", f"{scaled(found['checkpoint_bytes'] or 0)}B, every {every}; written in some {written}, beside the steps"),
        ("storage", _requests(found["requests"]) if found["requests"] else None),
        ("saves", f"checkpoint.save_steps={found['best_save_steps']} would lose least at this rate of failures (Young, 1974)"),
        ("goodput", f"{found['goodput']:.1%} expected"),
        ("whole run", None if days is None else f"{found['max_steps']:,} steps in {_time(days * 86400.0)}"),
        ("price", None if price is None else f"{price:,.0f}"),
    ]


def _requests(asked: Mapping[str, Any]) -> str:
    whole = "" if asked["whole_run"] is None else f", {scaled(asked['whole_run']).strip()} in the whole run"
    writes = f"{asked['share_of_writes']:.0%} of them writes and lists"
    return f"some {asked['save']:,.0f} requests a save, {asked['hour']:,} an hour{whole}; {writes}"


def _time(duration_s: float) -> str:
    """0.31 ms · 12.3 s · 1 h 05 min · 3.5 days."""
    if duration_s < 0.1:
        return f"{1e3 * duration_s:.3g} ms"
    return seconds(duration_s) if duration_s < 86400.0 else f"{duration_s / 86400.0:.3g} days"


class Requests(NamedTuple):
    """Requests to a bucket: clouds take money for each. Counted on emulators, with one and two hosts (`docs/storage.md`). Their
    number depends neither on the size of the arrays nor on how many there are."""

    writes: float
    """Writes and lists, for which clouds take most."""
    reads: float

    def __add__(self, other: Requests) -> Requests:  # type: ignore[override]
        return Requests(self.writes + other.writes, self.reads + other.reads)

    def times(self, number: float) -> Requests:
        return Requests(self.writes * number, self.reads * number)


SAVE = Requests(15, 10)
"""Of one checkpoint, and of the removal of an old one, whatever the number of hosts."""
SAVE_OF_HOST = Requests(11, 13)
"""Of one checkpoint, by each host."""
HOUR = Requests(3950, 4300)
"""Of an hour without saves: lease, progress, metrics, events and logs."""


def requests_of_save(num_hosts: int) -> Requests:
    return SAVE + SAVE_OF_HOST.times(num_hosts)
