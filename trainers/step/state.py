"""The state that a run carries from step to step, as one pytree, and how it is created."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from gangway.errors import UsageError
from trainers.config import LoraConfig, MeshConfig, OptimizerConfig, ParameterGroup
from trainers.config.mesh import Shared
from trainers.metrics.accumulator import Kind, Layout, MetricSums
from trainers.models import batch_norm, lora
from trainers.models.created import CREATED, STACKED, UPDATE_AS, dimensions_as_created, noting_shapes, role_in_flax
from trainers.models.decoder import divides_sequences, multiplies_in_fp8
from trainers.models.lora import Frozen
from trainers.optim.param_groups import freezing, parameter_path, parameter_paths
from trainers.optim.parameter_kinds import Kinds, ParameterKind, Role, kind_from_dimensions
from trainers.optim.precision import in_float32, rounded_at_random, with_master_weights
from trainers.parallel import mesh as meshes
from trainers.protocol import Task
from trainers.step import rest_of_model, rng
from trainers.step.divided import shared_of
from trainers.step.rest_of_model import STREAMS


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class TrainState:
    step: jax.Array
    """int32: the number of updates applied; it drives schedules."""
    batch_index: jax.Array
    """int32: the number of batches drawn. It addresses data, and is what hosts and checkpoints call the step. It differs from
    `step` by the batches whose update was not applied."""
    params: Any
    opt_state: Any
    totals: dict[str, jax.Array]
    """uint32[2] each (high, low word): `tokens` and `samples` trained on, and `samples_digest`: the sum over all samples of a
    hash of (batch index, row, sample id). The digest is the same on any number of hosts, and differs if a sample came twice or
    not at all."""
    sums: dict[str, jax.Array]
    """float32[2] each (sum, what rounding has lost of it): the task's metrics whose names begin with `total_`, and the sums and
    the weights of the running means (`mean_names`)."""
    loss_stats: dict[str, jax.Array]
    """Statistics of the losses of applied updates: `count` (int32), running `mean` and `variance` (float32)."""
    scaler: dict[str, jax.Array] = field(default_factory=dict)
    """The loss scaler for float16 (`trainers.step.loss_scale`); empty for other types."""
    model_state: dict[str, Any] = field(default_factory=dict)
    """The model's other state, such as batch statistics, in nested dicts; empty if it has nothing."""
    pruner_state: Any = field(default_factory=dict)
    """The state of the pruner (`trainers.protocol.Pruner`); empty without one."""

    def __repr__(self) -> str:
        """Without the arrays, which would fill a screen."""
        counters = f"step={_counter(self.step)}, batch_index={_counter(self.batch_index)}"
        return f"TrainState({counters}, {num_parameters(self.params):,} parameters)"


