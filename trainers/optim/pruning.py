"""Pruning: parameters that become 0 and stay 0. By magnitude here, or by a user's own `trainers.protocol.Pruner`.

By magnitude it follows Zhu & Gupta (2017, "To prune, or not to prune", eq. 1): from step b to step e the part of each parameter
that is 0 follows

    f (1 - (1 - p)^3)         with p = (step - b) / (e - b), from 0 to 1, and f = `final_sparsity`

and masks are made anew every `every_steps` steps. A weight that is 0 has the smallest magnitude, so none comes back.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp

from gangway.errors import UsageError
from trainers.config import PruningConfig
from trainers.optim.param_groups import is_none, parameter_path, parameter_paths


class Magnitude:
    """A pruner: the smallest weights of each parameter become exactly 0. Its state are masks like the parameters that are
    pruned, True for a weight that is kept, and None for all other parameters."""

    def __init__(self, config: PruningConfig):
        self.config = config

    def init(self, params: Any) -> Any:
        pattern = str(self.config.pattern)
        return jax.tree_util.tree_map_with_path(
            lambda path, x: jnp.ones(x.shape, bool) if re.search(pattern, parameter_path(path)) else None, params
        )

    def pre_forward(self, params: Any, state: Any, step: jax.Array) -> Any:
        return params

    def post_gradient(self, params: Any, state: Any, step: jax.Array) -> tuple[Any, Any]:
        # The number of updates with this one: the schedule of sparsity counts those done.
        step, config = step + 1, self.config
        # Also at `end_step`, which need not be a multiple of `every_steps`: the final sparsity must be reached.
        due = (step >= config.begin_step) & ((step % config.every_steps == 0) | (step == config.end_step))

        def new_mask(mask: jax.Array | None, param: jax.Array) -> jax.Array | None:
            if mask is None:
                return None
            # `cond`, not `where`: sorting all weights at every step would be too slow.
            return jax.lax.cond(due, lambda: _largest(param, sparsity(config, step)), lambda: mask)

        masks = jax.tree.map(new_mask, state, params, is_leaf=is_none)
        pruned = jax.tree.map(lambda m, p: p if m is None else jnp.where(m, p, 0).astype(p.dtype), masks, params, is_leaf=is_none)
        return pruned, masks


def check(config: PruningConfig, params: Any) -> None:
    """Raises UsageError if the pattern matches no parameter's name."""
    paths = parameter_paths(params)
    if config.pattern is not None and not any(re.search(config.pattern, path) for path in paths):
        raise UsageError(f"pruning.pattern = {config.pattern!r}: it is in no parameter's name; these are {', '.join(paths)}")


def check_pruner(pruner: Any, params: Any) -> None:
    """Raises UsageError, naming the method, if a pruner does not return what it must. Traces its methods with the shapes of the
    parameters that are trained."""
    if missing := [name for name in ("init", "pre_forward", "post_gradient") if not callable(getattr(pruner, name, None))]:
        raise UsageError(
            f"build_pruner returned {type(pruner).__name__}, which lacks {', '.join(missing)}: expected the methods of "
            "trainers.protocol.Pruner"
        )
    name, step = type(pruner).__name__, jax.ShapeDtypeStruct((), jnp.int32)
    state = jax.eval_shape(pruner.init, params)
    _check_same(f"{name}.pre_forward", "the parameters", jax.eval_shape(pruner.pre_forward, params, state, step), params)
    returned = jax.eval_shape(pruner.post_gradient, params, state, step)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UsageError(f"{name}.post_gradient returned {type(returned).__name__}: expected (parameters, state)")
    _check_same(f"{name}.post_gradient", "the parameters", returned[0], params)
    _check_same(f"{name}.post_gradient", "the state", returned[1], state)


def sparsity(config: PruningConfig, step: jax.Array) -> jax.Array:
    """Returns the fraction of a parameter that is 0 after `step` updates."""
    p = jnp.clip((step - config.begin_step) / (config.end_step - config.begin_step), 0.0, 1.0)
    return config.final_sparsity * (1 - (1 - p) ** 3)


def _check_same(method: str, what: str, returned: Any, given: Any) -> None:
    after, before = (_described(tree) for tree in (returned, given))
    if wrong := sorted(name for name in after.keys() | before.keys() if after.get(name) != before.get(name)):
        detail = ", ".join(f"{name or what} {after.get(name)}, given {before.get(name)}" for name in wrong[:5])
        raise UsageError(f"{method} returned {what} of another shape or type: {detail}; the compiled step keeps them")


def _described(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {parameter_path(path): f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}" for path, leaf in leaves}


def _largest(weights: jax.Array, part_zero: jax.Array) -> jax.Array:
    """Returns True for all but the smallest fraction `part_zero` of the weights, by magnitude."""
    magnitudes = jnp.abs(weights)
    num_zero = jnp.floor(part_zero * weights.size).astype(jnp.int32)
    threshold = jnp.sort(magnitudes, axis=None)[jnp.maximum(num_zero - 1, 0)]
    # `>`, not `>=`: pruned weights tie at 0, and all of them must stay pruned.
    return (magnitudes > threshold) | (num_zero == 0)
