"""An update of an optimizer's state that lies in the hosts' memory (`optimizer.offload`): a layer after the other.

Stacked moments [L, ...] are read, updated and written back in a loop over the layers. So the devices have the moments of one
layer at a time. The optimizer must compute each value by itself, and its counters without the parameters.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Literal, Var

from trainers.jax_internals import source_info_util
from trainers.optim.param_groups import parameter_path
from trainers.parallel import host_memory


def kept_update(
    optimizer: optax.GradientTransformation, applied: jax.Array, gradients: Any, opt_state: Any, params: Any
) -> tuple[Any, Any]:
    """Returns (updates, the new state of the optimizer), as `optimizer.update` does. If `applied` (bool) is false, the state is
    the old one, bit for bit, and the caller must not use the updates. Traced.

    A `where` around `optimizer.update` would do the same, but it computes the updates from a state that the `where` has not
    seen. So the compiler copies the old state before it writes the new one: a second state in memory, and two thirds of the time
    of an update of AdamW on a CPU."""
    program, shapes = jax.make_jaxpr(optimizer.update, return_shape=True)(gradients, opt_state, params)
    num_updates, old_leaves = len(jax.tree.leaves(shapes[0])), jax.tree.leaves(opt_state)
    atoms = program.jaxpr.outvars[num_updates:]
    early = _computed_once(program, dict(enumerate(atoms)))
    old_of = {atoms[place]: old_leaves[place] for place in early}
    outputs = _evaluated(program, jax.tree.leaves((gradients, opt_state, params)), applied, old_of)
    for place, old in enumerate(old_leaves):
        if place not in early:
            outputs[num_updates + place] = jnp.where(applied, outputs[num_updates + place], old)
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def _computed_once(program: ClosedJaxpr, atoms: Mapping[int, Any]) -> set[int]:
    """Returns the keys of the atoms that an equation computes for this key alone. Others are inputs, such as parameters that the
    state keeps, or constants, or stand in two places of the state."""
    computed = {var for equation in program.jaxpr.eqns for var in equation.outvars}
    variables = {key: atom for key, atom in atoms.items() if not isinstance(atom, Literal) and atom in computed}
    uses = collections.Counter(variables.values())
    return {key for key, atom in variables.items() if uses[atom] == 1}


def _evaluated(
    program: ClosedJaxpr, arguments: Sequence[jax.Array], applied: jax.Array, old_of: Mapping[Var, jax.Array]
) -> list[jax.Array]:
    """Returns the outputs. If `applied` is false, a variable of `old_of` has the old value as soon as it is computed, and what
    follows is computed from that."""
    jaxpr = program.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *arguments], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        names = source_info_util.current_name_stack() + equation.source_info.name_stack
        with source_info_util.user_context(equation.source_info.traceback, name_stack=names), equation.ctx.manager:
            params = equation.primitive.get_bind_params(equation.params)
            found = equation.primitive.bind(*map(read, equation.invars), **params)
        outputs = found if equation.primitive.multiple_results else [found]
        for var, output in zip(equation.outvars, outputs, strict=True):
            values[var] = jnp.where(applied, output, old_of[var]) if var in old_of else output
    return [read(atom) for atom in jaxpr.outvars]


def offloaded_update(
    optimizer: optax.GradientTransformation, applied: jax.Array, gradients: Any, opt_state: Any, params: Any
) -> tuple[Any, Any]:
    """Does what `kept_update` does; of a state on the devices by the same program. Traced."""
    if not any(map(host_memory.is_on_host, jax.tree.leaves(opt_state))):
        return kept_update(optimizer, applied, gradients, opt_state, params)
    shapes = {parameter_path(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)}
    lengths = {name: shape[0] if len(shape) >= host_memory.STACKED else 0 for name, shape in shapes.items()}
    updates, states = dict[str, Any](), dict[str, Any]()
    # What is not stacked comes last: the new counters, which each group computes, are those of this one.
    for length in sorted({*lengths.values(), 0}, reverse=True):
        names = {name for name, of in lengths.items() if of == length}
        state = _only(opt_state, partial(_is_of, (*names, None), lengths))
        of_group = _of_parameters(gradients, names), state, _of_parameters(params, names)
        if length:
            made = _over_layers(length, lambda *group: kept_update(optimizer, applied, *group), *of_group, owners=lengths)
        else:
            made = _at_once(lambda *group: kept_update(optimizer, applied, *group), *of_group)
        for found, tree in zip((updates, states), made, strict=True):
            found.update({jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)})
    return _like(gradients, updates), _like(opt_state, states)


def _at_once(update: Callable[..., Any], gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
    updates, new = update(gradients, host_memory.to_device(state), params)
    return updates, jax.tree.map(host_memory.to_where, new, state)


def _over_layers(
    length: int, update: Callable[..., Any], gradients: Any, state: Any, params: Any, *, owners: Collection[str]
) -> tuple[Any, Any]:
    """Returns the updates and the new moments of stacked parameters, without the counters."""
    counters = _only(state, lambda path: _owner(path, owners) is None)
    moments = _only(state, lambda path: _owner(path, owners) is not None)

    def layer(index: Any, carried: tuple[Any, Any]) -> tuple[Any, Any]:
        updates, moments = carried
        both = _both(host_memory.taken(moments, index), counters, state)
        made, new = update(host_memory.taken(updates, index), both, host_memory.taken(params, index))
        new = _only(new, lambda path: _owner(path, owners) is not None)
        return host_memory.put(updates, made, index), host_memory.put(moments, new, index)

    # The updates take the room of the gradients, which are not needed any more.
    return jax.lax.fori_loop(0, length, layer, (gradients, moments))


def _owner(path: Any, names: Collection[str]) -> str | None:
    """Returns the parameter whose moment stands at this path of an optimizer's state; None: it is a counter."""
    # From the longest: the name of a parameter may itself end in another's.
    ends = (parameter_path(path[start:]) for start in range(len(path)))
    return next((end for end in ends if end in names), None)


def _is_of(wanted: Collection[str | None], names: Collection[str], path: Any) -> bool:
    return _owner(path, names) in wanted


def _of_parameters(tree: Any, names: Collection[str]) -> Any:
    return _only(tree, lambda path: parameter_path(path) in names)


def _only(tree: Any, keep: Callable[[Any], bool]) -> Any:
    """Returns the tree with None in place of other leaves, as of frozen parameters; also of those that a group of parameters
    leaves to another."""
    is_leaf = partial(_is_a, optax.MaskedNode)
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if keep(path) else None, tree, is_leaf=is_leaf)


def _is_a(cls: type, node: Any) -> bool:
    return isinstance(node, cls)


def _both(moments: Any, counters: Any, like: Any) -> Any:
    leaves = [*jax.tree_util.tree_leaves_with_path(moments), *jax.tree_util.tree_leaves_with_path(counters)]
    return _like(like, {jax.tree_util.keystr(path): leaf for path, leaf in leaves})


def _like(tree: Any, leaves: dict[str, Any]) -> Any:
    """Returns `tree` with these leaves, by path."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[jax.tree_util.keystr(path)], tree)