def _counter(value: Any) -> str:
    """Returns the number, where this process has it: not of a shape, a tracer, or an array that a step has used up."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return str(value)
    return "deleted" if value.is_deleted() else str(value.addressable_data(0))


@dataclass(frozen=True)
class ModelParts:
    """A task's model, taken apart: the graph and the templates are static, parameters and state travel through the step as plain
    dicts."""

    graph: Any
    template: Any
    """The shapes of the parameters."""
    state_template: Any = field(default_factory=dict)
    """The shapes of the other state."""
    stream_template: Any = field(default_factory=dict)
    """The shapes of the random streams."""
    frozen_template: Any = field(default_factory=dict)
    """The shapes of the weights that are an input of the step (`trainers.models.lora.Frozen`)."""
    seed: int = 0
    axis_rules: Mapping[str, str | None] = field(default_factory=dict)
    """The model's own `logical_axis_rules`."""
    kinds: Kinds = field(default_factory=dict)
    """What the parameters are to an optimizer."""
    divides_sequences: bool = False
    """Whether several devices can share each sequence (`mesh.context`)."""
    shared: tuple[Shared, ...] = ()
    """What the devices along an axis of the mesh share in equal parts."""
    in_fp8: bool = False
    """Whether it has layers that multiply as `model.fp8` says."""

    @property
    def state_shapes(self) -> Any:
        return nnx.to_pure_dict(self.state_template)

    @property
    def state_axes(self) -> Any:
        return logical_axes(self.state_template, self.axis_rules)

    def merge(self, params: Any, model_state: Any = None, streams: Any = None, frozen: Any = None) -> Any:
        """Returns the model with these parameters, this other state (`TrainState.model_state`), these random streams (default:
        always the same ones) and these frozen weights."""
        if model_state is None and (names := parameter_paths(self.state_shapes)):
            raise UsageError(
                f"the model has state beside its parameters ({', '.join(names[:5])}): give it too, as in "
                "merge(state.params, state.model_state)"
            )
        if self.frozen_template and frozen is None:
            raise UsageError(
                'the model has frozen weights (lora): give them too, as in merge(params, frozen=trainer.frozen["base"])'
            )
        parts = [_with_values(self.template, params)]
        if self.frozen_template:
            # The base has its own values of what is trained whole, too (`lora.whole`).
            parts.append(_with_values(self.frozen_template, _those_in(nnx.to_pure_dict(self.frozen_template), frozen)))
        if self.state_template:
            parts.append(_with_values(self.state_template, model_state))
        if self.stream_template:
            # A copy: the variables belong to the trace that they are made in, and drawing from a stream changes them.
            parts.append(_copy(self.streams("merge", 0, 0) if streams is None else streams))
        return nnx.merge(self.graph, *parts)

    def streams(self, purpose: str, step: int | jax.Array, micro_batch: int | jax.Array) -> Any:
        """Returns the random streams of a micro-batch (`trainers.step.rest_of_model.streams`); None if there are none."""
        if not self.stream_template:
            return None
        return rest_of_model.streams(self.stream_template, self.seed, purpose, step, micro_batch)


def _those_in(template: Any, values: Any) -> Any:
    """Returns the leaves of nested dicts that `template` has too."""
    if not isinstance(template, Mapping):
        return values
    return {name: _those_in(within, values[name]) for name, within in template.items()}


def _with_values(template: Any, values: Any) -> Any:
    state = _copy(template)  # replacing writes into it
    nnx.replace_by_pure_dict(state, values)
    return state


def _copy(state: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf, state)


def abstract_model(task: Task, seed: int, adapters: LoraConfig | None = None) -> tuple[ModelParts, Any, Any]:
    """Returns (parts, parameter shapes, logical axes of the parameters), without touching a device. Raises UsageError if the
    model cannot have such adapters."""
    # Shapes alone: a standby does this too, and touches no device.
    with noting_shapes():
        model = batch_norm.with_masks(nnx.eval_shape(lambda: _first_model(task, seed, adapters)))
    rest_of_model.check_attributes(model)
    graph, (template, frozen, streams, state) = nnx.graphdef(model), nnx.state(model, nnx.Param, Frozen, STREAMS, ...)
    rules = own_axis_rules(model)
    shares, shared = divides_sequences(model), tuple(shared_of(model))
    in_fp8 = multiplies_in_fp8(model)
    parts = ModelParts(graph, template, state, streams, frozen, seed, rules, kinds_of(model), shares, shared, in_fp8)
    return parts, nnx.to_pure_dict(template), logical_axes(template, rules)


def abstract_frozen(build: Callable[[nnx.Rngs], Any]) -> tuple[ModelParts, Any, Any]:
    """Returns (parts, shapes, logical axes) of a model of which nothing is trained: all that it has, except random streams, is
    one tree, as if it were parameters. Touches no device."""
    with noting_shapes():
        model = nnx.eval_shape(lambda: build(nnx.Rngs(rng.key(0, "init", 0))))
    rest_of_model.check_attributes(model)
    graph, (streams, template) = nnx.graphdef(model), nnx.state(model, STREAMS, ...)
    axes = logical_axes(template, own_axis_rules(model))
    shares, shared = divides_sequences(model), tuple(shared_of(model))
    parts = ModelParts(graph, template, nnx.State({}), streams, divides_sequences=shares, shared=shared)
    return parts, nnx.to_pure_dict(template), axes


def _first_model(task: Task, seed: int, adapters: LoraConfig | None = None) -> Any:
    model = task.build_model(nnx.Rngs(rng.key(seed, "init", 0)))
    return model if adapters is None else lora.adapt(model, adapters, lambda name: rng.key(seed, name, 0))


