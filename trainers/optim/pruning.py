"""Pruning by magnitude: the smallest weights of each parameter become 0 and stay 0, more and more of them.

After Zhu & Gupta (2017, "To prune, or not to prune", eq. 1): from step b to step e the part of each parameter that is 0 follows

    f (1 - (1 - p)^3)         with p = (step - b) / (e - b), from 0 to 1, and f = `final_sparsity`

and masks are made anew every `every_steps` steps. A weight that is 0 has the smallest magnitude, so none comes back.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trainers.config import PruningConfig
from trainers.errors import UsageError
from trainers.optim.param_groups import parameter_path, parameter_paths


class PruningState(NamedTuple):
    num_updates: jax.Array
    """int32"""
    masks: Any
    """Bools, like the parameters that are pruned: True for a weight that is kept. None for all other parameters."""


def pruning(config: PruningConfig, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `optimizer` with updates that set pruned weights to exactly 0."""
    if config.pattern is None:
        return optimizer
    # Last in the chain: masks need the updates as they are applied.
    return optax.chain(optimizer, _masking(config))


def check(config: PruningConfig, params: Any) -> None:
    """Raises UsageError if the pattern matches no parameter's name."""
    paths = parameter_paths(params)
    if config.pattern is not None and not any(re.search(config.pattern, path) for path in paths):
        raise UsageError(f"pruning.pattern = {config.pattern!r}: it is in no parameter's name; these are {', '.join(paths)}")


def sparsity(config: PruningConfig, step: jax.Array) -> jax.Array:
    """Returns the fraction of a parameter that is 0 after `step` updates."""
    p = jnp.clip((step - config.begin_step) / (config.end_step - config.begin_step), 0.0, 1.0)
    return config.final_sparsity * (1 - (1 - p) ** 3)


def _masking(config: PruningConfig) -> optax.GradientTransformation:
    def init(params: Any) -> PruningState:
        masks = jax.tree_util.tree_map_with_path(
            lambda path, x: jnp.ones(x.shape, bool) if re.search(str(config.pattern), parameter_path(path)) else None, params
        )
        return PruningState(jnp.zeros((), jnp.int32), masks)

    def update(updates: Any, state: PruningState, params: Any = None) -> tuple[Any, PruningState]:
        # The number of updates with this one: the schedule of sparsity counts those done.
        step = state.num_updates + 1
        # Also at `end_step`, which need not be a multiple of `every_steps`: the final sparsity must be reached.
        due = (step >= config.begin_step) & ((step % config.every_steps == 0) | (step == config.end_step))

        def new_mask(mask: jax.Array | None, param: jax.Array, update: jax.Array) -> jax.Array | None:
            if mask is None:
                return None
            # `cond`, not `where`: sorting all weights at every step would be too slow. By the weights after this update.
            return jax.lax.cond(due, lambda: _largest(param + update, sparsity(config, step)), lambda: mask)

        masks = jax.tree.map(new_mask, state.masks, params, updates, is_leaf=_is_none)
        # The update of a pruned weight is -param, so that the sum is exactly 0.
        pruned = jax.tree.map(
            lambda m, p, u: u if m is None else jnp.where(m, u, -p.astype(u.dtype)), masks, params, updates, is_leaf=_is_none
        )
        return pruned, PruningState(step, masks)

    return optax.GradientTransformation(init, update)


def _largest(weights: jax.Array, part_zero: jax.Array) -> jax.Array:
    """Returns True for all but the smallest fraction `part_zero` of the weights, by magnitude."""
    magnitudes = jnp.abs(weights)
    num_zero = jnp.floor(part_zero * weights.size).astype(jnp.int32)
    threshold = jnp.sort(magnitudes, axis=None)[jnp.maximum(num_zero - 1, 0)]
    # `>`, not `>=`: pruned weights tie at 0, and all of them must stay pruned.
    return (magnitudes > threshold) | (num_zero == 0)


def _is_none(node: Any) -> bool:
    return node is None
