"""The device mesh, and where each array lies on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trainers.config import MeshConfig

BATCH_AXES = ("data", "fsdp")
"""Mesh axes over which examples are divided: each (data, fsdp) coordinate is one replica."""

LOGICAL_AXIS_RULES: Mapping[str, str | None] = {
    "vocab": "tensor",
    "embed": "fsdp",
    "mlp": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "layers": None,
}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over all devices of the run, hosts in order, so that tensor groups stay within a host where they fit."""
    devices = jax.devices() if devices is None else devices
    sizes = config.resolve(len(devices))
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def put_everywhere(mesh: Mesh, value: np.ndarray) -> jax.Array:
    """A host's copy of a value that all hosts have, as one replicated array. Unlike `jax.device_put`, it does not make the
    hosts compare their copies, which would be a collective and a wait."""
    return jax.make_array_from_callback(value.shape, replicated(mesh), lambda index: value[index])


def micro_batches(mesh: Mesh) -> NamedSharding:
    """For arrays [accumulation_steps, micro_batch, ...]."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))


def padded_rows(mesh: Mesh, rows: int) -> int:
    """The least number of rows from `rows` on that the replicas can share evenly."""
    replicas = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    return -(-rows // replicas) * replicas


def one_per_device(mesh: Mesh) -> NamedSharding:
    """For arrays [num_devices, ...] of which each host fills the rows of its own devices."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def parameter_sharding(mesh: Mesh, logical_axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """By the logical axis rules. A dimension that its mesh axis does not divide stays whole on every device."""

    def mesh_axis(name: str | None, size: int) -> str | None:
        axis = LOGICAL_AXIS_RULES.get(name) if name else None
        return axis if axis and size % mesh.shape[axis] == 0 else None

    return NamedSharding(mesh, PartitionSpec(*map(mesh_axis, logical_axes, shape)))


def like_parameters(mesh: Mesh, tree: Any, parameter_shardings: Any, parameter_shapes: Any) -> Any:
    """Shardings for an optimizer state: a leaf that ends in a parameter's path and has its shape lies where the parameter does.

    `jax.jit(tx.init)` alone would replicate the moments on every device.
    """
    placed = {
        jax.tree_util.keystr(path): (shape.shape, sharding)
        for (path, shape), sharding in zip(
            jax.tree_util.tree_leaves_with_path(parameter_shapes), jax.tree.leaves(parameter_shardings), strict=True
        )
    }

    def place(path: Any, leaf: Any) -> NamedSharding:
        # Suffixes are tried from the longest: a parameter's path may itself end in another's.
        for start in range(len(path)):
            shape, sharding = placed.get(jax.tree_util.keystr(path[start:]), (None, None))
            if shape == leaf.shape:
                return sharding
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, tree)
