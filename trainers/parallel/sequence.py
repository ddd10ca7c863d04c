"""Sequences that are divided over the axis `context` of the mesh, and the order of their tokens there.

With N devices along the axis, a sequence has 2 N chunks of the same length. Device i has the chunks i and 2 N - 1 - i, an early
one and a late one: the balanced order. Each device has the same work of causal attention then (the Llama team, 2024, section
3.3.2). Outside of a model a sequence has its usual order: device i has the chunks 2 i and 2 i + 1.

Shape suffixes: B rows, T tokens.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gangway.config.section import require_none
from trainers.config.mesh import CHUNKS, CONTEXT, Shared, problems
from trainers.parallel.mesh import dividing, rows_over, traced_for


def num_parts() -> int:
    """Returns over how many devices each sequence of the program that is traced is divided."""
    mesh = traced_for()
    return 1 if mesh is None else mesh.shape.get(CONTEXT, 1)


def check_length(time: int) -> None:
    """Raises ValueError if the devices cannot have equal parts of a row of so many tokens."""
    parts = num_parts()
    if parts > 1:
        tokens = Shared(CONTEXT, "the tokens of a sequence", time, CHUNKS, may_change=True)
        require_none(problems([tokens], {CONTEXT: parts}))


def filled_up(x_BT: jax.Array) -> jax.Array:
    """Returns the rows with so many zeros at their ends that the devices can have equal parts. Of causal attention, no other
    token sees them. Traced."""
    chunks = CHUNKS * num_parts() if num_parts() > 1 else 1
    return jnp.pad(x_BT, ((0, 0), (0, -x_BT.shape[1] % chunks)))


def slots(time: int, parts: int) -> np.ndarray:
    """Returns int32[T]: which token of a row is in each place, in the order that the devices have them in."""
    chunks = np.arange(time, dtype=np.int32).reshape(CHUNKS * parts, -1)
    return np.concatenate([chunks[[device, -1 - device]].reshape(-1) for device in range(parts)])


def divided(x_BT: jax.Array) -> jax.Array:
    """Returns `x_BT` [B, T, ...] with its rows divided over the replicas, and its tokens over the axis `context`. Traced."""
    return _placed(x_BT, CONTEXT)


def divided_from_table(x_BTD: jax.Array) -> jax.Array:
    """Returns rows of a table, which is divided along D as parameters are, divided as `divided` does. Traced."""
    # One axis of the mesh after the other: at once, the compiler would have all of it whole on each device.
    return divided(_placed(x_BTD, None, CONTEXT))


def _placed(x_BT: jax.Array, *axes: str | None) -> jax.Array:
    mesh = traced_for()
    if mesh is None or num_parts() == 1:
        return x_BT
    rows = dividing(mesh, x_BT.shape[0])
    return jax.lax.with_sharding_constraint(x_BT, NamedSharding(mesh, PartitionSpec(rows, *axes)))


def balanced(x_BT: jax.Array) -> jax.Array:
    """Returns numbers of tokens [B, T], which all devices along the axis have, in the balanced order, divided. Traced."""
    parts = num_parts()
    return x_BT if parts == 1 else divided(x_BT[:, slots(x_BT.shape[1], parts)])


def balanced_from_parts(x_BTD: jax.Array) -> jax.Array:
    """Returns an array [B, T, D], of which each device has its part in the usual order, in the balanced order. Traced."""
    parts = num_parts()
    return x_BTD if parts == 1 else _exchanged(x_BTD, partial(_to_balanced, parts=parts))


def in_order(x_BTD: jax.Array) -> jax.Array:
    """Returns an array [B, T, D] that is in the balanced order in the usual one, divided. Traced."""
    parts = num_parts()
    return x_BTD if parts == 1 else _exchanged(x_BTD, partial(_to_order, parts=parts))


def _exchanged(x_BTD: jax.Array, exchange: partial[jax.Array]) -> jax.Array:
    mesh = traced_for()
    assert mesh is not None
    rows = dividing(mesh, x_BTD.shape[0])
    spec = PartitionSpec(rows, CONTEXT)
    # By hand: the compiler would gather the whole sequence on each device.
    return jax.shard_map(
        exchange, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={*rows_over(mesh), CONTEXT}, check_vma=False
    )(x_BTD)


def _owner(chunk: int, parts: int) -> int:
    """Returns which device has a chunk in the balanced order."""
    return min(chunk, CHUNKS * parts - 1 - chunk)


def _to_order(x_BTD: jax.Array, parts: int) -> jax.Array:
    # Chunks with even numbers are first on their new devices. An even device has one of them as its early chunk, an odd one as
    # its late one; so each device sends one even chunk and one odd one.
    early, late = jnp.split(x_BTD, CHUNKS, axis=1)
    is_even = jax.lax.axis_index(CONTEXT) % 2 == 0
    sent = jnp.where(is_even, early, late), jnp.where(is_even, late, early)
    received = (
        jax.lax.ppermute(x, CONTEXT, [(_owner(CHUNKS * device + place, parts), device) for device in range(parts)])
        for place, x in enumerate(sent)
    )
    return jnp.concatenate(list(received), axis=1)


def _to_balanced(x_BTD: jax.Array, parts: int) -> jax.Array:
    received = (
        jax.lax.ppermute(x, CONTEXT, [(device, _owner(CHUNKS * device + place, parts)) for device in range(parts)])
        for place, x in enumerate(jnp.split(x_BTD, CHUNKS, axis=1))
    )
    even, odd = received
    is_even = jax.lax.axis_index(CONTEXT) % 2 == 0
    return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=1)
