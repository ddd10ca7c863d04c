"""What parameters and their gradients look like: histogram, mean, deviation and extremes, measured in the step every N steps.

Between those steps nothing of it is computed (`lax.cond`); what was measured is fetched with the publish that follows.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainers.config import DistributionConfig
from trainers.recorders.recorder import Distribution

STATISTICS = ("mean", "std", "min", "max")
"""Before the counts of the bins, in a row of what is measured."""


def parameter_names(params: Any) -> list[str]:
    """Of the leaves, in their order, such as `layers/attention/query`."""
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def parameter_norms(gradients: Any) -> dict[str, jax.Array]:
    """`grad_norm/NAME` of each parameter."""
    named = zip(parameter_names(gradients), jax.tree.leaves(gradients), strict=True)
    return {f"grad_norm/{name}": jnp.linalg.norm(leaf.astype(jnp.float32)) for name, leaf in named}


def chosen(params: Any, config: DistributionConfig) -> list[str]:
    """The names of the parameters to measure. Empty if it is off."""
    pattern = config.pattern
    return [] if pattern is None else [name for name in parameter_names(params) if re.search(pattern, name)]


def measure(params: Any, gradients: Any, batch_index: jax.Array, config: DistributionConfig) -> jax.Array | None:
    """float32[2 * parameters chosen, len(STATISTICS) + bins]: a row of each parameter, then of each gradient; zeros between the
    steps at which it is due. None if it is off. Traced."""
    names = set(chosen(params, config))
    if not names:
        return None
    leaves = [
        leaf
        for tree in (params, gradients)
        for name, leaf in zip(parameter_names(tree), jax.tree.leaves(tree), strict=True)
        if name in names
    ]
    width = len(STATISTICS) + config.bins
    return jax.lax.cond(
        due(batch_index, config),
        lambda leaves: jnp.stack([_describe(leaf, config.bins) for leaf in leaves]),
        lambda leaves: jnp.zeros((len(leaves), width), jnp.float32),
        leaves,
    )


def due(batch_index: Any, config: DistributionConfig) -> Any:
    """Whether the step that draws this batch measures."""
    return (batch_index + 1) % config.every_steps == 0


def read(measured: np.ndarray, names: list[str]) -> dict[str, Distribution]:
    """By name, `params/NAME` and `gradients/NAME`; what was not finite is left out."""
    labels = [f"{kind}/{name}" for kind in ("params", "gradients") for name in names]
    rows: Mapping[str, list[float]] = dict(zip(labels, measured.tolist(), strict=True))
    head = len(STATISTICS)
    return {
        label: Distribution(row[0], row[1], row[2], row[3], tuple(int(count) for count in row[head:]))
        for label, row in rows.items()
        if all(math.isfinite(value) for value in row[:head])
    }


def _describe(leaf: jax.Array, bins: int) -> jax.Array:
    values = leaf.astype(jnp.float32)
    low, high = jnp.min(values), jnp.max(values)
    # Scattering is slow where many lanes write to few places, and the fastest way by far on a CPU.
    counts = jax.lax.platform_dependent(
        values, low, high, cpu=functools.partial(_scattered, bins=bins), default=functools.partial(_passed, bins=bins)
    )
    return jnp.concatenate([jnp.stack([jnp.mean(values), jnp.std(values), low, high]), counts.astype(jnp.float32)])


def _scattered(values: jax.Array, low: jax.Array, high: jax.Array, *, bins: int) -> jax.Array:
    width = jnp.where(high > low, high - low, 1.0)
    places = jnp.clip((values - low) / width * bins, 0, bins - 1).astype(jnp.int32)
    return jnp.zeros(bins, jnp.int32).at[places].add(1)


def _passed(values: jax.Array, low: jax.Array, high: jax.Array, *, bins: int) -> jax.Array:
    """How many lie below each edge, one pass an edge: what is sharded stays so, and no copy of the size of a bin is made."""
    edges = low + (high - low) * jnp.arange(1, bins) / bins
    below = jax.lax.map(lambda edge: jnp.sum(values < edge, dtype=jnp.int32), edges)
    return jnp.diff(jnp.concatenate([jnp.zeros(1, jnp.int32), below, jnp.full(1, values.size, jnp.int32)]))
