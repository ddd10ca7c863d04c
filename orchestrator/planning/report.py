"""What a job will be and whether it can run, before any machine is taken: the arithmetic of its configuration.

What needs JAX or the user's code (shapes, data) is worked out in a child process, which touches no device:
`python -m trainers.planning.estimate`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.hosts import compiler_flags
from cluster.hosts import config as hosts_config
from gangway.wire.console import ConsoleEvent, Note, RunStarted, Unit
from orchestrator.config.job import JobConfig, given_yaml, shown, to_yaml
from orchestrator.planning.child import Child
from trainers.config import mesh
from trainers.config.attention import choose, choose_exchange
from trainers.config.model import AUTO, CHOICES

PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BELOW = "\n#" + " " * 19
"""Between the lines of one entry."""
IN_FP8 = "of linear layers in 8 bits (model.fp8): e4m3, gradients e5m2, by current scales; mfu is by the peak of bfloat16"


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """None: not known here, because a trainer that only implements the protocol decides it."""

    num_hosts: int
    devices_per_host: int
    mesh: dict[str, int]
    train_examples: int | None = None
    eval_examples: int | None = None
    data_notes: Sequence[str] = ()
    """What the training data tells of itself, a line each: how full the rows of each source are."""
    max_steps: int | None = None
    parameters: int | None = None
    active_parameters: int | None = None
    """Those that a token uses; None also for a model without experts, or of one's own."""
    num_experts: int | None = None
    experts_per_token: int | None = None
    experts_per_device: int | None = None
    num_layers: int | None = None
    """None also for a model of one's own."""
    tokens_per_example: int | None = None
    tokens_per_step: int | None = None
    flops_per_step: float | None = None
    frozen_parameters: Mapping[str, int] | None = None
    """By the name of the frozen weights, such as the `base` of LoRA."""
    frozen_bytes_per_device: int | None = None
    frozen: Mapping[str, str] | None = None
    """Where they come from; without those that cannot be seen from here."""
    checkpoint_bytes: int | None = None
    state_bytes_per_device: int | None = None
    host_bytes_per_device: int = 0
    """What of the state lies in the host's memory."""
    left_whole: Sequence[str] = ()
    """A line for each kind of dimension of the parameters that an axis of the mesh shall divide and does not."""
    padded_rows_per_step: int = 0
    """Rows that are computed and do not count: the global batch does not divide over the replicas."""
    init_from: str | None = None
    """What `init_from` gives; None also if it cannot be seen from here."""
    continues: Mapping[str, Any] | None = None
    """`step` and `notes` (lines) of the checkpoint that the run goes on from; None if there is none to be seen from here."""
    padding: str | None = None
    """Whether rows of weight 0 were tried, and what came of it; None if the trainer adds up the rows itself."""
    without_effect: Sequence[str] = ()
    """A line for each setting that changes nothing."""
    doubt: str | None = None
    """What could not be looked at just now, and why; the hosts will try again."""

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    @property
    def unit(self) -> Unit:
        """What a user counts: tokens, or examples where each of them is one thing (an image, a row)."""
        return "examples" if self.tokens_per_example == 1 else "tokens"

    @property
    def rows(self) -> str:
        """What the rows of a batch are called."""
        return "examples" if self.unit == "examples" else "sequences"

    @property
    def num_replicas(self) -> int:
        return mesh.num_replicas(self.mesh)

    def events(self, config: JobConfig) -> list[ConsoleEvent]:
        """The console's first."""
        doubt = f"starting all the same, the hosts try again: {self.doubt}"
        lines = [Note(ev="note", message=line) for line in (self.continues or {}).get("notes", ())]
        lines += [Note(ev="note", level="warning", message=line) for line in (*self.left_whole, *self.without_effect)]
        return [self.header(config), *lines, *([Note(ev="note", level="warning", message=doubt)] if self.doubt else [])]

    def header(self, config: JobConfig) -> RunStarted:
        """What will run, in one line."""
        return {
            "ev": "run",
            "name": config.training.name,
            "hosts": self.num_hosts,
            "devices": self.num_devices,
            "parameters": self.parameters,
            "tokens_per_step": self.tokens_per_step,
            "max_steps": self.max_steps,
            "unit": self.unit,
        }


def check(config: JobConfig, absent: Collection[str] = ()) -> PlanReport:
    """Raises ConfigError with everything that a look at the code and the data shows to be wrong. `absent`: keys of paths that are
    not looked at."""
    with start(config, absent) as child:
        return answered(config, child)


