"""Arrays that lie in the memory of the devices' hosts. A program brings them to the devices a layer at a time: all at once they
would need as much memory there as if they had never left."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

KIND = "pinned_host"
"""JAX's name of the hosts' memory that devices read by themselves."""
STACKED = 3
"""An array of so many dimensions has one matrix of each layer at least."""


def kinds_of(device: Any) -> list[str]:
    """Returns the kinds of memory that a device can use. It need not be there, if a compiler describes it."""
    return [memory.kind for memory in device.addressable_memories()]


def lacking(devices: Iterable[Any]) -> str:
    """Returns what to tell of devices that cannot use their hosts' memory; empty if they can."""
    device = next(iter(devices))
    kinds = kinds_of(device)
    if KIND in kinds:
        return ""
    return f"the devices ({device.device_kind}) have no memory of kind {KIND} (JAX tells: {', '.join(kinds)})"


def is_offloaded(leaf: Any) -> bool:
    """Whether an array of the optimizer's state goes to the hosts' memory: matrices do. The others are small."""
    return leaf.ndim >= 2


def on_host(tree: Any, shardings: Any) -> Any:
    """Returns the shardings of `tree`, with the hosts' memory for what is offloaded."""
    return jax.tree.map(lambda leaf, each: each.with_memory_kind(KIND) if is_offloaded(leaf) else each, tree, shardings)


def is_on_host(leaf: Any) -> bool:
    """Whether an array that a program is traced for lies in the hosts' memory."""
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def to_device(tree: Any) -> Any:
    """Returns the arrays in the memory of the devices. Traced."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if is_on_host(leaf) else leaf, tree)


def to_where(leaf: Any, other: Any) -> Any:
    """Returns the array in the memory in which `other` lies. Traced."""
    return jax.device_put(leaf, jax.memory.Space.Host) if is_on_host(other) else leaf


def taken(tree: Any, index: Any) -> Any:
    """Returns the slices [1, ...] of stacked arrays at `index`, in the memory of the devices. Traced."""
    return to_device(jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=True), tree))


def put(tree: Any, slices: Any, index: Any) -> Any:
    """Returns the arrays with these slices at `index`, each where it was. Traced."""

    def written(leaf: Any, part: Any) -> Any:
        return jax.lax.dynamic_update_index_in_dim(leaf, to_where(part, leaf), index, 0)

    return jax.tree.map(written, tree, slices)
