"""The shape with which each variable of a model is made. Under `nnx.vmap` or `nnx.scan` it is the shape of one, and the variable
has one more dimension afterwards: that tells which dimensions are stacked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flax import nnx

CREATED = "created_shape"
"""The name of the shape in the metadata of a variable."""
UPDATE_AS = "update_as"
"""The name, in the metadata of a variable, of what an optimizer takes it for (`trainers.optim.parameter_kinds.Role`)."""
STACKED = "stacked"
"""The name, in the metadata of a variable, of how many of its first dimensions are stacked."""


@contextmanager
def noting_shapes() -> Iterator[None]:
    """Lets every variable that is made meanwhile keep the shape that it was made with."""
    create_value = nnx.Variable.create_value

    def noting(self: Any, value: Any) -> Any:
        value = create_value(self, value)
        if hasattr(value, "shape"):
            self.set_metadata(CREATED, tuple(value.shape))
        return value

    # Flax has no other place that sees a variable inside `nnx.vmap`: its hooks are deprecated, and warn.
    nnx.Variable.create_value = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        nnx.Variable.create_value = create_value  # type: ignore[method-assign]


def dimensions_as_created(variable: Any) -> tuple[int, ...]:
    """Returns the dimensions of a variable that it was made with, counted from the end."""
    rest = list(variable.get_metadata().get(CREATED, variable.shape))
    found: list[int] = []
    # From the end, for dimensions are stacked at the front, but for `out_axes` of another number.
    for dimension in range(-1, -variable.ndim - 1, -1):
        if rest and variable.shape[dimension] == rest[-1]:
            found.append(dimension)
            rest.pop()
    # Of another size: it was replaced after it was made.
    return tuple(range(-variable.ndim, 0)) if rest else tuple(found[::-1])


def role_in_flax(module: Any, attribute: str) -> str | None:
    """Returns what a parameter of a module of Flax (Linen or NNX) is, where its dimensions alone do not tell: the bias of an
    attention head is [heads, channels], and no matrix."""
    if not any(cls.__module__.startswith(("flax.nnx.nn", "flax.linen")) for cls in type(module).__mro__):
        return None
    return {"bias": "vector", "scale": "vector", "embedding": "table"}.get(attribute)
