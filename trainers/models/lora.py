"""Low-rank adapters on the linear weights of a model (Hu et al., 2021, "LoRA").

The variables of the model become `Frozen`: inputs of the step, and no part of the state. The adapters are its parameters, and
what is trained whole beside them (`lora.whole`), such as tables with rows for new tokens. W acts as W + alpha / rank * A B; B
begins with zeros, so that the adapted model begins as the model itself.

Shape suffixes as in `trainers.models.decoder`; R: the rank.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gangway.config.section import did_you_mean
from gangway.errors import UsageError
from trainers.config import LoraConfig
from trainers.models.layers import Layers, as_subclass
from trainers.parallel import sequence

A, B = "_lora_a", "_lora_b"
"""The ends of the names of adapters: those of `layers.query` are `layers.query_lora_a` and `layers.query_lora_b`."""
KEY, KEEP = "lora_key", "lora_keep"
"""What the layers of a scan need for dropout, beside the weights: a random key, and the share that is kept."""
TOKENS = "vocab"
"""The logical axis of a table whose rows or columns are the tokens of the vocabulary."""
SHOWN = 20

KeyOf = Callable[[str], jax.Array]
"""The random key for what this name draws."""


class Frozen(nnx.Variable):
    """A variable of a model that is no part of the state: a step gets it as an input of its own, and does not change it."""


class Linear(NamedTuple):
    """A linear weight [in, out], or stacked [L, in, out], and where it is."""

    name: str
    module: Any
    attribute: str
    variable: Any

    @property
    def axes(self) -> tuple[str | None, ...]:
        return tuple(self.variable.get_metadata().get("logical_axes", (None,) * self.variable.ndim))


class LoraLinear(nnx.Linear):
    """A linear layer with an adapter beside its kernel."""

    lora: LoraConfig
    deterministic: bool
    lora_stream: Any

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        y, config = super().__call__(inputs, out_sharding), self.lora
        a, b = getattr(self, f"kernel{A}")[...], config.scale * getattr(self, f"kernel{B}")[...]
        x, a, b = self.promote_dtype((inputs, a, b), dtype=self.dtype)
        if config.dropout and not self.deterministic:
            x = dropped(x, self.lora_stream(), 1 - config.dropout)
        return y + (x @ a) @ b


def adapt(model: Any, config: LoraConfig, key_of: KeyOf) -> Any:
    """Returns the model with adapters; its own parameters are frozen. Raises UsageError with all that does not fit. Traced, or
    under `nnx.eval_shape`. `key_of` gives the keys of the first values, each a function of the name."""
    names, linear = _names(model), {weight.name: weight for weight in linear_weights(model)}
    chosen, whole = _chosen(config, names, linear)
    if state := [name for name, variable in names.items() if not isinstance(variable, nnx.Param)]:
        raise UsageError(f"lora: the model has state beside its parameters ({', '.join(state[:5])}): expected parameters alone")
    _freeze(model, whole)
    for name in chosen:
        _add(linear[name], config, key_of(f"lora/{name}"))
    for module in {id(linear[name].module): linear[name].module for name in chosen}.values():
        module.lora = config
        if config.dropout:
            module.deterministic = True  # `train()` and `eval()` set it
            module.lora_stream = nnx.Rngs(dropout=key_of("lora/dropout"))["dropout"].fork()

    def adapted(path: Any, node: Any) -> Any:
        return as_subclass(node, LoraLinear) if type(node) is nnx.Linear and hasattr(node, "lora") else node

    return nnx.recursive_map(adapted, model)


def linear_weights(model: Any) -> Iterator[Linear]:
    """Yields the weights that adapters can be added to: those of the layers of a `Decoder`, and the kernels of `nnx.Linear`."""
    for path, module in nnx.iter_graph(model):
        if type(module) is nnx.Linear:
            attributes: tuple[str, ...] = ("kernel",)
        else:
            attributes = Layers.LINEAR if isinstance(module, Layers) else ()
        for attribute in attributes:
            variable = getattr(module, attribute, None)
            # Experts have a dimension more: their products are others.
            if variable is not None and variable.ndim == (3 if isinstance(module, Layers) else 2):
                yield Linear(".".join(map(str, (*path, attribute))), module, attribute, variable)


def scaled(layers: Any) -> dict[str, jax.Array]:
    """Returns the weights of `Layers`, [L, ...] each, with the scale of the adapters in their B."""
    variables, _ = nnx.state(layers, (nnx.Param, Frozen), ...)
    weights, config = nnx.to_pure_dict(variables), getattr(layers, "lora", None)
    if config is None:
        return weights
    # Here, where the values are few and not rounded yet, and not in the products [N, out].
    return {name: config.scale * weight if name.endswith(B) else weight for name, weight in weights.items()}


def noise(layers: Any) -> dict[str, jax.Array]:
    """Returns what `added` needs for dropout, [L, ...] each; nothing without dropout, and in evaluations. Draws from a random
    stream of the model: called once for each pass."""
    config = getattr(layers, "lora", None)
    if config is None or not config.dropout or layers.deterministic:
        return {}
    num_layers = len(layers.attention_norm)
    keep = jnp.full(num_layers, 1 - config.dropout, jnp.float32)
    return {KEY: jax.random.split(layers.lora_stream(), num_layers), KEEP: keep}


def added(y_NE: jax.Array, x_ND: jax.Array, weights: Mapping[str, jax.Array], name: str) -> jax.Array:
    """Returns y, the product of x and the weight `name` of a layer, plus what the weight's adapter makes of x."""
    if f"{name}{A}" not in weights:
        return y_NE
    if KEY in weights:
        # By the name: the adapters of queries and values drop different numbers of the same input.
        x_ND = dropped(x_ND, jax.random.fold_in(weights[KEY], zlib.crc32(name.encode())), weights[KEEP])
    return y_NE + (x_ND @ weights[f"{name}{A}"]) @ weights[f"{name}{B}"]


