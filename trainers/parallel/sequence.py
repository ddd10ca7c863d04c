"""Sequences that are divided over the axis `context` of the mesh, the order of their tokens there, and tokens that are divided
over the axis `tensor`.

With N devices along the axis, a sequence has 2 N chunks of the same length. Device i has the chunks i and 2 N - 1 - i, an early
one and a late one: the balanced order. Each device has the same work of causal attention then (the Llama team, 2024, section
3.3.2). Outside of a model a sequence has its usual order: device i has the chunks 2 i and 2 i + 1.

Shape suffixes: B rows, T tokens; N tokens, [B * T] or, of divided sequences, [B, T]; D channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gangway.config.section import require_none
from trainers.config.mesh import CHUNKS, CONTEXT, TENSOR, Shared, problems
from trainers.parallel.mesh import by_rows, dividing, over_tensor, rows_over, traced_for


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


@dataclass(frozen=True)
class TokenParts:
    """What each device of the axis `tensor` has of activations: in the products of matrices all tokens of its replica and its
    part of the columns, and between them its part of the tokens.

    So it computes norms and sums of its tokens alone, and keeps them alone for the backward pass (Korthikanti et al., 2022). What
    was added up over the axis after each product, for all tokens, is now added up for the tokens of each device, and gathered
    before the next one: as many bytes.

    A sharding that is None: the compiler decides. The methods return their argument, so divided; they are traced."""

    all_tokens: NamedSharding | None = None
    own_tokens: NamedSharding | None = None
    own_columns: NamedSharding | None = None

    @classmethod
    def of(cls, x_ND: jax.Array) -> TokenParts:
        """Returns how activations like these are divided; `WHOLE` if there is no such axis, or if it cannot divide them."""
        mesh = traced_for()
        if mesh is None or mesh.shape[TENSOR] == 1 or (rows := dividing(mesh, x_ND.shape[0])) is None:
            return WHOLE
        is_shared = x_ND.ndim > 2
        tokens = (rows, (CONTEXT, TENSOR)) if is_shared else ((*rows, TENSOR),)
        if any(size % math.prod(mesh.shape[axis] for axis in axes) for size, axes in zip(x_ND.shape, tokens, strict=False)):
            return WHOLE
        whole = (rows, CONTEXT) if is_shared else (rows,)
        specs = (PartitionSpec(*whole), PartitionSpec(*tokens), PartitionSpec(*whole, TENSOR))
        return cls(*(NamedSharding(mesh, spec) for spec in specs))

    def between(self, x_ND: jax.Array) -> jax.Array:
        """Of the residual stream."""
        if self.own_tokens is None:
            return divided(x_ND) if x_ND.ndim > 2 else by_rows(x_ND)
        return jax.lax.with_sharding_constraint(x_ND, self.own_tokens)

    def gathered(self, x_ND: jax.Array) -> jax.Array:
        """Before a product: each device gets all tokens. In the backward pass the sums of all devices are divided."""
        return x_ND if self.own_tokens is None else _gathered(x_ND, self)

    def scattered(self, x_ND: jax.Array) -> jax.Array:
        """After a product: each device gets the sums of all devices for its tokens. In the backward pass they are gathered."""
        return x_ND if self.own_tokens is None else _scattered(x_ND, self)

    def columns(self, x_NF: jax.Array) -> jax.Array:
        """Of a product whose columns are heads, or channels of the MLP."""
        if self.own_columns is None or over_tensor(self.own_columns.mesh, x_NF.shape[-1]) is None:
            return x_NF
        return jax.lax.with_sharding_constraint(x_NF, self.own_columns)


WHOLE = TokenParts()


def _all(x_ND: jax.Array, parts: TokenParts) -> jax.Array:
    return jax.lax.with_sharding_constraint(x_ND, parts.all_tokens)


def _own(x_ND: jax.Array, parts: TokenParts) -> jax.Array:
    # First as all tokens: where the sums of a product were asked for in parts at once, the compiler gathered its operands over
    # other axes. It makes a reduce-scatter of the two.
    return jax.lax.with_sharding_constraint(_all(x_ND, parts), parts.own_tokens)


_gathered = jax.custom_vjp(_all, nondiff_argnums=(1,))
_gathered.defvjp(lambda x_ND, parts: (_all(x_ND, parts), None), lambda parts, _, gradient_ND: (_own(gradient_ND, parts),))
_scattered = jax.custom_vjp(_own, nondiff_argnums=(1,))
_scattered.defvjp(lambda x_ND, parts: (_own(x_ND, parts), None), lambda parts, _, gradient_ND: (_all(gradient_ND, parts),))
