"""The products of linear layers, x @ weight: of the operands as they are, or rounded to 8 bits (`model.fp8`).

Each row of x, a token, is divided by its own largest magnitude, and so is each column of a matrix. Thus what a token becomes
depends on no other token: not on the batch, the micro-batch or the device that it is in. A token with large values takes no
digits from others. The gradient of the weights is a sum over tokens: there each column of the incoming gradient has a scale,
which depends on the tokens that are summed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gangway.errors import UsageError

Product = Callable[[jax.Array, jax.Array], jax.Array]
"""The product of x [..., D] and a matrix [D, E]: [..., E]."""


def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x @ weight


def in_fp8(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the product of both operands as float8_e4m3fn. In the backward pass the incoming gradient is float8_e5m2, and the
    operands are those of the forward pass. Raises UsageError without qwix."""
    dot_general, config = _of_qwix()
    return dot_general(x, weight, (((x.ndim - 1,), (0,)), ((), ())), config)


def check_installed() -> None:
    """Raises UsageError if the package that rounds to 8 bits is not installed."""
    _of_qwix()


def _of_qwix() -> tuple[Any, Any]:
    """Returns the function of qwix, and its settings."""
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
