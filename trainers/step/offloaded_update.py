"""An update of an optimizer's state that lies in the hosts' memory (`optimizer.offload`): a layer after the other.

Stacked moments [L, ...] are read, updated and written back in a loop over the layers. So the devices have the moments of one
layer at a time. The optimizer must compute each value by itself, and its counters without the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import optax

from trainers.optim.param_groups import parameter_path
from trainers.parallel import host_memory
from trainers.step.kept_update import kept_update


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
