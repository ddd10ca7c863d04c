"""Activation checkpointing: activations are computed again in the backward pass, and need no memory until then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def wrap(function: Callable[..., Any], policy: str, *, in_loop: bool = False) -> Callable[..., Any]:
    """Returns `function` with its activations checkpointed. `policy` is a value of `model.remat`: `none`, `full`, or a policy of
    `jax.checkpoint_policies` that takes no arguments.

    `in_loop`: it is the body of a `scan` that is compiled as a loop. Else the compiler is kept from merging the second
    computation with the first, which would bring the memory back.
    """
    if policy == "none":
        return function
    saveable = None if policy == "full" else getattr(jax.checkpoint_policies, policy)
    return jax.checkpoint(function, policy=saveable, prevent_cse=not in_loop)
