"""Optimizers compute, and keep their state, in float32 at least, whatever type the parameters have.

In bfloat16 a running mean sticks: with the decay 0.999 a second moment no longer moves at half of its true value, for what a step
adds is less than half of its last bit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainers.errors import UsageError
from trainers.optim.param_groups import parameter_path


def in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `optimizer`, which sees parameters and gradients of a narrower type as float32. So its state is float32, but for
    what is kept in another type on request (`moment_dtype`), and so are its updates."""

    def init(params: Any) -> Any:
        return optimizer.init(_wide(params))

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return optimizer.update(_wide(gradients), state, _wide(params))

    return optax.GradientTransformation(init, update)


def check_averages(params: Any) -> None:
    """Raises UsageError for parameters whose type loses what schedule_free_adamw adds to their average: it is kept in them."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if _wider(leaf.dtype) == leaf.dtype:
            continue
        raise UsageError(
            f"optimizer.name = 'schedule_free_adamw': the parameter {parameter_path(path)} is {leaf.dtype}, in which the average "
            "that it keeps no longer moves after some hundred steps; set param_dtype: float32 (dtype may be bfloat16), or use "
            "adamw"
        )


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(_wider(leaf.dtype)), tree)


def _wider(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
