"""Whether a mesh divides a model, and what it leaves whole on every device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from gangway.errors import UsageError
from trainers.config import mesh
from trainers.config.mesh import CONTEXT, PIPELINE, TENSOR, Shared
from trainers.models.decoder import Decoder
from trainers.models.encoder import Encoder
from trainers.parallel import mesh as meshes


def shared_of(model: nnx.Module) -> Iterator[Shared]:
    """Yields what the devices along an axis of the mesh share of a model in equal parts. Of a model of the user's own nothing is
    known but its logical axes."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Decoder):
            yield from (mesh.of_layers(module.config), *mesh.of_model(module.config, "model"))
        elif isinstance(module, Encoder):
            yield from mesh.of_model(module.config, "vision")


def check_models(mesh_sizes: Mapping[str, int], models: Mapping[str, Any]) -> None:
    """Raises UsageError if the mesh does not divide one of the models (`ModelParts`, by name), as its axis `context` divides
    sequences, and `pipeline` layers: its devices would compute the same several times."""
    whole = [name for name, model in models.items() if not getattr(model, "divides_sequences", False)]
    for axis, does in ((CONTEXT, "divides its sequences"), (PIPELINE, "has stages")):
        if (size := mesh_sizes.get(axis, 1)) > 1 and whole:
            raise UsageError(
                f"mesh.{axis} = {size}: only a trainers.models.decoder.Decoder with its own `hidden` {does}, and "
                f"{' and '.join(whole)} is none; use mesh.data or mesh.fsdp for these devices"
            )
    for name, model in models.items():
        if lines := [f"{line} ({name})" for line in mesh.problems(model.shared, mesh_sizes)]:
            raise UsageError("\n".join(lines))


def check_experts(mesh_sizes: Mapping[str, int], *trees: tuple[Any, Any]) -> None:
    """Raises UsageError if the model has no experts that the axis `expert` of the mesh divides: each device must have as many of
    them. `trees` are (shapes, logical axes)."""
    size = mesh_sizes["expert"]
    if size == 1:
        return
    numbers = {number for _, _, dimensions in _leaves(*trees) for name, number in dimensions if name == "experts"}
    if not numbers:
        raise UsageError(f"mesh.expert = {size}: the model has no experts; use mesh.data or mesh.fsdp for these devices")
    experts = [Shared("expert", "the experts of the model", number) for number in sorted(numbers)]
    if lines := list(mesh.problems(experts, mesh_sizes)):
        raise UsageError("\n".join(lines))


def left_whole(mesh_sizes: Mapping[str, int], *trees: tuple[Any, Any]) -> list[str]:
    """Returns a line for each kind of dimension of `trees`, (shapes, logical axes), that the mesh shall divide and does not, with
    what each device has of it; and one if nothing at all is divided over `tensor`: a model may do that by hand."""
    found: dict[tuple[tuple[str, ...], str, int], list[tuple[str, int]]] = {}
    for name, leaf, dimensions in _leaves(*trees):
        for axis, number in dimensions:
            asked = [each for each in meshes.rule_of(mesh_sizes, axis) if mesh_sizes[each] > 1]
            got = meshes.dividing_dimension(mesh_sizes, axis, number)
            if axis and (lacking := tuple(each for each in asked if each not in got)):
                size = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
                found.setdefault((lacking, axis, number), []).append((name, size))
    lines = [_line(mesh_sizes, *dimension, leaves) for dimension, leaves in found.items()]
    size, dimensions = mesh_sizes[TENSOR], [each for _, _, of_leaf in _leaves(*trees) for each in of_leaf]
    if size > 1 and not any(TENSOR in meshes.dividing_dimension(mesh_sizes, *each) for each in dimensions):
        names = ", ".join(name for name in meshes.LOGICAL_AXIS_RULES if TENSOR in meshes.rule_of(mesh_sizes, name))
        lines.append(
            f"mesh.tensor = {size} divides no parameter of the model (its logical_axes have none of {names}): unless the model "
            f"divides its work by hand, {size} devices compute the same; mesh.data or mesh.fsdp would use them"
        )
    return lines


def _line(mesh_sizes: Mapping[str, int], lacking: tuple[str, ...], axis: str, number: int, leaves: list[tuple[str, int]]) -> str:
    over = " and ".join(f"mesh.{each} = {mesh_sizes[each]}" for each in lacking)
    largest = max(leaves, key=lambda leaf: leaf[1])[0]
    more = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
    return (
        f"{over} {'does' if len(lacking) == 1 else 'do'} not divide {axis} = {number}: each device along it has all of "
        f"{largest}{more} ({sum(size for _, size in leaves):,} bytes)"
    )


def _leaves(*trees: tuple[Any, Any]) -> Iterator[tuple[str, Any, list[tuple[str | None, int]]]]:
    """Yields the name, the shape, and the (logical axis, size) of each dimension, of all arrays."""
    for shapes, axes in trees:
        names_of = jax.tree.leaves(axes, is_leaf=lambda each: isinstance(each, tuple))
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        for (path, leaf), names in zip(leaves, names_of, strict=True):
            yield jax.tree_util.keystr(path, simple=True, separator="."), leaf, list(zip(names, leaf.shape, strict=True))
