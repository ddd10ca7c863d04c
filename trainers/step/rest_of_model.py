"""The rest of a model, without its parameters: other state, such as batch statistics, and random streams, such as for dropout.

State is carried from step to step like the parameters. A random stream is not: it begins anew with each micro-batch, from a key
that is a function of what the micro-batch is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from gangway.errors import UsageError
from trainers.models.lora import Frozen
from trainers.step import rng

STREAMS = (nnx.RngKey, nnx.RngCount)
"""The variables of a random stream: its key, and how often it was drawn from."""


class Rest(NamedTuple):
    """What a model needs beside its parameters to be called."""

    state: Any = {}  # noqa: RUF012 - a default of a tuple's field, and nobody writes to it
    """Nested dicts, as in `TrainState.model_state`."""
    streams: Any = None
    """The state of the random streams (`streams`); None: there are none, or it does not matter what is drawn."""
    frozen: Mapping[str, Any] = {}
    """The weights that are an input of the step, in nested dicts, by their names in the configuration."""


def streams(template: Any, seed: int, purpose: str, step: int | jax.Array, micro_batch: int | jax.Array) -> Any:
    """Returns the state of the random streams in `template`, each at its beginning. What a stream gives depends on (seed,
    purpose, its path in the model, step, micro-batch) alone, and so neither on the hosts nor on the steps before. Traced."""

    def begun(path: tuple[Any, ...], variable: Any) -> Any:
        if not isinstance(variable, nnx.RngKey):
            return variable.replace(jnp.zeros(variable.shape, variable.dtype))
        # By the path: layers that got their streams from one `nnx.Rngs` draw different numbers.
        name = f"{purpose}/{'.'.join(map(str, path))}"
        key = jax.random.fold_in(rng.key(seed, name, step), micro_batch)
        return variable.replace(jax.random.split(key, variable.shape) if variable.shape else key)

    return nnx.from_flat_state([(path, begun(path, variable)) for path, variable in nnx.to_flat_state(template)])


def check_attributes(model: Any) -> None:
    """Raises UsageError that names the plain arrays among the attributes of the modules: NNX takes them for constants of the
    program, and they are none. `model` was built by `nnx.eval_shape`."""
    plain = [
        f"{type(module).__name__}.{name}"
        for _, module in nnx.iter_graph(model)
        if isinstance(module, nnx.Module)
        for name, value in vars(module).items()
        if isinstance(value, jax.core.Tracer)
    ]
    if plain:
        raise UsageError(
            f"the model has plain arrays as attributes ({', '.join(plain)}): wrap each in nnx.Variable(...), or in "
            "nnx.Param(...) if it is to be trained"
        )


def state_after(model: Any, before: Any) -> Any:
    """Returns the state of a model that was called, in the form of `before`, its state until then. Raises UsageError if the call
    made, removed or changed variables in another way than by new values."""
    _, _, _, now = nnx.state(model, nnx.Param, Frozen, STREAMS, ...)
    # What `sow` has put there is for whoever called the model, and no state.
    kept = [(path, variable) for path, variable in nnx.to_flat_state(now) if not isinstance(variable, nnx.Intermediate)]
    after = nnx.to_pure_dict(nnx.from_flat_state(kept))
    was, is_now = described(before), described(after)
    if was != is_now:
        changed = [
            f"{name}: {was.get(name, 'absent')} before, {is_now.get(name, 'absent')} after"
            for name in {**was, **is_now}
            if was.get(name) != is_now.get(name)
        ]
        raise UsageError(
            f"calling the model changed its variables ({'; '.join(changed[:5])}): make all of them in __init__, with the shapes "
            "and types that they keep"
        )
    return after


def described(state: Any) -> dict[str, str]:
    """Returns type and shape of each array by its name."""
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def stays_finite(new: Any, old: Any) -> jax.Array:
    """Whether no value of the state was finite and is no longer. One that never was, such as an initial infinity, may stay."""

    def fine(new_leaf: jax.Array, old_leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(new_leaf.dtype, jnp.inexact):
            return jnp.bool_(True)
        return jnp.all(jnp.isfinite(new_leaf) | ~jnp.isfinite(old_leaf))

    return jnp.all(jnp.stack(jax.tree.leaves(jax.tree.map(fine, new, old))))
