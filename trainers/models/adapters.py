"""Models that are no NNX modules: Linen modules, and plain functions over pytrees.

`Task.build_model` returns what these functions return. The rest of the trainer knows NNX modules alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from flax import linen, nnx
from flax.core import DenyList

from gangway.errors import UsageError
from trainers.models.batch_norm import OfRows
from trainers.models.created import CREATED, STACKED, UPDATE_AS, role_in_flax

TRAINING = ("train", "training", "is_training")
EVALUATING = ("deterministic", "use_running_average")
"""Parameters of a Linen module's `__call__` that are set by the mode: True in training, and True in evaluations."""


def from_linen(module: linen.Module, *sample: Any, rngs: nnx.Rngs) -> LinenModel:
    """Returns a Linen module as an NNX module. `sample` are inputs to make its variables with; their rows do not matter.

    The collection `params` is trained. The other collections, such as `batch_stats`, are state. What the module draws in training
    depends on (seed, step, micro-batch) alone. Its parameter `train`, `training`, `is_training`, `deterministic` or
    `use_running_average` is set by the mode, if its `__call__` has one.
    """
    return LinenModel(module, sample, rngs)


def from_functions(
    init: Callable[[jax.Array], Any], apply: Callable[..., Any], *, rngs: nnx.Rngs, stacked: Sequence[str] = ()
) -> FunctionModel:
    """Returns an NNX module whose parameters are the pytree `init(key)`, and whose call is `apply(parameters, *inputs)`.

    If `apply` has a parameter `training`, it gets True or False; if it has one `key`, it gets a key that depends on (seed, step,
    micro-batch) alone. `stacked` names the arrays, or dicts of arrays, whose first dimension is over layers, such as `blocks`:
    each layer has parameters of its own for the optimizer. Raises UsageError for a name that is not there.
    """
    return FunctionModel(init, apply, rngs, stacked)


class LinenModel(OfRows):
    def __init__(self, module: linen.Module, sample: tuple[Any, ...], rngs: nnx.Rngs):
        self._parameters = tuple(inspect.signature(type(module).__call__).parameters)
        self.deterministic = True  # `train()` and `eval()` set it
        self.linen = nnx.bridge.ToNNX(module, rngs)
        created: dict[tuple[Any, ...], dict[str, Any]] = {}
        with linen.intercept_methods(partial(_note_parameters, created)):
            nnx.bridge.lazy_init(self.linen, *sample, **self._mode())
        for path, variable in nnx.iter_graph(self.linen):
            if isinstance(variable, nnx.Param):
                variable.set_metadata(**created.get(path, {}))

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        # In an evaluation nothing is mutable: a module that takes statistics all the same is an error.
        mutable = False if self.deterministic else DenyList(("params", "intermediates"))
        with linen.intercept_methods(self._with_mask):
            return self.linen(*inputs, mutable=mutable, **{**self._mode(), **named})

    def _mode(self) -> dict[str, bool]:
        modes = {**dict.fromkeys(TRAINING, not self.deterministic), **dict.fromkeys(EVALUATING, self.deterministic)}
        return {name: value for name, value in modes.items() if name in self._parameters}

    def _with_mask(self, call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """Calls a method of the module. Batch normalization leaves out the rows that only fill up the batch."""
        is_norm = isinstance(context.module, linen.BatchNorm) and context.method_name == "__call__"
        if is_norm and self.rows is not None and args and kwargs.get("mask") is None:
            kwargs = {**kwargs, "mask": self.rows.mask(args[0])}
        return call(*args, **kwargs)


def _note_parameters(noted: dict[tuple[Any, ...], dict[str, Any]], call: Callable, args: Any, kwargs: Any, context: Any) -> Any:
    """Calls a method of a Linen module, and notes its parameters by path: the shapes have none of the dimensions over which
    `nn.scan` and `nn.vmap` stack them."""
    returned, module = call(*args, **kwargs), context.module
    if module.scope is not None:
        for name, value in linen.meta.unbox(module.variables.get("params", {})).items():
            if isinstance(value, jax.Array):
                role = role_in_flax(module, name)
                noted[(*module.path, name)] = {CREATED: value.shape, **({} if role is None else {UPDATE_AS: role})}
    return returned


class FunctionModel(nnx.Module):
    def __init__(self, init: Callable[[jax.Array], Any], apply: Callable[..., Any], rngs: nnx.Rngs, stacked: Sequence[str] = ()):
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(init(rngs.params()))
        self._paths = tuple(tuple(map(_name, path)) or ("value",) for path, _ in leaves)
        self._apply, self._parameters = apply, tuple(inspect.signature(apply).parameters)
        self.deterministic = True  # `train()` and `eval()` set it
        if unknown := [name for name in stacked if not any(_is_in(path, name) for path in self._paths)]:
            there = ", ".join(".".join(path) for path in self._paths)
            raise UsageError(f"stacked = {unknown[0]!r}: it is the name, or the beginning of the name, of no parameter ({there})")
        counts = {path: sum(_is_in(path, name) for name in stacked) for path in self._paths}
        params = {path: _stacked(leaf, counts[path]) for path, (_, leaf) in zip(self._paths, leaves, strict=True)}
        self.weights = _nested(params)
        if "key" in self._parameters:
            self.stream = rngs["dropout"].fork()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if "training" in self._parameters:
            named = {"training": not self.deterministic, **named}
        if "key" in self._parameters:
            named = {"key": self.stream(), **named}
        leaves = [self._leaf(path) for path in self._paths]
        return self._apply(jax.tree.unflatten(self._structure, leaves), *inputs, **named)

    def _leaf(self, path: tuple[str, ...]) -> jax.Array:
        value: Any = self.weights
        for name in path:
            value = value[name]
        return value[...]


def _name(entry: Any) -> str:
    """Returns the name of a parameter's place in a dict, a list, or an object."""
    return str(next(getattr(entry, kind) for kind in ("key", "idx", "name") if hasattr(entry, kind)))


def _stacked(leaf: Any, number: int) -> nnx.Param:
    made = nnx.Param(leaf)
    made.set_metadata(STACKED, number)
    return made


def _is_in(path: tuple[str, ...], name: str) -> bool:
    return f"{'.'.join(path)}.".startswith(f"{name}.")


def _nested(flat: Mapping[tuple[str, ...], Any]) -> nnx.Dict:
    """Returns {(a, b): x} as {a: {b: x}}, in the dicts of NNX."""
    below: dict[str, dict[tuple[str, ...], Any]] = {}
    for (first, *others), value in flat.items():
        below.setdefault(first, {})[tuple(others)] = value
    return nnx.Dict({name: values[()] if () in values else _nested(values) for name, values in below.items()})