def render(config: JobConfig, report: PlanReport, *, everything: bool = False) -> str:
    """The settings that differ from the defaults, or all, then the arithmetic that follows from them, as YAML with comments."""
    lines = [f"# {name:<18}{value}" for name, value in arithmetic(config, report).items()]
    if everything:
        return "\n".join([to_yaml(config), *lines])
    return "\n".join([given_yaml(config), *lines, "# --all             shows the settings that have their defaults, too"])


def arithmetic(config: JobConfig, report: PlanReport) -> dict[str, str]:
    training = config.training
    padding = report.padded_rows_per_step
    micro = (training.global_batch_size + padding) // training.accumulation_steps // report.num_replicas
    lines = {
        "hosts": _hosts(config, report),
        "devices": f"{report.num_hosts} hosts x {report.devices_per_host} = {report.num_devices}",
        "mesh": " x ".join(f"{axis} {size}" for axis, size in report.mesh.items()) + f" = {report.num_devices}",
        "global batch": (
            f"{micro} micro-batch x {training.accumulation_steps} accumulation x {report.num_replicas} replicas "
            f"= {training.global_batch_size + padding} {report.rows}" + (f", {padding} of them padding" if padding else "")
        ),
        "compiler flags": "; ".join(f"{flag} ({flag.why})" for flag in compiler_flags.of_hosts(config.hosts)),
        **_model_lines(config, report),
        **_data_lines(training.global_batch_size, report),
    }
    return {name: line for name, line in lines.items() if line}


def parameters(config: JobConfig) -> dict[str, Any]:
    """The configuration as flat, dotted names, as trackers want it; secrets are masked."""
    return dict(_flat(shown(config), ""))


def _hosts(config: JobConfig, report: PlanReport) -> str:
    hosts = config.hosts
    each = ", ".join(f"{name} {amount:g}" for name, amount in hosts_config.bundle_resources(hosts).items())
    where = "on machines of their own" if hosts_config.strategy(hosts) == "STRICT_SPREAD" else "packed"
    spares = f", {hosts.spares} spare" if hosts.spares else ""
    slices = ""
    if hosts.kind == "tpu":
        number = _range(hosts_config.min_slices(hosts), hosts_config.max_slices(hosts))
        slices = f", {number} slices {hosts.topology} of {hosts.accelerator}"
    return f"{_range(hosts_config.min_hosts(hosts), report.num_hosts)} {hosts.kind} ({each} each, {where}{slices}){spares}"


def _range(least: int, most: int) -> str:
    return str(most) if least == most else f"{least} to {most}"


def _model_lines(config: JobConfig, report: PlanReport) -> dict[str, str | None]:
    if report.parameters is None or report.tokens_per_step is None:
        return {"model": "decided by the trainer (it implements the protocol by itself)"}
    steps = report.max_steps or 0
    tokens, flops = steps * report.tokens_per_step, steps * (report.flops_per_step or 0)
    return {
        **_step_line(config.training.global_batch_size, report),
        "parameters": _parameters(report),
        "FLOPs a step": f"{scaled(report.flops_per_step or 0)}FLOP",
        "checkpoint": f"{scaled(report.checkpoint_bytes or 0)}B (parameters, optimizer state, counters)",
        "products": None if config.training.model.fp8 == "none" else IN_FP8,
        "experts": None if report.num_experts is None else _experts(config, report),
        **({} if report.num_layers is None else _layer_lines(config, report)),
        **_device_lines(config, report),
        **{f"  {name}": found for name, found in (report.frozen or {}).items()},
        "begins with": report.init_from,
        "goes on": "; ".join((report.continues or {}).get("notes", ())),
        "whole run": f"{steps:,} steps, {scaled(tokens).strip()} {report.unit}, {scaled(flops)}FLOP" if steps else None,
    }


def _layer_lines(config: JobConfig, report: PlanReport) -> dict[str, str | None]:
    """How the layers are computed."""
    kind, model = config.hosts.kind, config.training.model
    how = "one by one" if model.unrolled(kind, CHOICES[0] if model.remat == AUTO else None) else "as a loop"
    needs = config.training.attention_needs._replace(context=report.mesh.get(mesh.CONTEXT, 1))
    choice = choose(model.attention, kind, needs)
    stages = report.mesh.get(mesh.PIPELINE, 1)
    exchange = choose_exchange(model.context_attention, kind, needs.length)
    return {
        "layers": f"{report.num_layers}, compiled {how} on {kind} hosts",
        "attention": f"{choice.kernel} ({choice.reason})",
        "  by stages": _stages(config, report, stages) if stages > 1 else None,
        "  by context": f"{exchange.kernel} ({exchange.reason})" if needs.context > 1 else None,
    }


