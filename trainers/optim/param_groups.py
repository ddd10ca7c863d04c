"""Parameters by the pattern of their names: what is trained in a way of its own, and what is not trained at all.

A frozen parameter is left out where gradients, updates and optimizer states are made: those trees have None in its place, which
JAX takes for a tree without leaves. So it costs no memory and no time, and nothing can change it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from trainers.config import ParameterGroup
from trainers.errors import UsageError

Groups = Sequence[ParameterGroup]


def parameter_path(path: Any) -> str:
    """Such as `layers.query`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def parameter_paths(params: Any) -> list[str]:
    """Of the leaves, in their order."""
    return [parameter_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def group_of(groups: Groups, path: str) -> int | None:
    """The number of the first group that takes a parameter; None: it is trained like most."""
    return next((number for number, group in enumerate(groups) if re.search(group.pattern, path)), None)


def check(groups: Groups, params: Any) -> None:
    """Raises UsageError if a pattern is in no parameter's name, or if nothing is left to train."""
    paths = parameter_paths(params)
    lines = [_unmatched(group.pattern, paths) for group in groups if not any(re.search(group.pattern, path) for path in paths)]
    if paths and all(_is_frozen(groups, path) for path in paths):
        lines.append("every parameter is frozen (optimizer.groups, freeze_module): expected one at least that is trained")
    if lines:
        raise UsageError("\n".join(lines))


def _unmatched(pattern: str, paths: list[str]) -> str:
    near = difflib.get_close_matches(pattern, paths, 3, 0.3) or paths[:10]
    return f"the pattern {pattern!r} is in no parameter's name (optimizer.groups, freeze_module): near are {', '.join(near)}"


def _is_frozen(groups: Groups, path: str) -> bool:
    number = group_of(groups, path)
    return number is not None and groups[number].frozen


def trainable(groups: Groups, params: Any) -> Any:
    """`params`, or a tree like it, with None in the place of what is frozen."""
    if not any(group.frozen for group in groups):
        return params
    return jax.tree_util.tree_map_with_path(lambda path, x: None if _is_frozen(groups, parameter_path(path)) else x, params)


def completed(partial: Any, whole: Any) -> Any:
    """`partial`, with the leaves of `whole` in the place of None."""
    return jax.tree.map(lambda own, other: other if own is None else own, partial, whole, is_leaf=_is_none)


def _is_none(node: Any) -> bool:
    return node is None


def apply_updates(params: Any, updates: Any) -> Any:
    """Like `optax.apply_updates`. A parameter without an update stays as it is, bit for bit: + 0 would turn -0 into 0."""
    return jax.tree.map(lambda u, p: p if u is None else (p + u).astype(p.dtype), updates, params, is_leaf=_is_none)


def with_zeros(partial: Any, whole: Any) -> Any:
    """`partial`, with zeros like the leaves of `whole` in the place of None."""
    return completed(partial, jax.tree.map(jnp.zeros_like, whole))


def freezing(optimizer: optax.GradientTransformation, groups: Groups) -> optax.GradientTransformation:
    """`optimizer` for what is not frozen: its state and its updates have None for the rest."""
    if not any(group.frozen for group in groups):
        return optimizer

    def init(params: Any) -> Any:
        return optimizer.init(trainable(groups, params))

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return optimizer.update(trainable(groups, gradients), state, trainable(groups, params))

    return optax.GradientTransformation(init, update)
