"""What a compiled program needs of a device's memory, how much there is, what uses it, and what to change first if it
has run out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from gangway.foreign_errors import OUT_OF_MEMORY_SIGNS
from gangway.user_modules import load_object
from trainers.config.arguments import TrainingArguments
from trainers.config.mesh import PIPELINE, num_replicas
from trainers.config.optimizer import OFFLOADED
from trainers.metrics.host_usage import bytes_of_machine
from trainers.parallel import host_memory
from trainers.runtime import multihost
from trainers.step.state import TrainState
from trainers.tasks.causal_lm import CausalLMTask

SHOWN_TENSORS = 8
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True)
class Usage:
    """The memory in use on one device, in bytes."""

    parameters: int
    optimizer: int
    batch: int
    temporaries: int | None
    """Activations, gradients and other arrays that exist only during a step; None if the program could not even be compiled."""
    divided: int = 0
    """The part of parameters and optimizer state that a larger fsdp axis would divide further."""
    frozen: int = 0
    """Weights that are not trained."""
    largest: tuple[str, ...] = ()
    """The largest of the arrays that exist between steps, one line each."""

    @property
    def total(self) -> int:
        return self.parameters + self.frozen + self.optimizer + self.batch + (self.temporaries or 0)

    def __str__(self) -> str:
        frozen = f"frozen weights {shown(self.frozen)}, " if self.frozen else ""
        temporaries = "of unknown size (not compiled)" if self.temporaries is None else shown(self.temporaries)
        return (
            f"parameters {shown(self.parameters)}, {frozen}optimizer {shown(self.optimizer)}, batch {shown(self.batch)}, "
            f"activations and other temporaries {temporaries}"
        )


@dataclass(frozen=True)
class Change:
    text: str
    saved: int | None
    """Bytes on each device; None if unknown."""

    def __str__(self) -> str:
        return self.text + (f": about {shown(self.saved)} less on each device" if self.saved is not None else "")


def out_of_memory(error: BaseException) -> bool:
    """Whether this is the error of the runtime or the compiler that a device has no memory left."""
    if isinstance(error, DoesNotFit):
        return True
    message = str(error).lower()
    # By the text: JAX raises one type for all errors of the runtime.
    return isinstance(error, jax.errors.JaxRuntimeError) and any(sign in message for sign in OUT_OF_MEMORY_SIGNS)


def usage(state: TrainState, batch: Any, program: jax.stages.Compiled | None, frozen: Any = ()) -> Usage:
    """Returns the memory in use. `state`, `batch` and the `frozen` weights may be shapes with shardings; `program` is the
    train step, if it could be compiled."""
    analysis = program.memory_analysis() if program is not None else None
    of_state = {"params": state.params, "model_state": state.model_state, "opt_state": state.opt_state}
    parts = {**of_state, "frozen": frozen, "batch": batch}
    leaves = [
        (name + jax.tree_util.keystr(path), leaf)
        for name, part in parts.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(part)
    ]
    divided = (leaf for leaf in jax.tree.leaves((state.params, frozen, state.opt_state)) if "fsdp" in _axes(leaf))
    # By what one device holds, not by the whole size: a large array may be divided well.
    leaves.sort(key=lambda named: -bytes_on_a_device(named[1]))
    return Usage(
        parameters=_total((state.params, state.model_state)),
        optimizer=_total(state.opt_state),
        frozen=_total(frozen),
        batch=_total(batch),
        temporaries=None if analysis is None else int(analysis.temp_size_in_bytes),
        divided=sum(map(bytes_on_a_device, divided)),
        largest=tuple(_line(name, leaf) for name, leaf in leaves[:SHOWN_TENSORS]),
    )


def advice(error: BaseException, used: Usage, arguments: TrainingArguments, sizes: dict[str, int]) -> str:
    """Returns the message for `error`. `sizes` are those of the mesh's axes. The first line is complete by itself."""
    first, *later = changes(used, arguments, sizes)
    lines = [
        f"a device is out of memory{_asked_for(error)}. A device holds {used}. First change: {first}",
        *(f"  then: {change}" for change in later),
        "  largest arrays, by what a device holds of them:",
        *(f"    {line}" for line in used.largest),
        f"  the error was: {(str(error).strip().splitlines() or [''])[0][:300]}",
    ]
    return "\n".join(lines)


def changes(used: Usage, arguments: TrainingArguments, sizes: dict[str, int]) -> list[Change]:
    """Returns what to change, at least one change. First come changes that cost only time, and leave the results the same."""
    free = sorted(_without_effect(used, arguments, sizes), key=lambda change: -(change.saved or 0))
    return [
        *free,
        *_by_host(used, arguments, sizes),
        *_with_effect(used, arguments),
        Change("more devices, or a smaller model", None),
    ]