def _device_lines(config: JobConfig, report: PlanReport) -> dict[str, str | None]:
    """What is in the memory of a device, and of its host."""
    state, of_host, frozen = report.state_bytes_per_device, report.host_bytes_per_device, report.frozen_bytes_per_device
    masters = config.training.param_dtype == "bfloat16" and config.training.optimizer.master_weights == "float32"
    what = "with master weights of float32; " * masters + "gradients and activations come on top"
    auto = f"the first that fits of {', '.join(CHOICES)}, when the step is compiled (`gangway compile` tells which)"
    return {
        "state per device": None if state is None else f"{scaled(state)}B ({what})",
        "  of its host": None if state is None or not of_host else f"{scaled(of_host)}B (optimizer.offload), beside that",
        "remat": auto if config.training.model.remat == AUTO else None,
        "not divided": BELOW.join(report.left_whole),
        "frozen weights": None if frozen is None else f"{scaled(frozen)}B per device, read at each start of a process",
    }


def _stages(config: JobConfig, report: PlanReport, stages: int) -> str:
    rows = mesh.rows_of_pipeline(report.mesh, config.training.micro_batch_size)
    count = mesh.microbatches(stages, rows, config.training.pipeline.microbatches)
    each, repeats = (report.num_layers or 0) // stages, config.training.pipeline.num_repeats
    groups = "" if repeats == 1 else f", in {repeats} groups (pipeline.repeats)"
    return (
        f"{each} layers in each of {stages}{groups}; {count} micro-batches of {rows // count} (pipeline.microbatches); a stage "
        f"rests for {mesh.resting(stages, count, repeats):.0%} of a step"
    )


def _step_line(batch: int, report: PlanReport) -> dict[str, str]:
    if report.unit == "examples":
        return {"examples a step": f"{report.tokens_per_step:,}"}
    return {"tokens a step": f"{batch} sequences x {report.tokens_per_example} = {report.tokens_per_step:,}"}


def _parameters(report: PlanReport) -> str:
    number, beside = report.parameters or 0, report.frozen_parameters or {}
    text = f"{number:,} ({scaled(number).strip()})"
    if beside:
        text += f" trained; frozen: {', '.join(f'{each:,} of {name} ({scaled(each).strip()})' for name, each in beside.items())}"
    if report.active_parameters is None:
        return text
    share = report.active_parameters / (number or 1)
    return f"{text}, of which a token uses {scaled(report.active_parameters).strip()} ({share:.0%})"


def _experts(config: JobConfig, report: PlanReport) -> str:
    loss = config.training.loss
    weights = {"load_balancing_weight": loss.load_balancing_weight, "router_z_loss_weight": loss.router_z_loss_weight}
    return ", ".join(
        (
            f"{report.num_experts} in each layer",
            f"{report.experts_per_token} for each token",
            f"{report.experts_per_device} on a device",
            *(f"loss.{name} {value:g}" for name, value in weights.items()),
        )
    )


def _data_lines(global_batch_size: int, report: PlanReport) -> dict[str, str | None]:
    train, held_out, rows = report.train_examples, report.eval_examples, report.rows
    return {
        "not known yet": report.doubt,
        "no effect": BELOW.join(report.without_effect),
        "filled-up batches": report.padding,
        "training data": None if train is None else f"{train:,} {rows} = {train / global_batch_size:,.1f} steps an epoch",
        "packing": BELOW.join(report.data_notes),
        "held-out data": None if held_out is None else f"{held_out:,} {rows}",
    }


def scaled(number: float) -> str:
    """`12.3 M`, with a space for the unit that follows."""
    for size, prefix in PREFIXES:
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:g} "


def start(config: JobConfig, absent: Collection[str] = ()) -> Child:
    """Starts the child process that works out the plan, which is killed at the end of the `with` if it is still there."""
    request = {"num_devices": hosts_config.num_devices(config.hosts), "absent": [*absent]}
    return Child("trainers.planning.estimate", config, request, {})


def answered(config: JobConfig, child: Child) -> PlanReport:
    """Waits for the answer. Raises ConfigError with everything that is wrong, and PlanError if the child itself failed."""
    return PlanReport(
        num_hosts=hosts_config.num_hosts(config.hosts),
        devices_per_host=hosts_config.devices_per_host(config.hosts),
        mesh=config.training.check_devices(hosts_config.num_devices(config.hosts)),
        **child.facts(),
    )


def _flat(data: Mapping[str, Any], prefix: str) -> Any:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value) if isinstance(value, list) else value
