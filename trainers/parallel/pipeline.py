"""Layers in stages (`mesh.pipeline`): micro-batches follow each other through them, as in GPipe (Huang et al., 2019), or go round
them several times (the interleaved schedule: Narayanan et al., 2021, section 2.2).

With R repeats the layers are R x P groups, and stage s has the groups s, s + P, ... In turn t it has micro-batch (t - s) mod M,
with its group number (t - s) div M. So M micro-batches take M R + P - 1 turns, and all stages compute in each turn: in the first
and last ones some of them compute what nobody uses. GPipe's schedule is that of one repeat.

What the stages hold is one array, divided over the axis `pipeline` along its first dimension; after each turn it is shifted by
one stage, which the compiler makes an exchange between neighbours. What the last stage sends to the first one waits there until
the others have gone by, and is the result after the last repeat. Every other axis of the mesh works within a stage as it does
without stages.

Parameters lie as they are saved: each stage has layers that follow each other. With several repeats the weights are exchanged
between the stages before the turns, and their gradients after them.

Shape suffixes: B rows, M micro-batches, P stages, R repeats, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainers.config.mesh import CONTEXT, PIPELINE, microbatches, num_replicas, num_turns, stage_axes
from trainers.parallel.mesh import asked_pipeline, traced_for, within_stage

Stage = Callable[[jax.Array, Any, Any], tuple[jax.Array, Any]]
Wrap = Callable[..., Callable[..., Any]]


def mesh_of(rows: int, layers: int) -> Mesh | None:
    """Returns the mesh of the program that is traced, if it has stages that can share so many layers, and so many rows; else
    None: then each device computes all layers."""
    mesh = traced_for()
    if mesh is None or PIPELINE not in mesh.shape:
        return None
    groups = mesh.shape[PIPELINE] * asked_pipeline().num_repeats
    return None if layers % groups or rows % num_replicas(mesh.shape) else mesh


def through_stages(mesh: Mesh, stage: Stage, x: jax.Array, of_rows: Any, weights: Any, in_turns: Wrap) -> tuple[jax.Array, Any]:
    """Returns what all layers make of `x` [B, ...], and the sums of each layer [L, ...] over all rows. Traced.

    `stage(x, of_rows, weights)` returns what some layers make of some rows, and the sums of these layers over these rows, in any
    pytree. `weights` are arrays [L, ...] in any pytree; `of_rows` are what it must know of each row, [B, ...], or of all rows
    alike, [1, ...]. `in_turns(function, held=shapes)` wraps what takes its weights in each turn out of arrays of these shapes."""
    stages, replicas, rows = mesh.shape[PIPELINE], num_replicas(mesh.shape) // mesh.shape[PIPELINE], x.shape[0]
    asked = asked_pipeline()
    count, repeats = microbatches(stages, rows // replicas, asked.microbatches), asked.num_repeats
    # Rows and tokens are divided as without stages.
    divided: tuple[str | tuple[str, ...], ...] = (stage_axes(mesh.shape), *([CONTEXT] if CONTEXT in mesh.shape else []))

    def split(each: jax.Array) -> jax.Array:
        """[B, ...] to [M, B / M, ...]: each micro-batch has rows of every replica, which stay where they are."""
        parts = each.reshape(replicas, count, -1, *each.shape[1:]).swapaxes(0, 1)
        return _divided(mesh, parts.reshape(count, -1, *each.shape[1:]), None, stage_axes(mesh.shape))

    def joined(each: jax.Array) -> jax.Array:
        parts = each.reshape(count, replicas, -1, *each.shape[2:]).swapaxes(0, 1)
        return parts.reshape(rows, *each.shape[2:])

    def of_stage(x: jax.Array, of_rows: Any, weights: Any) -> tuple[jax.Array, Any]:
        with within_stage():
            return stage(x, of_rows, weights)

    def every(x_P: jax.Array, of_rows_P: Any, weights_P: Any, repeat_P: jax.Array) -> tuple[jax.Array, Any]:
        mine_P = jax.tree.map(partial(_group, repeat_P), weights_P)
        return jax.vmap(of_stage, spmd_axis_name=PIPELINE)(x_P, of_rows_P, mine_P)

    x_M, weights_P = split(x), jax.tree.map(partial(of_stages, mesh, repeats), weights)
    of_rows_M = jax.tree.map(
        lambda each: split(each) if len(each) == rows else jnp.broadcast_to(each, (count, *each.shape)), of_rows
    )
    if repeats > 1:
        every = in_turns(every, held={each.shape for each in jax.tree.leaves(weights_P)})
    first = jnp.zeros(stages, jnp.int32)

    def turn(carry: tuple[jax.Array, jax.Array, Any], number: jax.Array) -> tuple[tuple[jax.Array, jax.Array, Any], None]:
        waiting_PM, sent_P, sums_P = carry
        begun_P = number - jnp.arange(stages)
        repeat_P, mine_P = jnp.divmod(jnp.clip(begun_P, 0, repeats * count - 1), count)
        # The first stage begins with what waits there; every other one goes on with what it was sent.
        is_first = (jnp.arange(stages) == 0).reshape(-1, *[1] * x.ndim)
        held_P = jnp.where(is_first, waiting_PM[:, number % count], sent_P)
        held_P = _divided(mesh, held_P, PIPELINE, *divided)
        made_P, found_P = every(held_P, _taken(of_rows_M, mine_P), weights_P, repeat_P)
        counts_P = (begun_P >= 0) & (begun_P < repeats * count)
        is_group = (repeat_P[:, None] == jnp.arange(repeats)) & counts_P[:, None]
        sums_P = jax.tree.map(partial(_added, is_group), sums_P, found_P)
        sent_P = jnp.roll(_divided(mesh, made_P, PIPELINE, *divided), 1, 0)
        last = (number - stages + 1) % count
        kept_P = jnp.where(number < stages - 1, waiting_PM[:, last], sent_P)
        waiting_PM = _divided(mesh, waiting_PM.at[:, last].set(kept_P), PIPELINE, None, *divided)
        return (waiting_PM, sent_P, sums_P), None

    waiting = _divided(mesh, jnp.broadcast_to(x_M, (stages, *x_M.shape)), PIPELINE, None, *divided)
    shapes = jax.eval_shape(every, x_M[first], _taken(of_rows_M, first), weights_P, first)
    sent = jnp.zeros(shapes[0].shape, shapes[0].dtype)
    sums = jax.tree.map(lambda each: jnp.zeros((stages, repeats, *each.shape[1:]), each.dtype), shapes[1])
    (waiting_PM, _, sums_P), _ = jax.lax.scan(turn, (waiting, sent, sums), jnp.arange(num_turns(stages, count, repeats)))
    return joined(waiting_PM[0]), jax.tree.map(_of_layers, sums_P)


def of_stages(mesh: Mesh, repeats: int, each: jax.Array) -> jax.Array:
    """Returns the groups of each stage [P, R, L / P / R, ...], of an array [L, ...]. Traced.

    They lie on the stages in the order of the layers: group g on stage g // R, and it belongs on stage g mod P. Of a sharding
    alone the compiler makes a gather of all layers for some R. So they are sent by hand, in R exchanges: in each of them every
    stage sends one group, and gets one."""
    stages = mesh.shape[PIPELINE]
    if repeats == 1:
        return _divided(mesh, each.reshape(stages, 1, -1, *each.shape[1:]), PIPELINE)
    groups = np.arange(stages * repeats)
    # The groups of a stage have different numbers, before and after. Those it gets are P apart: after lcm(P, R) groups the
    # remainders repeat, so the next ones are shifted.
    in_exchange = (groups + groups // math.lcm(stages, repeats)) % repeats

    def of_stage(mine: jax.Array, number: jax.Array) -> jax.Array:
        mine_R, stage = mine.reshape(repeats, -1, *mine.shape[1:]), number[0]

        def got(exchange: int) -> jax.Array:
            sent_P = groups[in_exchange == exchange]
            route = [(int(group) // repeats, int(group) % stages) for group in sent_P]
            return jax.lax.ppermute(mine_R[jnp.asarray(sent_P % repeats)[stage]], PIPELINE, route)

        order_PR = jnp.asarray(in_exchange.reshape(repeats, stages).T)
        return jnp.stack([got(exchange) for exchange in range(repeats)])[order_PR[stage]][None]

    lie = PartitionSpec(PIPELINE)
    # The number of each stage is an operand: with `axis_index` the compiler refuses weights that are frozen ("PartitionId
    # instruction is not supported").
    return jax.shard_map(of_stage, mesh=mesh, in_specs=(lie, lie), out_specs=lie, axis_names={PIPELINE})(each, jnp.arange(stages))


def _of_layers(each_PR: jax.Array) -> jax.Array:
    """[P, R, L / P / R, ...] to [L, ...]."""
    return each_PR.swapaxes(0, 1).reshape(-1, *each_PR.shape[3:])


def _taken(parts: Any, index_P: jax.Array) -> Any:
    """Returns, for each stage, the micro-batch of this number, of arrays [M, ...] in any pytree."""
    return jax.tree.map(lambda each: each[index_P], parts)


def _group(repeat_P: jax.Array, each: jax.Array) -> jax.Array:
    """Returns, for each stage, the weights of one of its groups, of an array [P, R, ...]."""
    if each.shape[1] == 1:
        return each[:, 0]
    return jax.vmap(lambda weights, repeat: weights[repeat])(each, repeat_P)


def _added(is_group_PR: jax.Array, sum_PR: jax.Array, found_P: jax.Array) -> jax.Array:
    return sum_PR + jnp.where(is_group_PR.reshape(*is_group_PR.shape, *[1] * (sum_PR.ndim - 2)), found_P[:, None], 0)


def _divided(mesh: Mesh, x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Returns `x` with its first dimensions divided over these axes of the mesh, and the others as the compiler likes."""
    spec = PartitionSpec(*axes, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - len(axes)))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
