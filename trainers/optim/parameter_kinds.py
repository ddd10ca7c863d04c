"""What the arrays of a model are to an optimizer: which of their dimensions are those of one parameter, and which are matrices.

The model says it, by its variables (`trainers.step.state`), and never the name of an attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax

from trainers.optim.param_groups import parameter_path

Role = Literal["matrix", "vector", "table"]
"""`table`: a matrix whose rows are looked up by token or scored against one. It is no linear map, so Muon leaves it to AdamW."""

Mask = Callable[[Any], Any]
"""A function from the parameters to a tree of bools of the same structure."""


@dataclass(frozen=True)
class ParameterKind:
    dimensions: tuple[int, ...]
    """The dimensions of one parameter, counted from the end of the array. Along the others many parameters are stacked."""
    role: Role

    @property
    def decays(self) -> bool:
        """Whether weight decay acts on it: matrices only, and no scales of norms or biases."""
        return self.role != "vector"

    @property
    def is_linear_map(self) -> bool:
        return self.role == "matrix" and len(self.dimensions) == 2


Kinds = Mapping[str, ParameterKind]
"""The kinds of the parameters of a model, by name. A parameter that it lacks is one array that is not stacked."""


class KindsOnDemand(Mapping[str, ParameterKind]):
    """Kinds that are made when they are first asked for: so an optimizer's settings can be checked without its model."""

    def __init__(self, make: Callable[[], Kinds]):
        self._make = make

    @cached_property
    def _made(self) -> Kinds:
        return self._make()

    def __getitem__(self, name: str) -> ParameterKind:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def kind_from_dimensions(dimensions: tuple[int, ...]) -> ParameterKind:
    return ParameterKind(dimensions, "matrix" if len(dimensions) >= 2 else "vector")


def tree_of_kinds(kinds: Kinds, params: Any) -> Any:
    """Returns the kind of each leaf of `params`, as a tree like it."""

    def kind(path: Any, leaf: Any) -> ParameterKind:
        return kinds.get(parameter_path(path)) or kind_from_dimensions(tuple(range(-leaf.ndim, 0)))

    return jax.tree_util.tree_map_with_path(kind, params)


def matrices(kinds: Kinds) -> Mask:
    """Returns the function that says which parameters decay."""
    return lambda params: jax.tree.map(lambda kind: kind.decays, tree_of_kinds(kinds, params))
