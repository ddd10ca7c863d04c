"""Activation checkpointing: activations are computed again in the backward pass, and need no memory until then."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

LAYER_INPUT = "layer_input"
"""The name of what a layer reads, in the program."""
MOVES = ("gather", "dynamic_slice", "squeeze", "transpose")
"""Of which operations the weights of a turn are made (`in_turns`)."""


def wrap(function: Callable[..., Any], policy: str, *, in_loop: bool = False) -> Callable[..., Any]:
    """Returns `function` with its activations checkpointed. `policy` is a value of `model.remat`: `none`, `full`, or a policy of
    `jax.checkpoint_policies` that takes no arguments.

    `in_loop`: it is the body of a `scan` that is compiled as a loop. Else the compiler is kept from merging the second
    computation with the first, which would bring the memory back.
    """
    if policy == "none":
        return function
    return jax.checkpoint(function, policy=_saveable(policy), prevent_cse=not in_loop)


def named(x: jax.Array) -> jax.Array:
    """Returns what a layer reads, with a name for `in_turns`."""
    return checkpoint_name(x, LAYER_INPUT)


def in_turns(function: Callable[..., Any], policy: str, held: Collection[tuple[int, ...]]) -> Callable[..., Any]:
    """Returns `function`, the body of a loop, which takes its weights out of arrays of the shapes `held`, and whose layers are
    wrapped with `policy`. The weights are taken again in the backward pass: kept, they would be a copy for each turn. Of the rest
    as much is kept as otherwise: the policy of a function is that of those within it, too."""
    kept = jax.checkpoint_policies.everything_saveable if policy == "none" else _saveable(policy)
    of_layers = jax.checkpoint_policies.save_only_these_names(LAYER_INPUT)
    # All groups [P, R, ...]; those of one turn [P, 1, ...], and then [P, ...].
    moved = {*held, *((shape[0], 1, *shape[2:]) for shape in held), *((shape[0], *shape[2:]) for shape in held)}

    def saveable(primitive: Any, *operands: Any, **parameters: Any) -> Any:
        if primitive.name in MOVES and operands[0].shape in moved:
            return False
        return of_layers(primitive, *operands, **parameters) or kept(primitive, *operands, **parameters)

    return jax.checkpoint(function, policy=saveable, prevent_cse=False)


def _saveable(policy: str) -> Callable[..., Any]:
    return jax.checkpoint_policies.nothing_saveable if policy == "full" else getattr(jax.checkpoint_policies, policy)
