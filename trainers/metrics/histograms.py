"""Histograms of parameters and gradients, with mean, deviation and extremes, computed in the step every N steps.

Between those steps nothing is computed (`lax.cond`). The result is fetched with the publish that follows.
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

from gangway.published import Distribution
from trainers.config import DistributionConfig

STATISTICS = ("mean", "std", "min", "max")
"""The first columns of a row; the counts of the bins follow."""


def parameter_names(params: Any) -> list[str]:
    """Returns the names of the leaves in their order, such as `layers/query`."""
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def parameter_norms(gradients: Any) -> dict[str, jax.Array]:
    """Returns `grad_norm/NAME` of each parameter."""
    named = zip(parameter_names(gradients), jax.tree.leaves(gradients), strict=True)
    # In float32: a long sum in bfloat16 stops growing.
    return {f"grad_norm/{name}": jnp.linalg.norm(leaf.astype(jnp.float32)) for name, leaf in named}


def chosen(params: Any, config: DistributionConfig) -> list[str]:
    """Returns the names of the parameters that have histograms; empty if histograms are off."""
    pattern = config.pattern
    return [] if pattern is None else [name for name in parameter_names(params) if re.search(pattern, name)]


def measure(params: Any, gradients: Any, batch_index: jax.Array, config: DistributionConfig) -> jax.Array | None:
    """Returns float32[2 * parameters chosen, len(STATISTICS) + bins]: a row for each parameter, then one for each gradient;
    zeros at steps at which it is not due. None if histograms are off. Traced."""
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
    # `cond`, not `where`: between the steps at which it is due it must cost nothing.
    return jax.lax.cond(
        due(batch_index, config),
        lambda leaves: jnp.stack([_describe(leaf, config.bins) for leaf in leaves]),
        lambda leaves: jnp.zeros((len(leaves), width), jnp.float32),
        leaves,
    )


def due(batch_index: Any, config: DistributionConfig) -> Any:
    """Whether the step that draws this batch computes the histograms."""
    return (batch_index + 1) % config.every_steps == 0


def read(bins: np.ndarray, names: list[str]) -> dict[str, Distribution]:
    """Returns the histograms by name, `params/NAME` and `gradients/NAME`; those with values that are not finite are left out."""
    labels = [f"{kind}/{name}" for kind in ("params", "gradients") for name in names]
    rows: Mapping[str, list[float]] = dict(zip(labels, bins.tolist(), strict=True))
    head = len(STATISTICS)
    return {
        label: Distribution(row[0], row[1], row[2], row[3], tuple(int(count) for count in row[head:]))
        for label, row in rows.items()
        if all(math.isfinite(value) for value in row[:head])
    }


def _describe(leaf: jax.Array, bins: int) -> jax.Array:
    values = leaf.astype(jnp.float32)
    low, high = jnp.min(values), jnp.max(values)
    # Scattering is by far the fastest on a CPU, and slow on devices where many lanes write to few bins.
    counts = jax.lax.platform_dependent(
        values, low, high, cpu=functools.partial(_scattered, bins=bins), default=functools.partial(_counted_by_edge, bins=bins)
    )
    return jnp.concatenate([jnp.stack([jnp.mean(values), jnp.std(values), low, high]), counts.astype(jnp.float32)])


def _scattered(values: jax.Array, low: jax.Array, high: jax.Array, *, bins: int) -> jax.Array:
    # A parameter of equal values has no width: all of them then fall into the first bin.
    width = jnp.where(high > low, high - low, 1.0)
    indices = jnp.clip((values - low) / width * bins, 0, bins - 1).astype(jnp.int32)
    return jnp.zeros(bins, jnp.int32).at[indices].add(1)


def _counted_by_edge(values: jax.Array, low: jax.Array, high: jax.Array, *, bins: int) -> jax.Array:
    """Counts the values below each edge, one pass for each edge: sharded values stay sharded, and no copy of a parameter's size
    is made for each bin."""
    # The inner edges alone: [bins - 1]. Nothing lies below the first or above the last.
    edges = low + (high - low) * jnp.arange(1, bins) / bins
    # A loop over edges: one comparison of the parameter's size at a time.
    below = jax.lax.map(lambda edge: jnp.sum(values < edge, dtype=jnp.int32), edges)
    return jnp.diff(jnp.concatenate([jnp.zeros(1, jnp.int32), below, jnp.full(1, values.size, jnp.int32)]))
