"""Layers in stages (`mesh.pipeline`): micro-batches follow each other through them, as in GPipe (Huang et al., 2019).

Stage s has micro-batch t - s in turn t. So M micro-batches take M + P - 1 turns on P stages, and all stages compute in each turn:
in the first and last ones some of them compute what nobody uses. What the stages hold is one array, divided over the axis
`pipeline` along its first dimension; after each turn it is shifted by one stage, which the compiler makes an exchange between
neighbours. Every other axis of the mesh works within a stage as it does without stages.

Shape suffixes: B rows, M micro-batches, P stages, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainers.config.model import CONTEXT, PIPELINE, num_replicas, stage_axes
from trainers.config.pipeline import microbatches
from trainers.parallel.mesh import asked_microbatches, traced_for, within_stage

Stage = Callable[[jax.Array, Any, Any], tuple[jax.Array, Any]]


def mesh_of(rows: int, layers: int) -> Mesh | None:
    """Returns the mesh of the program that is traced, if it has stages that can share so many layers, and so many rows; else
    None: then each device computes all layers."""
    mesh = traced_for()
    if mesh is None or PIPELINE not in mesh.shape:
        return None
    return None if layers % mesh.shape[PIPELINE] or rows % num_replicas(mesh.shape) else mesh


def through_stages(mesh: Mesh, stage: Stage, x: jax.Array, of_rows: Any, weights: Any) -> tuple[jax.Array, Any]:
    """Returns what all layers make of `x` [B, ...], and the sums of each layer [L, ...] over all rows. Traced.

    `stage(x, of_rows, weights)` returns what some layers make of some rows, and the sums of these layers over these rows, in any
    pytree. `weights` are arrays [L, ...] in any pytree; `of_rows` are what it must know of each row, [B, ...], or of all rows
    alike, [1, ...]."""
    stages, replicas, rows = mesh.shape[PIPELINE], num_replicas(mesh.shape) // mesh.shape[PIPELINE], x.shape[0]
    count = microbatches(stages, rows // replicas, asked_microbatches())

    def split(each: jax.Array) -> jax.Array:
        """[B, ...] to [M, B / M, ...]: each micro-batch has rows of every replica, which stay where they are."""
        parts = each.reshape(replicas, count, -1, *each.shape[1:]).swapaxes(0, 1)
        return _divided(mesh, parts.reshape(count, -1, *each.shape[1:]), None, stage_axes(mesh.shape))

    def joined(each: jax.Array) -> jax.Array:
        parts = each.reshape(count, replicas, -1, *each.shape[2:]).swapaxes(0, 1)
        return parts.reshape(rows, *each.shape[2:])

    def of_stages(each: jax.Array) -> jax.Array:
        """[L, ...] to [P, L / P, ...]."""
        return _divided(mesh, each.reshape(stages, -1, *each.shape[1:]), PIPELINE)

    def of_each(x_P: jax.Array) -> jax.Array:
        """What the stages hold, [P, B / M, T, ...]: rows and tokens divided as without stages."""
        return _divided(mesh, x_P, PIPELINE, stage_axes(mesh.shape), *([CONTEXT] if CONTEXT in mesh.shape else []))

    def of_stage(x: jax.Array, of_rows: Any, weights: Any) -> tuple[jax.Array, Any]:
        with within_stage():
            return stage(x, of_rows, weights)

    x_M, weights_P = split(x), jax.tree.map(of_stages, weights)
    of_rows_M = jax.tree.map(
        lambda each: split(each) if len(each) == rows else jnp.broadcast_to(each, (count, *each.shape)), of_rows
    )
    every, first = jax.vmap(of_stage, spmd_axis_name=PIPELINE), jnp.zeros(stages, jnp.int32)

    def turn(carry: tuple[jax.Array, Any], number: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
        held_P, sums_P = carry
        mine_P = number - jnp.arange(stages)
        # The first stage begins with the next micro-batch; every other one goes on with what it was sent.
        is_first = (jnp.arange(stages) == 0).reshape(-1, *[1] * x.ndim)
        held_P = jnp.where(is_first, x_M[jnp.minimum(number, count - 1)], held_P)
        held_P = of_each(held_P)
        made_P, found_P = every(held_P, _taken(of_rows_M, jnp.clip(mine_P, 0, count - 1)), weights_P)
        counts = (mine_P >= 0) & (mine_P < count)
        sums_P = jax.tree.map(partial(_added, counts), sums_P, found_P)
        made_P = of_each(made_P)
        return (jnp.roll(made_P, 1, 0), sums_P), made_P

    shapes = jax.eval_shape(every, x_M[first], _taken(of_rows_M, first), weights_P)
    held, sums = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), shapes)
    (_, sums_P), made = jax.lax.scan(turn, (held, sums), jnp.arange(count + stages - 1))
    sums = jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), sums_P)
    return joined(made[stages - 1 :, -1]), sums


def _taken(parts: Any, index_P: jax.Array) -> Any:
    """Returns, for each stage, the micro-batch of this number, of arrays [M, ...] in any pytree."""
    return jax.tree.map(lambda each: each[index_P], parts)


def _added(counts_P: jax.Array, sum_P: jax.Array, found_P: jax.Array) -> jax.Array:
    return sum_P + jnp.where(counts_P.reshape(-1, *[1] * (sum_P.ndim - 1)), found_P, 0)


def _divided(mesh: Mesh, x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Returns `x` with its first dimensions divided over these axes of the mesh, and the others as the compiler likes."""
    spec = PartitionSpec(*axes, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - len(axes)))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
