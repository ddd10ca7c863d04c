"""Counts what of a state is not finite. Pure and traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

PARTS = ("params", "opt_state", "model_state", "pruner_state")
"""The fields of a TrainState that must stay finite. In others a NaN may be true: in the sums of a user's metric, say."""


def num_not_finite(state: Any) -> jax.Array:
    """Returns int32: how many values in PARTS of the state are infinite or NaN."""
    leaves = jax.tree.leaves([getattr(state, part) for part in PARTS])
    floating = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return sum((jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32) for leaf in floating), jnp.zeros((), jnp.int32))


def must_be_finite(leaf_name: str) -> bool:
    """Whether the leaf of a TrainState with this name (`jax.tree_util.keystr`) is in PARTS."""
    return leaf_name.startswith(tuple(f".{part}" for part in PARTS))
