"""Fingerprints of arrays: numbers that change when any bit changes, computed where the array lies, the same on any mesh; and,
in the same pass, how much of an array is not finite."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trainers.parallel import host_memory

MULTIPLIERS = (0x9E3779B1, 0xC2B2AE3D)
"""One for each of two lanes: a single lane of 32 bits would miss one in 2**32 changes."""
IN_ONE_LOOP = 4
"""So many arrays at most: a parameter, its two moments, its mean. The layers of a list are in more loops."""


def fingerprints(tree: Any) -> jax.Array:
    """Returns uint32[num_leaves, 2], traced: for each leaf two sums, over its elements, of a hash of (bits, position)."""
    return measured(tree)[:, : len(MULTIPLIERS)]


def measured(tree: Any) -> jax.Array:
    """Returns uint32[num_leaves, 3], traced: the fingerprint of each leaf, and how many of its words are of values that are
    infinite or NaN.

    A parameter and its moments are summed in one loop. This makes the program smaller, which is loaded in every recovery, and
    several sums in a loop do not wait for each other.
    """
    groups: dict[Any, list[int]] = {}
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for index, (path, leaf) in enumerate(leaves):
        of_layers = host_memory.is_on_host(leaf) and leaf.ndim >= host_memory.STACKED
        groups.setdefault((_parameter_names(path), leaf.shape, leaf.dtype, of_layers), []).append(index)
    fingerprint_of: dict[int, jax.Array] = {}
    for (*_, of_layers), members in groups.items():
        for start in range(0, len(members), IN_ONE_LOOP):
            some = members[start : start + IN_ONE_LOOP]
            stacks = [leaves[index][1] for index in some]
            rows = _sums_by_layers(stacks) if of_layers else _sums_of(host_memory.to_device(stacks))
            fingerprint_of.update(zip(some, rows, strict=True))
    # In the order of the leaves: `leaf_names` gives the names of the rows.
    return jnp.stack([fingerprint_of[index] for index in range(len(leaves))])


def _sums_of(members: Sequence[jax.Array], first: Any = None) -> jax.Array:
    """Returns uint32[members, 3], of arrays of one shape. `first`: they are slices of larger ones, and begin with this index;
    None: they are whole."""
    of_members = [_bits(member) for member in members]
    lanes: list[jax.Array] = []
    position = _positions(of_members[0][0].shape, first)
    for bits, not_finite in of_members:
        lanes += [*(_mix(bits, position, multiplier) for multiplier in MULTIPLIERS), not_finite]
    # Addition modulo 2**32 does not depend on the order, so any division over devices gives the same bits. All lanes in one pass
    # over the arrays: a pass for each took ten times as long on a CPU, and one over stacked arrays four times.
    sums = jax.lax.reduce(lanes, [jnp.uint32(0)] * len(lanes), _added, tuple(range(lanes[0].ndim)))
    return jnp.stack(sums).reshape(len(members), -1)


def _added(some: Sequence[jax.Array], others: Sequence[jax.Array]) -> list[jax.Array]:
    return [a + b for a, b in zip(some, others, strict=True)]


def _sums_by_layers(stacks: Sequence[jax.Array]) -> jax.Array:
    """Returns what `_sums_of` does, for arrays in the hosts' memory, of which the devices get a slice at a time."""
    zeros = jnp.zeros((len(stacks), len(MULTIPLIERS) + 1), jnp.uint32)

    def add(index: Any, sums: jax.Array) -> jax.Array:
        return sums + _sums_of(host_memory.taken(stacks, index), index.astype(jnp.uint32))

    return jax.lax.fori_loop(0, stacks[0].shape[0], add, zeros)


def leaf_names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def digest(names: Sequence[str], values: Any) -> str:
    """Returns one short hexadecimal digest of named fingerprints. Sorted by name: the order does not matter."""
    rows = [[name, *map(int, row)] for name, row in zip(names, values, strict=True)]
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()[:16]


def _parameter_names(path: Any) -> tuple[str, ...]:
    """Returns the dictionary keys at the end of a path: the names of a parameter, the same for its moments in the optimizer's
    state."""
    names: list[str] = []
    for entry in reversed(path):
        if not isinstance(entry, jax.tree_util.DictKey):
            break
        names.append(str(entry.key))
    return tuple(names)


def _positions(shape: tuple[int, ...], first: Any = None) -> jax.Array:
    """Returns uint32 of this shape: for each element a number that its index gives. `first`: as of `_sums_of`."""
    position = jnp.zeros((), jnp.uint32)
    for dimension in range(len(shape)):
        # The index in the whole array, not in a shard: so the result is the same on any mesh.
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, dimension)
        index = index + first if first is not None and dimension == 0 else index
        # It wraps modulo 2**32, on purpose: positions need only be distinguished.
        position = position * jnp.uint32(2654435761) + index
    return position


def _mix(bits: jax.Array, position: jax.Array, multiplier: int) -> jax.Array:
    # The multipliers and shifts are those of MurmurHash3's finalizer (Appleby).
    h = (bits ^ (position * jnp.uint32(multiplier))) * jnp.uint32(0x85EBCA6B)
    h ^= h >> 13
    h *= jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _bits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the bits of each element as uint32, and of the same shape 1 for what is not finite, else 0. Traced. An element of
    more than 32 bits becomes a row of its words, the low one first."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        # A typed key is no number: only its key data can be cast to bits.
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return bits, jnp.zeros_like(bits)
    not_finite = (~jnp.isfinite(x)).astype(jnp.uint32)
    return bits, jnp.broadcast_to(not_finite.reshape(x.shape + (1,) * (bits.ndim - x.ndim)), bits.shape)
