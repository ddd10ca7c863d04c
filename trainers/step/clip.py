"""Clipping of gradients by their global norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def clip(gradients: Any, norm: jax.Array, max_norm: float | None) -> Any:
    """Returns the gradients, scaled down to a global norm of `max_norm` if theirs is greater."""
    if max_norm is None:
        return gradients
    # 1e-6 only avoids a division by 0. A norm that is not finite needs no care here: that update is not applied.
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-6))
    # In the gradient's own type: a float32 scale would promote bfloat16 gradients to float32.
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
