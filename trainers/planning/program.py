"""Compiles the train step of a run for devices that need not be there: what it needs of their memory, and what they exchange.

`python -m trainers.planning.program` reads JSON and writes JSON.

In: {"arguments_class", "arguments", "devices": {"kind", "count", "topology", "slices"}, "room": bytes of a device, or null}. Out:
{"problems": [one line each, empty if it compiles and fits], "facts": {...}}. The room is for `model.remat: auto` alone: others
judge whether the step fits in it.

For TPUs XLA's own compiler for them is used, which the package `libtpu` brings. It knows the memory of a chip, and the topology.
For GPUs and CPUs as many CPU devices are made as the run has: sharding and exchanges are those of any platform; the compiler for
a GPU would need less memory for what is temporary, since it fuses more.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from gangway.config.importable import is_installed
from gangway.errors import DataMissingError, DataUnavailableError, TransientError, UsageError
from trainers.config.arguments import TrainingArguments
from trainers.config.model import AUTO, CHOICES
from trainers.diagnostics.memory import of_program
from trainers.parallel import host_memory
from trainers.parallel import mesh as meshes
from trainers.planning import collectives
from trainers.planning.estimate import Facts, answer, load_datasets, load_trainer, num_bytes
from trainers.runtime.executables import lowered
from trainers.step.host_flags import FLAGS
from trainers.trainer.base_trainer import BaseTrainer
from trainers.trainer.build import prepare
from trainers.trainer.placement import Placement

LIBTPU = "libtpu==0.0.42.*"
"""The release that belongs to the pinned JAX."""
NO_MEMORY = "RESOURCE_EXHAUSTED"
LARGE_BYTES = 64 << 20
"""An array of the state from this size on should not be whole on every device."""


def asked(arguments: TrainingArguments, request: Mapping[str, Any]) -> tuple[list[str], Facts]:
    return compiled(arguments, devices_of(**request["devices"]), request.get("room"), request["devices"]["kind"])


def devices_of(kind: str, count: int, topology: str = "", slices: int = 1) -> list[Any]:
    """Returns the devices of a run. On TPU `topology` is JAX's name of that of a slice, such as `v5e:4x4`. Elsewhere this process
    must have been started with as many devices (`XLA_FLAGS=--xla_force_host_platform_device_count=COUNT`). Raises ValueError, or
    UsageError if there is no compiler."""
    if kind != "tpu":
        if jax.device_count() != count:
            raise ValueError(f"this process has {jax.device_count()} devices: expected {count}")
        return jax.devices()
    if "TPU_LIBRARY_PATH" not in os.environ and not is_installed("libtpu"):
        raise UsageError(f"the compiler for TPUs is not installed: pip install '{LIBTPU}'; no TPU is needed for it")
    from jax.experimental import topologies

    several = {"num_slices": slices} if slices > 1 else {}
    found = list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **several).devices)
    if len(found) != count:  # of v4, whose chips it takes for two devices each
        raise ValueError(
            f"the compiler for TPUs has {len(found)} devices for {topology}, where a run has {count}: the memory of a device "
            "would not be that of the run; compile for another accelerator, such as hosts.accelerator=v5p"
        )
    return found


def compiled(
    arguments: TrainingArguments, devices: list[Any], room: float | None = None, kind: str = "cpu"
) -> tuple[list[str], Facts]:
    """Returns every problem that compiling shows, and the numbers of the program: of the first policy with which it fits in the
    room (None: in what the compiler knows), where `model.remat` is `auto`, else of the last. `kind`: of the hosts, for which
    CPU devices may stand."""
    if arguments.model.remat != AUTO:
        return _compiled(arguments, devices, kind)
    tried: list[tuple[str, int | None]] = []
    for policy in CHOICES:
        changed = dataclasses.replace(arguments, model=dataclasses.replace(arguments.model, remat=policy))
        problems, facts = _compiled(changed, devices, kind)
        need = facts.get("memory", {}).get("peak")
        tried.append((policy, need))
        if not problems and (room is None or need <= room):
            break
    return problems, facts | {"remat": tried}


def _compiled(arguments: TrainingArguments, devices: list[Any], kind: str) -> tuple[list[str], Facts]:
    trainer, facts = trainer_for(arguments)
    arguments.check_devices(len(devices))
    mesh = meshes.make_mesh(arguments.mesh, devices)
    lowered = lower(trainer, mesh)
    facts |= {
        "devices": len(devices),
        "device_kind": devices[0].device_kind,
        "mesh": dict(mesh.shape),
        "whole": whole_arrays(trainer),
    }
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if NO_MEMORY not in str(error):
            raise
        # The first of many lines, which tells the sizes.
        why = str(error).partition(f"{NO_MEMORY}:")[2].strip().partition("\n")[0]
        return [f"the step does not fit in the memory of a device: {why}"], facts
    text = program.as_text() or ""
    exchanged = {"exchanged": collectives.of(text), "exchanged_over": collectives.by_axes(text, mesh.shape)}
    memory = of_program(program, devices[0].platform)
    return [], facts | {"memory": apart(memory, trainer) if kind == "gpu" else memory, **exchanged}


def apart(memory: Mapping[str, int], trainer: BaseTrainer) -> dict[str, int]:
    """Returns the bytes without those of the state that lie in the host's memory, which is the same as the devices' where CPU
    devices stand for GPUs."""
    leaves = jax.tree.leaves(trainer.placement.placed_state)
    moved = sum(
        num_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        for leaf in leaves
        if leaf.sharding.memory_kind == host_memory.KIND
    )
    return {**memory, "peak": memory["peak"] - moved, "arguments": memory["arguments"] - moved, "host": memory["host"] + moved}


def trainer_for(arguments: TrainingArguments) -> tuple[BaseTrainer, Facts]:
    """Returns the trainer of a run, and notes on its data: where they cannot be read from here, rows of the same
    shapes stand for them. Raises ValueError for a trainer that only implements the protocol."""
    cls = load_trainer(arguments.trainer)
    if not issubclass(cls, BaseTrainer):
        raise ValueError(f"trainer = {arguments.trainer!r}: only what inherits trainers.base:BaseTrainer can be compiled here")
    try:
        return cls(arguments, *load_datasets(arguments)), {}
    except (DataMissingError, DataUnavailableError) as error:
        return cls(arguments, StandIn(arguments)), {"stand_in": str(error)}


def lower(trainer: BaseTrainer, mesh: Mesh) -> jax.stages.Lowered:
    """Returns the train step for a mesh whose devices need not be there. Raises what tracing raises."""
    # Before anything is made: hooks that are traced may look at the mesh.
    trainer.placement = made = Placement(trainer.arguments, trainer.design, mesh)
    layout = prepare(trainer).step_layout
    sums = layout.zeros()
    args = (
        made.placed_state,
        jax.ShapeDtypeStruct(sums.shape, sums.dtype, sharding=meshes.replicated(mesh)),
        made.step_batch_shapes(),
        jax.ShapeDtypeStruct(
            (mesh.size, len(FLAGS) + bool(trainer.arguments.snapshot.num_slots)), np.int32, sharding=meshes.one_per_device(mesh)
        ),
        *made.frozen_shapes,
    )
    return lowered(made.jit_train_step(made.design.train_step(layout)), args)


def whole_arrays(trainer: BaseTrainer) -> dict[str, int]:
    """Returns the bytes of the large arrays of the state, and of the frozen weights, that every device has whole, by name."""
    return {
        jax.tree_util.keystr(path[1:], simple=True, separator="."): size
        for path, leaf in jax.tree_util.tree_leaves_with_path((trainer.placement.placed_state, *trainer.placement.frozen_shapes))
        if leaf.sharding.is_fully_replicated and (size := num_bytes(leaf.shape, leaf.dtype)) >= LARGE_BYTES
    }


class StandIn:
    """Rows of `sequence_length` + 1 tokens, all 0: of one document, as packed rows are if `data` packs."""

    takes_any_index = True

    def __init__(self, arguments: TrainingArguments):
        config = arguments.data
        places = config.sequence_length + 1
        self._row = {"tokens": np.zeros(places, np.int32), "sample_id": np.zeros((), np.int32)}
        if config.packing is not None:
            self._row |= {"segments": np.ones(places, np.int32), "positions": np.arange(places, dtype=np.int32)}
        if config.packing is not None or config.mixture:
            self._row |= {"token_weight": np.ones(places, np.float32), "source": np.zeros((), np.int32)}

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._row


if __name__ == "__main__":
    answer(asked, ValueError, UsageError, TransientError)
