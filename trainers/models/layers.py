"""The parameters of the layers of a decoder or an encoder, and their products, x @ weight: of the operands as they are, or
rounded to 8 bits (`model.fp8`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gangway.errors import UsageError
from trainers.config.vision import LayerSizes


class Layers(nnx.Module):
    """The parameters of all layers, each [L, ...]. A matrix is [L, in, out], and of a mixture of experts [L, E, in, out]."""

    LINEAR = ("query", "key", "value", "out", "gate", "up", "down")
    """The matrices that `trainers.models.decoder.project` multiplies by."""

    def __init__(self, config: LayerSizes, *, rngs: nnx.Rngs, param_dtype: Any):
        layers, structure = config.num_layers, config.structure
        # Each layer adds two branches to the residual stream: scaled so that its variance does not grow with depth.
        branch = 1 / math.sqrt(2 * layers)
        embed, mlp, whole = ("embed", config.width), ("mlp", config.mlp_width), ("norm", config.width)
        heads = ("heads", config.num_heads * config.channels)
        kv_heads = ("kv_heads", config.num_kv_heads * config.channels)

        def matrix(
            rows: tuple[str, int], columns: tuple[str | None, int], scale: float = 1.0, of: tuple[tuple[str, int], ...] = ()
        ) -> nnx.Param:
            axes, shape = zip(("layers", layers), *of, rows, columns, strict=True)
            return parameter(rngs, axes, shape, scale / math.sqrt(rows[1]), param_dtype)

        def zeros(axis: tuple[str, int]) -> nnx.Param:
            return nnx.Param(jnp.zeros((layers, axis[1]), param_dtype), logical_axes=("layers", axis[0]))

        def norm(name: str, axis: tuple[str, int] = whole) -> None:
            scale = jnp.zeros if structure.norm_offset else jnp.ones
            setattr(self, name, nnx.Param(scale((layers, axis[1]), param_dtype), logical_axes=("layers", axis[0])))
            if structure.norm == "layer":
                setattr(self, f"{name}_bias", zeros(axis))

        if structure.pre_norms:
            norm("attention_norm")
        self.query = matrix(embed, heads)
        self.key = matrix(embed, kv_heads)
        self.value = matrix(embed, kv_heads)
        self.out = matrix(heads, embed, scale=branch)
        if structure.qk_norm:
            norm("query_norm", ("head_dim", config.channels))
            norm("key_norm", ("head_dim", config.channels))
        if structure.whole_qk_norm:
            norm("query_norm", ("norm", config.num_heads * config.channels))
            norm("key_norm", ("norm", config.num_kv_heads * config.channels))
        if structure.pre_norms:
            norm("mlp_norm")
        if structure.experts:
            # Which expert is which is no dimension to divide: a token needs the scores of all of them.
            self.router = matrix(embed, (None, config.num_experts or 0))
            of_each = (("experts", config.num_experts or 0),)
            self.expert_gate = matrix(embed, mlp, of=of_each)
            self.expert_up = matrix(embed, mlp, of=of_each)
            self.expert_down = matrix(mlp, embed, scale=branch, of=of_each)
        else:
            if structure.gated:
                self.gate = matrix(embed, mlp)
            self.up = matrix(embed, mlp)
            self.down = matrix(mlp, embed, scale=branch)
        of = {"query": heads, "key": kv_heads, "value": kv_heads, "out": whole, "gate": mlp, "up": mlp, "down": whole}
        for name in sorted(config.biased):
            setattr(self, f"{name}_bias", zeros(of[name]))
        if structure.post_norms:
            norm("attention_post_norm")
            norm("mlp_post_norm")


def parameter(rngs: nnx.Rngs, axes: tuple[str | None, ...], shape: tuple[int, ...], scale: float, dtype: Any) -> nnx.Param:
    # Drawn in float32 and then cast: the same start for every type of the parameters.
    return nnx.Param((jax.random.normal(rngs.params(), shape) * scale).astype(dtype), logical_axes=axes)


Product = Callable[[jax.Array, jax.Array], jax.Array]
"""The product of x [..., D] and a matrix [D, E]: [..., E]."""


def as_subclass(module: Any, cls: type[nnx.Module]) -> Any:
    """Returns a module of `cls`, a subclass of the module's own class, with the attributes of `module`."""
    made = object.__new__(cls)
    vars(made).update(vars(module))
    return made


def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x @ weight


def in_fp8(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the product of both operands as float8_e4m3fn. In the backward pass the incoming gradient is float8_e5m2, and the
    operands are those of the forward pass. Raises UsageError without qwix.

    Each row of x, a token, is divided by its own largest magnitude, and so is each column of a matrix. Thus what a token becomes
    depends on no other token: not on the batch, the micro-batch or the device that it is in. A token with large values takes no
    digits from others. The gradient of the weights is a sum over tokens: there each column of the incoming gradient has a scale,
    which depends on the tokens that are summed at once."""
    dot_general, config = of_qwix()
    return dot_general(x, weight, (((x.ndim - 1,), (0,)), ((), ())), config)


def of_qwix() -> tuple[Any, Any]:
    """Returns the function of qwix, which rounds to 8 bits, and its settings. Raises UsageError if it is not installed."""
    try:
        # Without a public name. The public door, `qwix.quantize_model`, replaces functions of JAX while a module of Flax is
        # called, and knows a weight by its variable; ours are slices of stacked ones. pyproject.toml names the versions.
        from qwix._src.core.dot_general_qt import DotGeneralQtConfig, dot_general_qt
    except ImportError as error:
        raise UsageError(
            "model.fp8 = 'current' needs the package qwix, which is not installed: pip install 'gangway[fp8]' on every host, or "
            "set model.fp8 = none"
        ) from error
    operand, gradient = jnp.float8_e4m3fn, jnp.float8_e5m2
    return dot_general_qt, DotGeneralQtConfig(
        lhs_qtype=operand, rhs_qtype=operand, dlhs_grad_qtype=gradient, drhs_grad_qtype=gradient
    )
