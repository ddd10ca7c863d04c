"""The device mesh, and the sharding of each array on it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from trainers.config import MeshConfig
from trainers.config.mesh import CONTEXT, PIPELINE, SLICE, TENSOR, PipelineConfig, batch_axes, num_replicas, stage_axes

LOGICAL_AXIS_RULES: Mapping[str, str | tuple[str, ...] | None] = {
    "vocab": TENSOR,
    "embed": ("fsdp", CONTEXT),
    # Of scales and biases: to gather so few numbers in each layer would take longer than to add up their gradients once.
    "norm": None,
    "mlp": TENSOR,
    "experts": "expert",
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "head_dim": None,
    "layers": PIPELINE,
}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh over all devices of the run. Hosts are in order, so that tensor groups stay within a host where they fit.
    Raises ValueError if the devices are of more or fewer slices than the mesh has, and the platform knows them."""
    devices = jax.devices() if devices is None else devices
    sizes = config.resolve(len(devices))
    # Auto: the compiler derives the shardings inside a program, and models need not state them.
    return Mesh(_by_slices(sizes, devices), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _by_slices(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Returns the devices in the shape of the mesh. TPUs tell their slices: each coordinate of the axis `slice` is one of them.
    Elsewhere devices that follow each other are a slice."""
    shape = tuple(sizes.values())
    if sizes.get(SLICE, 1) == 1 or devices[0].platform != "tpu":
        return np.array(devices).reshape(shape)
    found = {getattr(device, "slice_index", 0) for device in devices}
    if len(found) != sizes[SLICE]:
        raise ValueError(f"mesh.slice = {sizes[SLICE]}: the devices are of {len(found)} slices; set mesh.slice={len(found)}")
    within = tuple(1 if axis == SLICE else size for axis, size in sizes.items())
    across = tuple(size if axis == SLICE else 1 for axis, size in sizes.items())
    return mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)


_traced_for: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


_pipeline: ContextVar[PipelineConfig | None] = ContextVar("pipeline", default=None)


def tracing_for(mesh: Mesh, function: Callable[..., Any], *, pipeline: PipelineConfig | None = None) -> Callable[..., Any]:
    """Returns `function`, to be jitted, whose model may ask for the mesh (`traced_for`): some parts of a model divide their work
    by hand, where the compiler would gather whole arrays. `pipeline` says how examples go through stages."""

    @functools.wraps(function)
    def traced(*args: Any) -> Any:
        token, how = _traced_for.set(mesh), _pipeline.set(pipeline)
        try:
            return function(*args)
        finally:
            _pipeline.reset(how)
            _traced_for.reset(token)

    return traced


def asked_pipeline() -> PipelineConfig:
    """Returns how examples shall go through the stages in the program that is traced."""
    return _pipeline.get() or PipelineConfig()


def traced_for() -> Mesh | None:
    """Returns the mesh of the program that is traced; None if it has one device, or if only shapes are asked for: a standby
    traces before it has devices."""
    mesh = _traced_for.get()
    return None if mesh is None or mesh.size == 1 else mesh


_within_stage: ContextVar[bool] = ContextVar("within_stage", default=False)


@contextmanager
def within_stage() -> Iterator[None]:
    """While what one stage of a pipeline does is traced."""
    token = _within_stage.set(True)
    try:
        yield
    finally:
        _within_stage.reset(token)


def in_stage() -> bool:
    """Returns whether what is traced is what one stage of a pipeline does."""
    return _within_stage.get()


def rows_over(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of the mesh over which the examples of what is traced are divided: within a stage of a pipeline, all but
    that of the stages."""
    return stage_axes(mesh.shape) if in_stage() else batch_axes(mesh.shape)


def dividing(mesh: Mesh, rows: int) -> tuple[str, ...] | None:
    """Returns `rows_over`; None if the devices along these axes cannot have equal parts of so many examples."""
    axes = rows_over(mesh)
    return None if rows % math.prod(mesh.shape[axis] for axis in axes) else axes


def over_tensor(mesh: Mesh | AbstractMesh, size: int) -> str | None:
    """Returns the axis `tensor`; None if its devices cannot have equal parts of so many heads or channels."""
    return None if size % mesh.shape[TENSOR] else TENSOR


def traced_device() -> jax.Device | None:
    """Returns a device of the program that is traced, which need not be one of this machine; None if only shapes are asked
    for."""
    mesh = _traced_for.get()
    return None if mesh is None else mesh.devices.flat[0]


def on_each_replica(function: Callable[..., Any], rows: jax.Array, weights: Any, targets: jax.Array) -> Any:
    """Returns `function(rows, weights, targets)`, arrays [B, T] in any pytree, given rows and targets [B, T, ...]. `weights` are
    arrays in any pytree. Traced.

    Each replica computes it for its rows, and each device for its tokens of them (`mesh.context`), with weights that are gathered
    once, and of whose gradient there is one sum: in a loop over parts of the rows the compiler might gather, and add up, in each
    part.
    """
    mesh = traced_for()
    if mesh is None or rows.shape[0] % num_replicas(mesh.shape):
        return function(rows, weights, targets)
    replicas = batch_axes(mesh.shape)
    axes = tuple(axis for axis in (*replicas, CONTEXT) if axis in mesh.shape)

    def varying(weight: jax.Array) -> jax.Array:
        return jax.lax.pcast(weight.astype(np.float32), axes, to="varying").astype(weight.dtype)

    def of_replica(rows: jax.Array, weights: Any, targets: jax.Array) -> Any:
        # Said before the loop: here, and not in each part, is then the sum of the gradients, which float32 keeps exact enough for
        # any number of replicas.
        return function(rows, jax.tree.map(varying, weights), targets)

    of_rows, whole = PartitionSpec(replicas, *axes[len(replicas) :]), PartitionSpec()
    mapped = jax.shard_map(of_replica, mesh=mesh, in_specs=(of_rows, whole, of_rows), out_specs=of_rows, axis_names=set(axes))
    return mapped(rows, weights, targets)


def by_rows(x: jax.Array) -> jax.Array:
    """Returns `x`, whose first dimension is one of examples, with that divided over the replicas and the others whole. Traced.

    Said of activations: the compiler might else divide them as the weights are, and add up the products of all examples on all
    devices."""
    mesh = traced_for()
    if mesh is None or (axes := dividing(mesh, x.shape[0])) is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(axes)))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def put_everywhere(mesh: Mesh, value: np.ndarray) -> jax.Array:
    """Returns a value that all hosts have as one replicated array. Unlike `jax.device_put`, this does not make the hosts
    compare their copies, which would be a collective and a wait."""
    return jax.make_array_from_callback(value.shape, replicated(mesh), lambda index: value[index])