def _without_effect(used: Usage, arguments: TrainingArguments, sizes: dict[str, int]) -> Iterator[Change]:
    replicas, steps, rows = num_replicas(sizes), arguments.accumulation_steps, arguments.micro_batch_size
    # A smaller micro-batch still needs a row for each replica.
    if rows % 2 == 0 and rows // 2 >= replicas:
        text = f"accumulation_steps {steps} -> {2 * steps} (micro-batches of {rows // 2} sequences, not {rows})"
        yield Change(text, _half(used.temporaries))
    if arguments.model.remat == "none" and issubclass(load_object(arguments.task), CausalLMTask):  # other tasks need not heed it
        text = "model.remat none -> auto (activations are computed again, as many as must be: a step takes up to a third longer)"
        yield Change(text, None)
    if sizes["data"] > 1 and used.divided:
        wider = sizes["data"] * sizes["fsdp"]
        text = f"mesh.fsdp {sizes['fsdp']} -> {wider}, mesh.data {sizes['data']} -> 1 (parameters and moments are shared out)"
        # Each device keeps 1 / data of what it held.
        yield Change(text, used.divided * (sizes["data"] - 1) // sizes["data"])


def _by_host(used: Usage, arguments: TrainingArguments, sizes: dict[str, int]) -> Iterator[Change]:
    # On a CPU the devices' memory is that of the host.
    can = jax.default_backend() != "cpu" and arguments.optimizer.name in OFFLOADED and sizes.get(PIPELINE, 1) == 1
    if arguments.optimizer.offload == "none" and can and used.optimizer >= used.parameters:
        text = "optimizer.offload none -> host (moments lie in the hosts' memory, and are read and written once a step)"
        yield Change(text, used.optimizer)


def _with_effect(used: Usage, arguments: TrainingArguments) -> Iterator[Change]:
    if arguments.dtype == "float32":
        yield Change("dtype float32 -> bfloat16 (of the computation)", _half(used.temporaries))
    if arguments.optimizer.moment_dtype != "bfloat16" and used.optimizer >= used.parameters:
        yield Change("optimizer.moment_dtype -> bfloat16", used.optimizer // 2)
    optimizer = arguments.optimizer
    if arguments.param_dtype == "bfloat16" and (optimizer.master_weights, optimizer.offload) == ("float32", "none"):
        # 4 bytes beside the 2 of the parameter.
        yield Change("optimizer.master_weights float32 -> stochastic (parameters are rounded at random)", 2 * used.parameters)
    length = arguments.data.sequence_length
    if length >= 256:
        yield Change(f"data.sequence_length {length} -> {length // 2}", _half(used.temporaries))


def bytes_on_a_device(leaf: Any) -> int:
    """Returns 0 for what lies in the host's memory."""
    sharding = getattr(leaf, "sharding", None)
    if getattr(sharding, "memory_kind", None) == host_memory.KIND:
        return 0
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def shown(num_bytes: int) -> str:
    unit, name = next(((unit, name) for unit, name in UNITS if num_bytes >= unit), (1, "B"))
    return f"{num_bytes / unit:.2f} {name}" if unit > 1 else f"{num_bytes} B"


def _half(num_bytes: int | None) -> int | None:
    return None if num_bytes is None else num_bytes // 2


def _total(tree: Any) -> int:
    return sum(map(bytes_on_a_device, jax.tree.leaves(tree)))


def _line(name: str, leaf: Any) -> str:
    whole = math.prod(leaf.shape) * leaf.dtype.itemsize
    axes = _axes(leaf)
    divided = f"divided over {', '.join(axes)}" if axes else "whole on every device"
    return f"{shown(bytes_on_a_device(leaf))} of {shown(whole)}: {name} {leaf.dtype}{list(leaf.shape)}, {divided}"


def _axes(leaf: Any) -> list[str]:
    """The mesh axes that divide an array."""
    spec = getattr(getattr(leaf, "sharding", None), "spec", None) or ()
    return [axis for axes in spec if axes is not None for axis in ([axes] if isinstance(axes, str) else axes)]


def _asked_for(error: BaseException) -> str:
    """Returns the size that could not be allocated, if the error names it."""
    match = re.search(r"allocat\w* (\d+)(?: bytes|B\b)", str(error))
    return f" (there was no room for another {shown(int(match[1]))})" if match else ""


SHARE = 0.95
"""The share of an accelerator's memory that one program may need: batches that are read ahead and the other programs have the
rest."""


class DoesNotFit(Exception):
    """No program that was tried has room on a device."""


@dataclass(frozen=True)
class Room:
    num_bytes: int
    source: str
    """Where the limit comes from, for people."""


def of_program(program: jax.stages.Compiled, platform: str) -> Mapping[str, int]:
    """Returns the bytes of a device that the program needs: at its peak, for its arguments, and for what is temporary; and the
    bytes of its host's memory."""
    found: Any = program.memory_analysis()
    arguments, temporary = found.argument_size_in_bytes, found.temp_size_in_bytes
    host = found.host_argument_size_in_bytes + found.host_temp_size_in_bytes
    # The compiler for CPUs does not count what is temporary. That for TPUs counts the host's memory, too: of a program that needs
    # 10 GB of each it tells 20 GB, and compiles it for a device of 16 GB.
    told = found.peak_memory_in_bytes - found.host_argument_size_in_bytes if platform == "tpu" else arguments + temporary
    return {"peak": min(told, arguments + temporary), "arguments": arguments, "temporary": temporary, "host": host}


def room() -> Room:
    """Returns the room of the device that has least, of all hosts. All hosts must call this."""
    limits = [stats["bytes_limit"] for device in jax.local_devices() if "bytes_limit" in (stats := device.memory_stats() or {})]
    if limits:
        own, source = int(SHARE * min(limits)), f"{SHARE:.0%} of its memory"
    else:
        own, source = bytes_of_machine() // jax.device_count(), f"the memory of this machine, which {jax.device_count()} share"
    return Room(min(multihost.all_hosts("memory of a device", own)), source)