def own_axis_rules(model: Any) -> Mapping[str, str | None]:
    """Returns a model's `logical_axis_rules`: axes of the mesh, or None, for some names of `logical_axes`. They come before
    those of `trainers.parallel.mesh`. Raises UsageError for an axis that no mesh has."""
    rules = getattr(model, "logical_axis_rules", {})
    known = [item.name for item in dataclasses.fields(MeshConfig)]
    if wrong := {name: axis for name, axis in rules.items() if axis is not None and axis not in known}:
        raise UsageError(
            f"{type(model).__name__}.logical_axis_rules {wrong}: expected axes of the mesh ({', '.join(known)}), or None"
        )
    return rules


def logical_axes(template: Any, rules: Mapping[str, str | None] = MappingProxyType({})) -> Any:
    """Returns the logical axis names of each variable, from its NNX metadata `logical_axes`, or what `rules` say for a name; a
    variable without them is replicated. Raises UsageError for names that are not as many as the dimensions."""

    def names(path: Any, variable: Any) -> tuple[str | None, ...]:
        # A module may also hold plain arrays.
        metadata = variable.get_metadata() if isinstance(variable, nnx.Variable) else {}
        axes = metadata.get("logical_axes", (None,) * variable.ndim)
        if CREATED in metadata and len(axes) == len(dimensions := dimensions_as_created(variable)):
            # They may have been named inside `nnx.vmap`, which has stacked the variable then.
            of_dimensions = dict(zip(dimensions, axes, strict=True))
            axes = tuple(of_dimensions.get(dimension, "layers") for dimension in range(-variable.ndim, 0))
        if len(axes) != variable.ndim:
            raise UsageError(
                f"logical_axes of the variable {parameter_path(path)} = {axes}: expected one name, or None, for each dimension "
                f"of {list(variable.shape)}"
            )
        return tuple(rules.get(name, name) for name in axes)

    # A variable is a leaf here: the arrays inside it no longer have its metadata.
    tree = nnx.to_pure_dict(template, extract_fn=lambda variable: variable)
    return jax.tree_util.tree_map_with_path(names, tree, is_leaf=lambda node: isinstance(node, nnx.Variable))