def micro_batches(mesh: Mesh) -> NamedSharding:
    """Returns the sharding for arrays [accumulation_steps, micro_batch, ...]."""
    return NamedSharding(mesh, PartitionSpec(None, batch_axes(mesh.shape)))


def padded_rows(mesh: Mesh, rows: int) -> int:
    """Returns the least number of rows, `rows` or more, that the replicas can divide evenly."""
    replicas = num_replicas(mesh.shape)
    # Rounded up in integers: a float would be inexact for very large numbers.
    return -(-rows // replicas) * replicas


def one_per_device(mesh: Mesh) -> NamedSharding:
    """Returns the sharding for arrays [num_devices, ...] of which each host fills the rows of its own devices."""
    # One dimension over all axes together: every device has exactly one row.
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def rule_of(sizes: Mapping[str, int], name: str | None) -> tuple[str, ...]:
    """Returns the axes of a mesh, with these sizes, that shall divide a dimension with this logical axis; an axis of the mesh
    stands for itself."""
    rule = LOGICAL_AXIS_RULES.get(name, name if name in sizes else None) if name else None
    return tuple(axis for axis in ((rule,) if isinstance(rule, str) else rule or ()) if axis in sizes)


def dividing_dimension(sizes: Mapping[str, int], name: str | None, number: int) -> tuple[str, ...]:
    """Returns the axes of a mesh, with these sizes, that do divide it: the first ones of its rule."""
    axes = rule_of(sizes, name)
    # Whole, and not padded: an odd vocabulary, say, costs memory and no error.
    while axes and number % math.prod(sizes[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def parameter_sharding(mesh: Mesh, logical_axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """Returns the sharding by the logical axis rules. A dimension that its mesh axes do not divide is divided by the first ones
    that do, or stays whole on every device (`trainers.step.divided` tells which do)."""

    def mesh_axes(name: str | None, size: int) -> str | tuple[str, ...] | None:
        axes = dividing_dimension(mesh.shape, name, size)
        return axes if len(axes) > 1 else axes[0] if axes else None

    return NamedSharding(mesh, PartitionSpec(*map(mesh_axes, logical_axes, shape)))


def like_parameters(mesh: Mesh, tree: Any, parameter_shardings: Any, parameter_shapes: Any) -> Any:
    """Returns shardings for an optimizer state: a leaf that ends in a parameter's path and has its shape gets the parameter's
    sharding.

    `jax.jit(tx.init)` alone would replicate the moments on every device.
    """
    parameter_specs = {
        jax.tree_util.keystr(path): (shape.shape, sharding)
        for (path, shape), sharding in zip(
            jax.tree_util.tree_leaves_with_path(parameter_shapes), jax.tree.leaves(parameter_shardings), strict=True
        )
    }

    def sharding_of(path: Any, leaf: Any) -> NamedSharding:
        # Suffixes are tried from the longest: a parameter's path may itself end in another's.
        for start in range(len(path)):
            shape, sharding = parameter_specs.get(jax.tree_util.keystr(path[start:]), (None, None))
            # By shape too: factored moments (Adafactor) end in a parameter's path, and have another shape.
            if shape == leaf.shape:
                return sharding
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding_of, tree)
