"""Batch normalization whose statistics leave out the rows that only fill up a batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainers.models.layers import as_subclass


class Rows:
    """Which rows of the batch count. Hashed by identity: the graph of a module has it, and no program that was traced for another
    batch is taken for this one."""

    def __init__(self, weight: jax.Array):
        self._counts = weight > 0  # [B]

    def mask(self, x: jax.Array) -> jax.Array | None:
        """Returns bool[B, 1, ...]: which values of `x` [B, ...] count; None if the first dimension of `x` is not that of the
        rows."""
        if x.ndim == 0 or x.shape[0] != len(self._counts):
            return None
        # A batch without any row that counts has no mean: then all of them do, and what comes of it is not kept.
        counts = self._counts | ~jnp.any(self._counts)
        return counts.reshape(-1, *(1,) * (x.ndim - 1))


class OfRows(nnx.Module):
    """A module that knows which rows of a batch count."""

    rows: Rows | None = None


class BatchNorm(OfRows, nnx.BatchNorm):
    """`nnx.BatchNorm`, with a mask made from the rows that count if the caller gives none."""

    def __call__(self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None) -> jax.Array:
        if mask is None and self.rows is not None:
            mask = self.rows.mask(x)
        return super().__call__(x, use_running_average, mask=mask)


def with_masks(model: Any) -> Any:
    """Returns the model in which each `nnx.BatchNorm` knows the rows."""

    def masked(path: Any, node: Any) -> Any:
        # Not those of a user's subclass: what it does in its call is not known.
        return as_subclass(node, BatchNorm) if type(node) is nnx.BatchNorm else node

    return nnx.recursive_map(masked, model)


def tell_rows(model: Any, weight: jax.Array) -> None:
    """Tells the modules of the model the weights of the rows of the batch [B]."""
    rows = Rows(weight)
    for _, module in nnx.iter_graph(model):
        if isinstance(module, OfRows):
            module.rows = rows