def num_parameters(shapes: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def initial_parameters(task: Task, seed: int) -> Any:
    """The parameters at step 0; traced (for their shapes, or to be made where they belong). A function of (task, seed) alone."""
    return initial_model(task, seed)[0]


def initial_model(task: Task, seed: int, adapters: LoraConfig | None = None) -> tuple[Any, Any]:
    """Returns the parameters and the other state at step 0. Traced."""
    params, _, _, state = nnx.state(_first_model(task, seed, adapters), nnx.Param, Frozen, STREAMS, ...)
    return nnx.to_pure_dict(params), nnx.to_pure_dict(state)


def arrays_of_model(params: Any, model_state: Any) -> Any:
    """Returns parameters and other state as one tree. No two have the same name: each is an attribute of a module."""
    if not isinstance(params, Mapping):
        return params
    both = {name: arrays_of_model(params[name], model_state[name]) for name in params.keys() & model_state.keys()}
    return {**params, **model_state, **both}


def with_loaded(params: Any, loaded: Mapping[str, jax.Array]) -> Any:
    """Returns the parameters, or the other state, with those of `loaded` in their places, by name and cast to their types.
    Traced."""

    def choose(path: Any, leaf: jax.Array) -> jax.Array:
        name = parameter_path(path)
        if name not in loaded:
            return leaf
        # Of a base without the tokens that are new; all else was compared before.
        return lora.with_new_tokens(loaded[name], leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(choose, params)


def update_rule(
    optimizer: optax.GradientTransformation, config: OptimizerConfig, seed: int, groups: Sequence[ParameterGroup]
) -> optax.GradientTransformation:
    """Returns the optimizer for the parameters that are not frozen. In float32 also where it is the user's own."""
    if config.master_weights == "stochastic":
        wide = rounded_at_random(optimizer, functools.partial(rng.key, seed))
    else:
        wide = with_master_weights(optimizer) if config.master_weights == "float32" else in_float32(optimizer)
    return freezing(wide, groups)


def state_from_parameters(
    params: Any,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    scaler: dict[str, jax.Array],
    model_state: Any,
    pruner_state: Any,
) -> TrainState:
    """Returns the state at step 0 with these parameters and this other state of the model. `layout` is that of the step's
    metrics."""
    totals = {name: jnp.zeros(2, jnp.uint32) for name in ("tokens", "samples", "samples_digest")}
    zero = jnp.zeros((), jnp.int32)
    stats = {"count": zero, "mean": jnp.zeros((), jnp.float32), "variance": jnp.zeros((), jnp.float32)}
    return TrainState(
        step=zero,
        batch_index=zero,
        params=params,
        opt_state=optimizer.init(params),
        totals=totals,
        sums={name: jnp.zeros(2, jnp.float32) for name in (*total_names(layout), *itertools.chain(*mean_names(layout).values()))},
        loss_stats=stats,
        scaler=scaler,
        model_state=model_state,
        pruner_state=pruner_state,
    )


def state_shardings(mesh: Mesh, abstract: TrainState, axes: Any, state_axes: Any) -> Any:
    """Returns the sharding of each leaf of the state: parameters and the model's other state by the logical axis rules, moments
    like their parameters, the rest replicated."""

    def by_axes(tree: Any, axes: Any) -> Any:
        return jax.tree.map(lambda leaf, names: meshes.parameter_sharding(mesh, names, leaf.shape), tree, axes)

    params = by_axes(abstract.params, axes)
    replicated: Any = meshes.replicated(mesh)  # typed as what it stands for: a leaf
    return TrainState(
        step=replicated,
        batch_index=replicated,
        params=params,
        opt_state=meshes.like_parameters(mesh, abstract.opt_state, params, abstract.params),
        totals=jax.tree.map(lambda _: replicated, abstract.totals),
        sums=jax.tree.map(lambda _: replicated, abstract.sums),
        loss_stats=jax.tree.map(lambda _: replicated, abstract.loss_stats),
        scaler=jax.tree.map(lambda _: replicated, abstract.scaler),
        model_state=by_axes(abstract.model_state, state_axes),
        pruner_state=meshes.like_parameters(mesh, abstract.pruner_state, params, abstract.params),
    )


def with_shardings(abstract: TrainState, shardings: TrainState) -> TrainState:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
    )


def wide(words: Any) -> int:
    """Returns the Python integer of a (high, low) pair of uint32."""
    high, low = (int(word) for word in words)
    return (high << 32) | low


def add_wide(total: jax.Array, amount: jax.Array) -> jax.Array:
    """Returns (high, low) + amount (uint32), with carry: exact where float32, or 32 bits, would not be."""
    # JAX has no 64-bit integers without x64: hence two words.
    low = total[1] + amount
    # Unsigned addition wraps: a sum that is less than what was added has carried.
    carry = (low < amount).astype(jnp.uint32)
    return jnp.stack([total[0] + carry, low])


def total_names(layout: Layout) -> tuple[str, ...]:
    """Returns the names of the metrics that continue over restarts."""
    kinds = zip(layout.names, layout.kinds, strict=True)
    return tuple(name for name, kind in kinds if kind is Kind.TOTAL)


def mean_names(layout: Layout) -> dict[str, tuple[str, str]]:
    """Returns the names in the state of the (sum, weight) of each running mean, by the name of its metric."""
    return {name: (f"mean_{name}", f"mean_{name}/weight") for name in layout.means}


def add_sums(sums: dict[str, jax.Array], layout: Layout, step_metrics: MetricSums) -> tuple[MetricSums, dict[str, jax.Array]]:
    """Adds a step to the sums since the run began. Returns the step's metrics with the new totals and running means in their
    rows, and the new sums."""
    new_sums = {}
    for name in total_names(layout):
        row = layout.names.index(name)
        new_sums[name] = _add_compensated(sums[name], step_metrics[row, 0])
        # Weight 1: the total has a value also at a step that added nothing to it.
        step_metrics = step_metrics.at[row].set(jnp.stack([new_sums[name][0], jnp.ones((), jnp.float32)]))
    for name, (sum_name, weight_name) in mean_names(layout).items():
        value, weight = step_metrics[layout.names.index(name)]
        # A value of weight 0 may be NaN, which would stay in the sum.
        new_sums[sum_name] = _add_compensated(sums[sum_name], jnp.where(weight > 0, value, 0.0))
        new_sums[weight_name] = _add_compensated(sums[weight_name], weight)
        total_weight = new_sums[weight_name][0]
        mean = jnp.where(total_weight > 0, new_sums[sum_name][0] / total_weight, 0.0)
        pair = jnp.stack([mean, (total_weight > 0).astype(jnp.float32)])
        step_metrics = step_metrics.at[layout.names.index(f"mean_{name}")].set(pair)
    return step_metrics, new_sums


def _add_compensated(total: jax.Array, amount: jax.Array) -> jax.Array:
    """Returns the float32[2] of a sum (Kahan, 1965): its rounding error does not grow with the number of steps."""
    amount = amount - total[1]
    new = total[0] + amount
    # Algebraically 0. In float32 it is what rounding has added too much; the next step takes it off again.
    return jnp.stack([new, (new - total[0]) - amount])


STACKED_AXES = ("layers", "experts")
"""The logical axes over which parameters are stacked."""
TABLE_AXIS = "vocab"


def kinds_of(model: Any) -> dict[str, ParameterKind]:
    """Returns what the parameters of a model are to an optimizer (`trainers.optim.parameter_kinds`), by name. Raises UsageError
    for metadata that say nothing. The first of these that a variable has counts:

    1. `stacked`, the number of its first dimensions over which parameters are stacked:  nnx.Param(jnp.ones((12, 64)), stacked=1)
    2. the axes `layers` and `experts` of its `logical_axes`, or of Flax's `out_sharding`
    3. that it was made under `nnx.vmap` or `nnx.scan`, or by a Linen module under `nn.vmap` or `nn.scan`

    A parameter of two dimensions or more is a matrix, one with the axis `vocab` a table. `update_as` says something else:
    nnx.Param(jnp.ones((8, 64)), update_as="vector")."""
    of_flax = {
        (*path, name): role
        for path, module in nnx.iter_graph(model)
        if isinstance(module, nnx.Module)
        for name in vars(module)
        if (role := role_in_flax(module, name))
    }
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): _kind(path, variable, of_flax.get(path)) for path, variable in params}