def dropped(x: jax.Array, key: jax.Array, keep: jax.Array | float) -> jax.Array:
    """Returns x with some values set to 0, and the others larger, so that the mean stays the same."""
    kept = jax.random.bernoulli(key, keep, x.shape)
    # The same numbers are dropped on any mesh: those of a token, wherever it is.
    return jnp.where(sequence.balanced_from_parts(kept), x / jnp.asarray(keep, x.dtype), jnp.zeros((), x.dtype))


def with_new_tokens(table: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns a table with rows (or columns) for new tokens at its end, each the mean of the others; [...] as `shape`."""
    for axis, size in enumerate(shape):
        if size > table.shape[axis]:
            mean = jnp.mean(table.astype(jnp.float32), axis, keepdims=True).astype(table.dtype)
            table = jnp.concatenate([table, jnp.repeat(mean, size - table.shape[axis], axis)], axis)
    return table


def axis_of_tokens(axes: Sequence[str | None]) -> int | None:
    """Returns which dimension of a parameter with these logical axes is over the tokens of the vocabulary; None: none is."""
    return list(axes).index(TOKENS) if TOKENS in axes else None


def merged(name: str, weight: np.ndarray, adapters: Mapping[str, np.ndarray], config: LoraConfig) -> np.ndarray:
    """Returns the weight with its adapter, or the one that was trained whole in its place, in its own type; unchanged if there is
    neither."""
    if name in adapters:
        return adapters[name].astype(weight.dtype)
    if f"{name}{A}" not in adapters:
        return weight
    a, b = (adapters[f"{name}{end}"].astype(np.float32) for end in (A, B))
    return (weight.astype(np.float32) + config.scale * (a @ b)).astype(weight.dtype)


def _names(model: Any) -> dict[str, Any]:
    """Returns the variables by name, without those of random streams."""
    _, state = nnx.state(model, (nnx.RngKey, nnx.RngCount), ...)
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def _chosen(config: LoraConfig, names: Mapping[str, Any], linear: Mapping[str, Linear]) -> tuple[list[str], set[str]]:
    """Returns the names of the weights to adapt, and of the parameters that are trained whole. Raises UsageError with the
    problems of all targets."""
    there = f"linear weights are {_listed(linear)}"
    nothing = f"lora: the model has no linear weights that can be adapted; its parameters are {_listed(names)}"
    problems = [] if linear else [nothing]
    for target in config.targets if linear else ():
        matched = [name for name in names if config.matches(target, name)]
        if not matched:
            ends = [name.rpartition(".")[2] for name in linear]
            problems.append(f"lora.targets: {target!r} is the name of no parameter: {there}{did_you_mean(target, ends)}")
        elif wrong := [name for name in matched if name not in linear]:
            problems.append(f"lora.targets: {target!r} is the name of {_listed(wrong)}, no linear weight: {there}")
    chosen = [name for name in linear if not config.targets or any(config.matches(target, name) for target in config.targets)]
    for name in chosen:
        *_, rows, columns = linear[name].variable.shape
        if config.rank > min(rows, columns):
            problems.append(f"lora.rank = {config.rank}: {name} is [{rows}, {columns}]: expected at most {min(rows, columns)}")
    whole = {name for name in names if any(config.matches(pattern, name) for pattern in config.whole)}
    if problems := [*problems, *_problems_of_whole(config, names, whole, chosen)]:
        raise UsageError("\n".join(problems))
    return chosen, whole


def _problems_of_whole(
    config: LoraConfig, names: Mapping[str, Any], whole: Collection[str], chosen: Collection[str]
) -> Iterator[str]:
    for pattern in config.whole:
        if not any(config.matches(pattern, name) for name in names):
            ends = [name.rpartition(".")[2] for name in names]
            yield (f"lora.whole: {pattern!r} is the name of no parameter: they are {_listed(names)}{did_you_mean(pattern, ends)}")
    if both := [name for name in chosen if name in whole]:
        yield f"lora.whole: {_listed(both)} has an adapter too: name it in lora.targets or in lora.whole, not in both"
    if not config.new_tokens:
        return
    tables = [name for name, variable in names.items() if TOKENS in variable.get_metadata().get("logical_axes", ())]
    if not tables:
        yield f"lora.new_tokens = {config.new_tokens}: the model has no parameter with an axis {TOKENS!r} (logical_axes)"
    elif missing := [name for name in tables if name not in whole]:
        yield (
            f"lora.new_tokens = {config.new_tokens}: the rows of new tokens must be trained, and {_listed(missing)} is not; set "
            f"lora.whole: [{'|'.join(tables)}]"
        )


def _listed(names: Any) -> str:
    shown = list(names)
    return ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")


def _freeze(model: Any, whole: Collection[str]) -> None:
    """Makes each parameter but those of `whole` a `Frozen` variable. One that several modules share stays one."""
    frozen: dict[int, Frozen] = {}
    trained = {id(variable) for path, variable in nnx.iter_graph(model) if ".".join(map(str, path)) in whole}
    for _, module in nnx.iter_graph(model):
        if not isinstance(module, nnx.Pytree):
            continue
        for name, variable in list(vars(module).items()):
            if isinstance(variable, nnx.Param) and id(variable) not in trained:
                made = frozen.setdefault(id(variable), Frozen(variable[...], **variable.get_metadata()))
                setattr(module, name, made)


def _add(weight: Linear, config: LoraConfig, key: jax.Array) -> None:
    *stack, rows, columns = weight.variable.shape
    *axes, of_rows, of_columns = weight.axes
    dtype = weight.variable.dtype
    # As the library PEFT begins: uniform, with the variance 1 / (3 in).
    limit = 1 / math.sqrt(rows)
    first = jax.random.uniform(key, (*stack, rows, config.rank), minval=-limit, maxval=limit).astype(dtype)
    zeros = jnp.zeros((*stack, config.rank, columns), dtype)
    setattr(weight.module, f"{weight.attribute}{A}", nnx.Param(first, logical_axes=(*axes, of_rows, None)))
    setattr(weight.module, f"{weight.attribute}{B}", nnx.Param(zeros, logical_axes=(*axes, None, of_columns)))
