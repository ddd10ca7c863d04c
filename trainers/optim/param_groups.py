"""Groups of parameters, by the pattern of their names: parameters with their own settings, and frozen ones.

Gradients, updates and optimizer states have None in place of a frozen parameter, which JAX takes for a tree without leaves. So
a frozen parameter costs no memory and no time, and nothing can change it.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gangway.config.section import did_you_mean
from gangway.errors import UsageError
from trainers.config import ParameterGroup

Groups = Sequence[ParameterGroup]


def as_group(group: ParameterGroup | Mapping[str, Any]) -> ParameterGroup:
    """Returns a group that may be given as a dict with the fields of `ParameterGroup`. Raises UsageError if it is none."""
    if isinstance(group, ParameterGroup):
        return group
    fields = [field.name for field in dataclasses.fields(ParameterGroup)]
    if unknown := [name for name in group if name not in fields]:
        near = did_you_mean(unknown[0], fields)
        raise UsageError(f"build_param_groups: unknown key {unknown[0]!r}: expected {', '.join(fields)}{near}")
    if "pattern" not in group:
        raise UsageError(
            f"build_param_groups: {dict(group)} has no pattern: expected a regular expression for names of parameters"
        )
    try:
        return ParameterGroup(**group)
    except ValueError as error:
        raise UsageError(f"build_param_groups: {error}") from error


def frozen_group(pattern: str) -> ParameterGroup:
    """Returns the group of the frozen parameters of this pattern. Raises UsageError if it is none."""
    try:
        return ParameterGroup(pattern=pattern, frozen=True)
    except ValueError as error:
        raise UsageError(f"freeze_module: {error}") from error


def parameter_path(path: Any) -> str:
    """Returns the name of a parameter, such as `layers.query`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def parameter_paths(params: Any) -> list[str]:
    """Returns the names of the leaves in their order."""
    return [parameter_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def group_of(groups: Groups, path: str) -> int | None:
    """Returns the index of the first group that matches a parameter; None if no group does."""
    # `search`, not `match`: a pattern may occur anywhere in the name.
    return next((number for number, group in enumerate(groups) if re.search(group.pattern, path)), None)


def rate_names(groups: Groups) -> dict[str, ParameterGroup]:
    """Returns the groups that are trained, by the names of the metrics of their learning rates, such as
    `learning_rate/layers.query`. A name has the characters of the pattern that trackers take."""
    names: dict[str, ParameterGroup] = {}
    for group in groups:
        if not group.frozen:
            # Of equal names the first group: it is the one that counts for parameters which several match.
            names.setdefault("learning_rate/" + re.sub(r"[^A-Za-z0-9_./-]+", "_", group.pattern), group)
    return names


def check(groups: Groups, params: Any) -> None:
    """Raises UsageError if a pattern matches no parameter's name, or if nothing is left to train."""
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
    """Returns `params`, or a tree like it, with None in place of frozen parameters."""
    if not any(group.frozen for group in groups):
        return params
    return jax.tree_util.tree_map_with_path(lambda path, x: None if _is_frozen(groups, parameter_path(path)) else x, params)


def completed(partial: Any, whole: Any) -> Any:
    """Returns `partial` with the leaves of `whole` in place of None."""
    return jax.tree.map(lambda leaf, default: default if leaf is None else leaf, partial, whole, is_leaf=is_none)


def is_none(node: Any) -> bool:
    return node is None


def apply_updates(params: Any, updates: Any) -> Any:
    """Does what `optax.apply_updates` does. A parameter without an update stays the same, bit for bit: + 0 would turn -0 into
    0."""
    # Back to the parameter's type: with a promoted one the next step would not fit the compiled program.
    return jax.tree.map(lambda u, p: p if u is None else (p + u).astype(p.dtype), updates, params, is_leaf=is_none)


def with_zeros(partial: Any, whole: Any) -> Any:
    """Returns `partial` with zeros like the leaves of `whole` in place of None."""
    return completed(partial, jax.tree.map(jnp.zeros_like, whole))


def freezing(optimizer: optax.GradientTransformation, groups: Groups) -> optax.GradientTransformation:
    """Returns `optimizer` for the parameters that are not frozen; its state and its updates have None for the others."""
    if not any(group.frozen for group in groups):
        return optimizer

    def init(params: Any) -> Any:
        return optimizer.init(trainable(groups, params))

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return optimizer.update(trainable(groups, gradients), state, trainable(groups, params))

    return optax.GradientTransformation(init, update)
