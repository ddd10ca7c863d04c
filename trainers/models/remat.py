"""Activation checkpointing: activations are computed again in the backward pass, and need no memory until then."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from contextvars import ContextVar
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from trainers.config.model import AUTO
from trainers.parallel import host_memory

LAYER_INPUT = "layer_input"
"""The name of what a layer reads, in the program."""
MOVES = ("gather", "dynamic_slice", "squeeze", "transpose")
"""Of which operations the weights of a turn are made (`in_turns`)."""


QKV = ("query", "key", "value")
"""The products that `product` has named, before their norms and rotation."""

_chosen: ContextVar[str] = ContextVar("remat", default="none")


def choosing(function: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Returns `function`, to be jitted, whose models have `policy` where their setting is `auto`."""

    @functools.wraps(function)
    def traced(*args: Any) -> Any:
        token = _chosen.set(policy)
        try:
            return function(*args)
        finally:
            _chosen.reset(token)

    return traced


def resolved(policy: str) -> str:
    """Returns what a setting means in the program that is traced. Without gradients `auto` computes nothing again."""
    return _chosen.get() if policy == AUTO else policy


def wrap(function: Callable[..., Any], policy: str, *, in_loop: bool = False) -> Callable[..., Any]:
    """Returns `function` with its activations checkpointed. `policy` is a value of `model.remat`: `none`, `full`, a policy of
    `jax.checkpoint_policies` that takes no arguments, one of POLICIES, or `auto`.

    `in_loop`: it is the body of a `scan` that is compiled as a loop. Else the compiler is kept from merging the second
    computation with the first, which would bring the memory back.
    """
    if (policy := resolved(policy)) == "none":
        return function
    return jax.checkpoint(function, policy=_saveable(policy), prevent_cse=not in_loop)


def named(x: jax.Array) -> jax.Array:
    """Returns what a layer reads, with a name for `in_turns`."""
    return checkpoint_name(x, LAYER_INPUT)


def product(x: jax.Array, name: str) -> jax.Array:
    """Returns the product of activations with the matrix `name` of a layer, with a name for POLICIES."""
    return checkpoint_name(x, name)


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


POLICIES: dict[str, Callable[[], Callable[..., Any]]] = {
    "save_dot_except_mlp": lambda: jax.checkpoint_policies.save_only_these_names(*QKV, "out"),
    "save_qkv_proj": lambda: jax.checkpoint_policies.save_only_these_names(*QKV),
    "minimal_offloaded": lambda: jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", host_memory.KIND),
    "qkv_proj_offloaded": lambda: jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=list(QKV), offload_src="device", offload_dst=host_memory.KIND
    ),
}
"""Policies by the names that MaxText has for them."""


def _saveable(policy: str) -> Callable[..., Any]:
    if policy in POLICIES:
        return POLICIES[policy]()
    return jax.checkpoint_policies.nothing_saveable if policy == "full" else getattr(jax.checkpoint_policies, policy)
