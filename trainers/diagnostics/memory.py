"""What uses the memory of the devices, and what to change first: said where it has run out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from trainers.config.arguments import TrainingArguments
from trainers.foreign_errors import OUT_OF_MEMORY_SIGNS
from trainers.step.state import TrainState

SHOWN_TENSORS = 8
UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True)
class Usage:
    """Bytes on one device."""

    parameters: int
    optimizer: int
    batch: int
    temporaries: int | None
    """Activations, gradients and whatever else a step makes and drops; None if the program could not even be compiled."""
    divided: int = 0
    """Of parameters and optimizer: what a larger fsdp axis divides further."""
    largest: tuple[str, ...] = ()
    """Of the arrays that are there between steps, each in a line."""

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.batch + (self.temporaries or 0)

    def __str__(self) -> str:
        temporaries = "of unknown size (not compiled)" if self.temporaries is None else shown(self.temporaries)
        return (
            f"parameters {shown(self.parameters)}, optimizer {shown(self.optimizer)}, batch {shown(self.batch)}, "
            f"activations and other temporaries {temporaries}"
        )


@dataclass(frozen=True)
class Change:
    text: str
    saved: int | None
    """Bytes a device; None if it cannot be told."""

    def __str__(self) -> str:
        return self.text + (f": about {shown(self.saved)} less on each device" if self.saved is not None else "")


def out_of_memory(error: BaseException) -> bool:
    """Whether it is the runtime's or the compiler's error that a device has no room."""
    message = str(error).lower()
    return isinstance(error, jax.errors.JaxRuntimeError) and any(sign in message for sign in OUT_OF_MEMORY_SIGNS)


def usage(state: TrainState, batch: Any, program: jax.stages.Compiled | None) -> Usage:
    """`state` and `batch` may be shapes with shardings; `program`: the train step, if it could be compiled."""
    analysis = program.memory_analysis() if program is not None else None
    parts = {"params": state.params, "opt_state": state.opt_state, "batch": batch}
    leaves = [(name + jax.tree_util.keystr(path), leaf) for name, part in parts.items() for path, leaf in _leaves(part)]
    divided = (leaf for leaf in jax.tree.leaves((state.params, state.opt_state)) if "fsdp" in _axes(leaf))
    leaves.sort(key=lambda named: -bytes_on_a_device(named[1]))
    return Usage(
        parameters=_total(state.params),
        optimizer=_total(state.opt_state),
        batch=_total(batch),
        temporaries=None if analysis is None else int(analysis.temp_size_in_bytes),
        divided=sum(map(bytes_on_a_device, divided)),
        largest=tuple(_line(name, leaf) for name, leaf in leaves[:SHOWN_TENSORS]),
    )


def advice(error: BaseException, used: Usage, arguments: TrainingArguments, sizes: dict[str, int]) -> str:
    """The message for `error`; `sizes`: of the mesh's axes. Its first line stands for itself."""
    first, *others = changes(used, arguments, sizes)
    lines = [
        f"a device is out of memory{_asked_for(error)}. A device holds {used}. First change: {first}",
        *(f"  then: {change}" for change in others),
        "  largest arrays, by what a device holds of them:",
        *(f"    {line}" for line in used.largest),
        f"  the error was: {(str(error).strip().splitlines() or [''])[0][:300]}",
    ]
    return "\n".join(lines)


def changes(used: Usage, arguments: TrainingArguments, sizes: dict[str, int]) -> list[Change]:
    """What to change, first what costs nothing but time: it leaves the results as they are. At least one."""
    free = sorted(_without_effect(used, arguments, sizes), key=lambda change: -(change.saved or 0))
    return [*free, *_with_effect(used, arguments), Change("more devices, or a smaller model", None)]


def _without_effect(used: Usage, arguments: TrainingArguments, sizes: dict[str, int]) -> Iterator[Change]:
    replicas, steps, rows = sizes["data"] * sizes["fsdp"], arguments.accumulation_steps, arguments.micro_batch_size
    if rows % 2 == 0 and rows // 2 >= replicas:
        text = f"accumulation_steps {steps} -> {2 * steps} (micro-batches of {rows // 2} sequences, not {rows})"
        yield Change(text, _half(used.temporaries))
    if sizes["data"] > 1 and used.divided:
        wider = sizes["data"] * sizes["fsdp"]
        text = f"mesh.fsdp {sizes['fsdp']} -> {wider}, mesh.data {sizes['data']} -> 1 (parameters and moments are shared out)"
        yield Change(text, used.divided * (sizes["data"] - 1) // sizes["data"])


def _with_effect(used: Usage, arguments: TrainingArguments) -> Iterator[Change]:
    if arguments.dtype == "float32":
        yield Change("dtype float32 -> bfloat16 (of the computation)", _half(used.temporaries))
    if arguments.optimizer.moment_dtype != "bfloat16" and used.optimizer >= used.parameters:
        yield Change("optimizer.moment_dtype -> bfloat16", used.optimizer // 2)
    length = arguments.data.sequence_length
    if length >= 256:
        yield Change(f"data.sequence_length {length} -> {length // 2}", _half(used.temporaries))


def bytes_on_a_device(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def shown(num_bytes: int) -> str:
    unit, name = next(((unit, name) for unit, name in UNITS if num_bytes >= unit), (1, "B"))
    return f"{num_bytes / unit:.2f} {name}" if unit > 1 else f"{num_bytes} B"


def _half(num_bytes: int | None) -> int | None:
    return None if num_bytes is None else num_bytes // 2


def _total(tree: Any) -> int:
    return sum(map(bytes_on_a_device, jax.tree.leaves(tree)))


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


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
    """The size that there was no room for, if the error tells it."""
    found = re.search(r"allocat\w* (\d+)(?: bytes|B\b)", str(error))
    return f" (there was no room for another {shown(int(found[1]))})" if found else ""
