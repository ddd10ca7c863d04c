"""Everything a training run carries from step to step, as one pytree, and how it comes to be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from trainers.metrics.accumulator import Kind, Layout, MetricSums
from trainers.parallel import mesh as meshes
from trainers.protocol import Task
from trainers.step import rng


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    step: jax.Array
    """int32: updates applied; drives schedules."""
    batch_index: jax.Array
    """int32: batches drawn; addresses data, and is what hosts and checkpoints call the step. Differs from `step` by the batches
    whose update was not applied."""
    params: Any
    opt_state: Any
    totals: dict[str, jax.Array]
    """uint32[2] each (high, low word): `tokens` and `samples` trained on, and `samples_digest`, the sum over all samples of
    a hash of (batch index, row, sample id): the same on any number of hosts, another if a sample came twice or not at all."""
    sums: dict[str, jax.Array]
    """float32[2] each (sum, what rounding has left out of it): the task's metrics whose names begin with `total_`."""
    loss_stats: dict[str, jax.Array]
    """Of the losses of updates applied: `count` (int32), running `mean` and `variance` (float32)."""
    scaler: dict[str, jax.Array] = field(default_factory=dict)
    """Of the loss, for float16 (`trainers.step.loss_scale`); else empty."""


@dataclass(frozen=True)
class ModelParts:
    """A task's model, taken apart: `graph` and `rest` are static, `params` travel through the step as a plain dict."""

    graph: Any
    template: Any

    def merge(self, params: Any) -> Any:
        state = jax.tree.map(lambda leaf: leaf, self.template)  # a copy: replacing writes into it
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self.graph, state)


def abstract_model(task: Task, seed: int) -> tuple[ModelParts, Any, Any]:
    """(parts, parameter shapes, logical axes), without touching a device."""
    model = nnx.eval_shape(lambda: task.build_model(nnx.Rngs(rng.key(seed, "init", 0))))
    graph, template = nnx.split(model, nnx.Param)
    return ModelParts(graph, template), nnx.to_pure_dict(template), logical_axes(template)


def logical_axes(template: Any) -> Any:
    """The logical axis names of each parameter, from its NNX metadata `logical_axes`; one without them is replicated."""

    def names(variable: nnx.Variable) -> tuple[str | None, ...]:
        return tuple(variable.get_metadata().get("logical_axes", (None,) * variable.ndim))

    # A variable is a leaf here: its metadata would be gone one level further down.
    return jax.tree.map(names, nnx.to_pure_dict(template, extract_fn=lambda variable: variable), is_leaf=_is_variable)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def num_parameters(shapes: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def initial_parameters(task: Task, seed: int) -> Any:
    """The parameters at step 0; traced (for their shapes, or to be made where they belong). A function of (task, seed) alone."""
    model = task.build_model(nnx.Rngs(rng.key(seed, "init", 0)))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def state_from_parameters(
    params: Any, optimizer: optax.GradientTransformation, layout: Layout, scaler: dict[str, jax.Array]
) -> TrainState:
    """The state at step 0 with these parameters; `layout`: that of the step's metrics."""
    totals = {name: jnp.zeros(2, jnp.uint32) for name in ("tokens", "samples", "samples_digest")}
    zero = jnp.zeros((), jnp.int32)
    stats = {"count": zero, "mean": jnp.zeros((), jnp.float32), "variance": jnp.zeros((), jnp.float32)}
    return TrainState(
        step=zero,
        batch_index=zero,
        params=params,
        opt_state=optimizer.init(params),
        totals=totals,
        sums={name: jnp.zeros(2, jnp.float32) for name in total_names(layout)},
        loss_stats=stats,
        scaler=scaler,
    )


def state_shardings(mesh: Mesh, abstract: TrainState, axes: Any) -> Any:
    """Where each leaf of the state lies: parameters by the logical axis rules, moments beside them, the rest replicated."""
    params = jax.tree.map(lambda leaf, names: meshes.parameter_sharding(mesh, names, leaf.shape), abstract.params, axes)
    everywhere: Any = meshes.replicated(mesh)
    return TrainState(
        step=everywhere,
        batch_index=everywhere,
        params=params,
        opt_state=meshes.like_parameters(mesh, abstract.opt_state, params, abstract.params),
        totals=jax.tree.map(lambda _: everywhere, abstract.totals),
        sums=jax.tree.map(lambda _: everywhere, abstract.sums),
        loss_stats=jax.tree.map(lambda _: everywhere, abstract.loss_stats),
        scaler=jax.tree.map(lambda _: everywhere, abstract.scaler),
    )


def with_shardings(abstract: TrainState, shardings: TrainState) -> TrainState:
    return jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), abstract, shardings)


def wide(words: Any) -> int:
    """The Python integer of a (high, low) pair of uint32."""
    high, low = (int(word) for word in words)
    return (high << 32) | low


def add_wide(total: jax.Array, amount: jax.Array) -> jax.Array:
    """(high, low) + amount (uint32), with carry: exact where float32, and 32 bits, are not."""
    low = total[1] + amount
    carry = (low < amount).astype(jnp.uint32)
    return jnp.stack([total[0] + carry, low])


def total_names(layout: Layout) -> tuple[str, ...]:
    """The metrics that go on over restarts."""
    kinds = zip(layout.names, layout.kinds, strict=True)
    return tuple(name for name, kind in kinds if kind is Kind.TOTAL)


def add_sums(sums: dict[str, jax.Array], layout: Layout, measured: MetricSums) -> tuple[MetricSums, dict[str, jax.Array]]:
    """(what a step measured, with the totals since the run began in place of what it adds to them; these totals).

    Compensated (Kahan, 1965): a total of a billion steps is as exact as its largest addend."""
    out = {}
    for name, total in sums.items():
        row = layout.names.index(name)
        amount = measured[row, 0] - total[1]
        new = total[0] + amount
        out[name] = jnp.stack([new, (new - total[0]) - amount])
        measured = measured.at[row].set(jnp.stack([new, jnp.ones((), jnp.float32)]))
    return measured, out
