"""Reads off a model what its parameters are to an optimizer (`trainers.optim.parameter_kinds`).

The first of these that a variable has counts:

1. `stacked`, the number of its first dimensions over which parameters are stacked:  nnx.Param(jnp.ones((12, 64)), stacked=1)
2. the axes `layers` and `experts` of its `logical_axes`, or of Flax's `out_sharding`
3. that it was made under `nnx.vmap` or `nnx.scan`, or by a Linen module under `nn.vmap` or `nn.scan`

A parameter of two dimensions or more is a matrix, one with the axis `vocab` a table. `update_as` says something else:
nnx.Param(jnp.ones((8, 64)), update_as="vector").
"""

from __future__ import annotations

import typing
from typing import Any, cast

from flax import nnx

from gangway.errors import UsageError
from trainers.models.created import STACKED, UPDATE_AS, dimensions_as_created, role_in_flax
from trainers.optim.parameter_kinds import ParameterKind, Role, kind_from_dimensions

STACKED_AXES = ("layers", "experts")
"""The logical axes over which parameters are stacked."""
TABLE_AXIS = "vocab"


def kinds_of(model: Any) -> dict[str, ParameterKind]:
    """Returns the kinds of the parameters of a model, by name. Raises UsageError for metadata that say nothing."""
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
