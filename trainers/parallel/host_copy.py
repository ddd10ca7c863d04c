"""A copy of arrays in this host's memory, from which they can be put on its devices again."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

Index = tuple[tuple[int | None, int | None], ...]
"""The part of an array that a device has: (start, stop) of each dimension."""


class HostCopy:
    """The parts of the arrays of `tree` that this host's devices have. It stays as it is when the arrays are donated."""

    def __init__(self, tree: Any):
        self._arrays = jax.tree.map(_Array, tree)

    def put(self) -> Any:
        """Returns the tree of arrays, each with the sharding that it had. All hosts must call this."""
        return jax.tree.map(lambda array: array.put(), self._arrays)


class _Array:
    def __init__(self, array: jax.Array):
        self.shape, self.sharding, self.parts = array.shape, array.sharding, dict[Index, np.ndarray]()
        for shard in array.addressable_shards:
            if _key(shard.index) not in self.parts:
                # A copy: NumPy may look into the device's own memory, which the next donation overwrites.
                self.parts[_key(shard.index)] = np.array(shard.data)

    def put(self) -> jax.Array:
        # A copy again: an array on a CPU may use NumPy's memory, and would be donated with it.
        return jax.make_array_from_callback(self.shape, self.sharding, lambda index: self.parts[_key(index)].copy())


def _key(index: Any) -> Index:
    return tuple((part.start, part.stop) for part in index)