def _kind(path: tuple[Any, ...], variable: Any, role_in_module: str | None) -> ParameterKind:
    name, metadata = ".".join(map(str, path)), variable.get_metadata()
    dimensions = _dimensions(name, variable, metadata)
    kind = kind_from_dimensions(dimensions)
    role = metadata.get(UPDATE_AS) or role_in_module
    if role is None and kind.role == "matrix" and TABLE_AXIS in axes_of(metadata):
        role = "table"
    if role is None:
        return kind
    if role not in (roles := typing.get_args(Role)):
        raise UsageError(f"{UPDATE_AS} of the variable {name} = {role!r}: expected one of {', '.join(roles)}")
    if role != "vector" and len(dimensions) < 2:
        raise UsageError(
            f"{UPDATE_AS} of the variable {name} = {role!r}: it has {len(dimensions)} dimensions; expected 2 or more"
        )
    return ParameterKind(dimensions, cast(Role, role))


def _dimensions(name: str, variable: Any, metadata: Any) -> tuple[int, ...]:
    """Returns the dimensions of one parameter, counted from the end."""
    dimensions = range(-variable.ndim, 0)
    if (stacked := metadata.get(STACKED)) is not None:
        if not isinstance(stacked, int) or not 0 <= stacked <= variable.ndim:
            raise UsageError(
                f"{STACKED} of the variable {name} = {stacked!r}: expected how many of its {variable.ndim} dimensions "
                f"{list(variable.shape)} are stacked, from the first on"
            )
        return tuple(dimensions[stacked:])
    axes = axes_of(metadata)
    if len(axes) == variable.ndim and any(axis in STACKED_AXES for axis in axes):
        return tuple(dimension for dimension, axis in zip(dimensions, axes, strict=True) if axis not in STACKED_AXES)
    return dimensions_as_created(variable)


def axes_of(metadata: Any) -> tuple[Any, ...]:
    """Returns the logical axes of a variable; empty if it has none."""
    return tuple(metadata.get("logical_axes") or metadata.get("out_sharding") or ())
