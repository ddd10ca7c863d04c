"""What each device of the axis `tensor` has of activations: in the products of matrices all tokens of its replica and its part of
the columns, and between them its part of the tokens.

So it computes norms and sums of its tokens alone, and keeps them alone for the backward pass (Korthikanti et al., 2022). What was
added up over the axis after each product, for all tokens, is now added up for the tokens of each device, and gathered before the
next one: as many bytes.

Shape suffixes: N tokens, [B * T] or, of divided sequences, [B, T]; D and F channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding, PartitionSpec

from trainers.config.mesh import CONTEXT, TENSOR
from trainers.parallel import sequence
from trainers.parallel.mesh import by_rows, dividing, over_tensor, traced_for


@dataclass(frozen=True)
class TokenParts:
    """None: the compiler decides. Its methods return their argument, so divided; they are traced."""

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
            return sequence.divided(x_ND) if x_ND.ndim > 2 else by_rows(x_ND)
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
