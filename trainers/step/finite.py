"""Which values of a state must stay finite, and whether its parameters are. Pure and traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

PARTS = ("params", "opt_state", "model_state", "pruner_state")
"""The fields of a TrainState that must stay finite. In others a NaN may be true: in the sums of a user's metric, say."""


def any_not_finite(params: Any) -> jax.Array:
    """Returns int32: 1 if a parameter is infinite or NaN, else 0.

    Of the parameters alone, for this is computed in every step. The moments, which are twice as much to read, are looked at
    before each save (`trainers.checkpoint.fingerprints.measured`).
    """
    floating = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    # 0 times what is not finite is NaN. On a CPU a count takes half as long again.
    zeros = (jnp.sum(leaf * 0).astype(jnp.float32) for leaf in floating)
    return (~jnp.isfinite(sum(zeros, jnp.zeros((), jnp.float32)))).astype(jnp.int32)


def must_be_finite(leaf_name: str) -> bool:
    """Whether the leaf of a TrainState with this name (`jax.tree_util.keystr`) is in PARTS."""
    return leaf_name.startswith(tuple(f".{part}" for part in PARTS))
