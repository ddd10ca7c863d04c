"""Optimizers compute, and keep their state, in float32 at least, whatever type the parameters have.

In bfloat16 a running mean sticks: with the decay 0.999 a second moment no longer moves at half of its true value, for what a step
adds is less than half of its last bit. So does a parameter: one of 1.0 does not move by updates below 0.002. It moves if the
optimizer keeps a master weight of float32 beside it (Micikevicius et al. 2018), or if it is rounded up or down at random, so that
the mean is right (Gupta et al. 2015).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gangway.errors import UsageError
from trainers.optim.param_groups import parameter_path

BFLOAT16_BITS = (8, 7)
"""Of the exponent, and of the mantissa."""


class MasterWeights(NamedTuple):
    """The state of an optimizer, and beside it that of the parameters that it sees in float32."""

    optimizer: Any
    masters: Any
    """Like the parameters, float32; None for those that are as wide already."""


class RoundedAtRandom(NamedTuple):
    optimizer: Any
    num_updates: jax.Array
    """int32: so far."""


def in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `optimizer`, which sees parameters and gradients of a narrower type as float32. So its state is float32, but for
    what is kept in another type on request (`moment_dtype`), and so are its updates."""

    def init(params: Any) -> Any:
        return optimizer.init(_wide(params))

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return optimizer.update(_wide(gradients), state, _wide(params))

    return optax.GradientTransformation(init, update)


def with_master_weights(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `optimizer`, whose updates of parameters of bfloat16 add up in float32: what the update of one step is too small to
    change of a parameter, that of later steps does. Parameters that are as wide already cost nothing."""
    wide = in_float32(optimizer)

    def init(params: Any) -> Any:
        masters = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else None, params)
        return MasterWeights(wide.init(params), masters) if jax.tree.leaves(masters) else wide.init(params)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if not isinstance(state, MasterWeights):
            return wide.update(gradients, state, params)
        exact = jax.tree.map(_exact, params, state.masters)
        updates, inner = wide.update(gradients, state.optimizer, exact)

        def of_parameter(update: jax.Array, before: jax.Array, param: jax.Array, master: jax.Array | None) -> jax.Array:
            return update if master is None else update + (before - _wide(param))

        updates = jax.tree.map(of_parameter, updates, exact, params, state.masters)
        # What becomes the parameter, before it is rounded.
        masters = jax.tree.map(
            lambda update, param, master: None if master is None else _wide(param) + update, updates, params, state.masters
        )
        return updates, MasterWeights(inner, masters)

    return optax.GradientTransformation(init, update)


def _exact(param: jax.Array, master: jax.Array | None) -> jax.Array:
    """Returns the value that `param` is the rounding of: its master, unless something has changed it since, as pruning does."""
    if master is None:
        return param
    # Not by `astype`: a compiler may leave out a conversion there and back.
    is_same = jax.lax.reduce_precision(master, *BFLOAT16_BITS) == _wide(param)
    return jnp.where(is_same, master, _wide(param))


def rounded_at_random(
    optimizer: optax.GradientTransformation, key: Callable[[str, jax.Array], jax.Array]
) -> optax.GradientTransformation:
    """Returns `optimizer`, whose updates bring a parameter of bfloat16 to one of its two neighbours, the nearer one more often:
    the mean is the exact value. `key`: (name of the parameter, number of the update) -> what is drawn from."""
    wide = in_float32(optimizer)

    def init(params: Any) -> Any:
        return RoundedAtRandom(wide.init(params), jnp.zeros((), jnp.int32)) if any_narrow(params) else wide.init(params)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if not isinstance(state, RoundedAtRandom):
            return wide.update(gradients, state, params)
        updates, inner = wide.update(gradients, state.optimizer, params)

        def rounded(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
            if param.dtype != jnp.bfloat16:
                return update
            bits = jax.random.bits(key(parameter_path(path), state.num_updates), param.shape, jnp.uint16)
            return _rounded(_wide(param) + update, bits) - _wide(param)

        updates = jax.tree_util.tree_map_with_path(rounded, updates, params)
        return updates, RoundedAtRandom(inner, state.num_updates + 1)

    return optax.GradientTransformation(init, update)


def _rounded(value: jax.Array, bits: jax.Array) -> jax.Array:
    """Returns a float32 that bfloat16 has. `bits` (uint16) is added to the part that bfloat16 has not: a carry rounds away from
    0."""
    added = jax.lax.bitcast_convert_type(value, jnp.uint32) + bits.astype(jnp.uint32)
    found = jax.lax.bitcast_convert_type(added & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(value), found, value)


def share_lost(params: Any, updates: Any) -> jax.Array:
    """Returns the share of the values of bfloat16 parameters that their update, which is not 0, does not change. float32."""
    lost, moved = jnp.zeros(()), jnp.zeros(())
    for update, param in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
        if param.dtype == jnp.bfloat16:
            after = jax.lax.reduce_precision(_wide(param) + update, *BFLOAT16_BITS)
            moved += jnp.mean(update != 0) * update.size
            lost += jnp.mean((update != 0) & (after == _wide(param))) * update.size
    return lost / jnp.maximum(moved, 1)


def any_narrow(params: Any) -> bool:
    return any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))


def check_averages(params: Any) -> None:
    """Raises UsageError for parameters whose type loses what schedule_free_adamw adds to their average: it is kept in them."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if _wider(leaf.dtype) == leaf.dtype:
            continue
        raise UsageError(
            f"optimizer.name = 'schedule_free_adamw': the parameter {parameter_path(path)} is {leaf.dtype}, in which the average "
            "that it keeps no longer moves after some hundred steps; set param_dtype: float32 (dtype may be bfloat16), "
            "optimizer.master_weights: float32, or use adamw"
        )


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(_wider(leaf.dtype)), tree)


def _wider(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
