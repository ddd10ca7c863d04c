"""Fingerprints of arrays: numbers that change when any bit changes, computed where the array lies, the same on any mesh; and,
in the same pass, how much of an array is not finite."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from trainers.checkpoint import model_only
from trainers.checkpoint.validate import shapes
from trainers.parallel import host_memory
from trainers.parallel.mesh import replicated
from trainers.parallel.platform import wait_for_device
from trainers.runtime.executables import Program, ProgramStore
from trainers.step.finite import must_be_finite
from trainers.step.state import TrainState

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


@dataclass(frozen=True)
class Measurement:
    """What the devices compute of one state."""

    names: list[str]
    shapes: dict[str, str]
    _on_device: jax.Array

    @cached_property
    def described(self) -> Mapping[str, Any]:
        """What a checkpoint's meta says of the arrays in it. The first look waits for the device; it may be in any thread."""
        rows = wait_for_device(self._on_device)
        return {
            "shapes": self.shapes,
            "fingerprints": dict(zip(self.names, rows[:, :2].tolist(), strict=True)),
            "not_finite": _not_finite(self.names, rows),
        }


class MeasuredState:
    """Measures states of one shape. What was infinite as the run began, such as a mask, may stay so."""

    def __init__(self, mesh: Mesh, store: ProgramStore, note: Callable[[str], None]):
        try:
            # The text of all of ours that `measured` runs.
            code = "".join(map(inspect.getsource, (sys.modules[__name__], host_memory)))
        except OSError:  # the modules have none
            code = None
        self._program = Program("fingerprints", jax.jit(measured, out_shardings=replicated(mesh)), store, note, code=code)
        self._first: jax.Array | None = None
        """What was measured of the state that the run began with; not waited for."""
        self._first_names: list[str] = []
        self._allowed: Mapping[str, int] | None = None
        """How many words of a leaf were not finite as the run began. None: not known."""

    def load_ahead(self, state: TrainState) -> None:
        """Begins to load the program. `state` may be shapes with shardings."""
        self._program.load_ahead(state)

    def prepare(self, state: TrainState) -> None:
        """Compiles the program, and measures the state that the run begins with. `state` may be shapes with shardings."""
        if self._program.compiled is None:
            self._program.prepare(state)
        # Not waited for: the device may still compute the first state, while the host compiles the step.
        if self._allowed is None and all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state)):
            self._first, self._first_names = self._program(state), leaf_names(state)

    def fingerprint(self, state: TrainState) -> np.ndarray:
        """Returns uint32[num_leaves, 2], the same on all hosts. All hosts must call this."""
        return self._rows(state)[:, :2]

    def begin(self, state: TrainState) -> Measurement:
        """Begins to measure a state, which may be donated as soon as this returns. All hosts must call this."""
        on_device = self._program(state)  # first: the devices compute while the host finds the names
        return Measurement(leaf_names(state), shapes(state), on_device)

    def broken(self, not_finite: Mapping[str, int]) -> list[str]:
        """Returns the names of the leaves that have more values that are not finite than as the run began. `not_finite` are
        those of `described`."""
        allowed = self.allowed() or {}
        return [name for name, number in not_finite.items() if number > allowed.get(name, 0)]

    def broken_in(self, state: TrainState) -> list[str]:
        """As `broken`, of a state. All hosts must call this."""
        return self.broken(_not_finite(leaf_names(state), self._rows(state)))

    def allowed(self) -> Mapping[str, int] | None:
        """Returns how many words of each leaf may be not finite; None: not known. Waits for the device."""
        if self._allowed is None and self._first is not None:
            self._allowed, self._first = _not_finite(self._first_names, wait_for_device(self._first)), None
        return self._allowed

    def allow(self, not_finite: Mapping[str, int]) -> None:
        """The run goes on from a state that had these."""
        self._allowed = not_finite

    @property
    def infinite_parameters(self) -> bool | None:
        """Whether parameters were not finite as the run began; None: not known. Waits for the device."""
        return None if (allowed := self.allowed()) is None else any(name.startswith(f".{model_only.PART}") for name in allowed)

    def _rows(self, state: TrainState) -> np.ndarray:
        """Returns uint32[num_leaves, 3]: `array_fingerprints.measured`."""
        return wait_for_device(self._program(state))


def _not_finite(names: Sequence[str], rows: np.ndarray) -> dict[str, int]:
    """Returns how many words of each leaf are of values that are not finite, without leaves that have none and those that need
    not be finite. `rows` are those of `array_fingerprints.measured`."""
    counts = zip(names, rows[:, 2].tolist(), strict=True)
    return {name: count for name, count in counts if count and must_be_finite(name)}
