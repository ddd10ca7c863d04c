"""Products of operands that are rounded to 8 bits: their values, gradients and scales, and what is missing without qwix."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gangway.errors import UsageError
from trainers.models import layers

E4M3, E5M2 = 2.0**-4, 2.0**-3
"""Half the distance between two numbers of 3 and of 2 digits, by their size: the most that rounding changes a number by."""
TWICE = 1.05
"""Scales, and what is divided by them, are rounded to the type of the operands, too; and small numbers more than others."""


def drawn(dtype="float32", tokens=(24,)):
    keys = jax.random.split(jax.random.key(7), 3)
    shapes = ((*tokens, 32), (32, 40), (*tokens, 40))
    # Of very different sizes: so no scale is that of another token or column.
    x, weight, gradient = (
        jax.random.normal(key, shape) * 4.0 ** jnp.arange(shape[-1]) ** 0.5 for key, shape in zip(keys, shapes, strict=True)
    )
    return tuple(each.astype(dtype) for each in (x, weight, gradient))


@jax.jit
def of(x, weight, gradient):
    """The product, and the gradients of x and of the weight."""
    found, backward = jax.vjp(layers.in_fp8, x, weight)
    return found, *backward(gradient)


def exact(value):
    return np.asarray(value.astype(jnp.float32), np.float64)


def assert_rounded(found, expected, most, unit):
    """`found` differs from `expected`, by at most the share `unit` of the sums of magnitudes `most`."""
    error = np.abs(exact(found) - expected)
    assert np.all(error <= TWICE * unit * most)
    assert np.max(error / most) > unit / 100


@pytest.mark.parametrize(("dtype", "tokens"), [("float32", (24,)), ("bfloat16", (3, 8))], ids=["tokens", "sequences"])
def test_products_and_gradients_differ_by_the_rounding_of_their_operands(dtype, tokens):
    x, weight, gradient = drawn(dtype, tokens)
    found, of_x, of_weight = of(x, weight, gradient)
    assert (found.dtype, of_x.dtype, of_weight.dtype) == (x.dtype,) * 3
    x, weight, gradient = map(exact, (x, weight, gradient))
    both = (1 + E4M3) ** 2 - 1
    assert_rounded(found, x @ weight, np.abs(x) @ np.abs(weight), both)
    mixed = (1 + E4M3) * (1 + E5M2) - 1
    assert_rounded(of_x, gradient @ weight.T, np.abs(gradient) @ np.abs(weight.T), mixed)
    rows, columns = x.reshape(-1, x.shape[-1]).T, gradient.reshape(-1, gradient.shape[-1])
    assert_rounded(of_weight, rows @ columns, np.abs(rows) @ np.abs(columns), mixed)


def test_operands_are_of_8_bits():
    program = of.lower(*drawn("bfloat16")).as_text()
    operands = [line.rpartition(" : ")[2] for line in program.splitlines() if "dot_general" in line]
    assert [line.count("f8E4M3FN>") for line in operands] == [2, 1, 1]
    assert [line.count("f8E5M2>") for line in operands] == [0, 1, 1]


def test_a_token_is_rounded_by_itself_and_so_is_a_column():
    x, weight, gradient = drawn()
    found, *_ = of(x, weight, gradient)
    changed, *_ = of(x.at[3].multiply(1e6), weight.at[:, 5].multiply(1e-6), gradient)
    others = np.ix_(np.arange(len(x)) != 3, np.arange(weight.shape[1]) != 5)
    np.testing.assert_array_equal(np.asarray(changed)[others], np.asarray(found)[others])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_what_is_not_finite_is_not_rounded_away(bad):
    x, weight, gradient = drawn()
    others = [token != 3 for token in range(len(x))]
    found, _, of_weight = of(x.at[3, 4].set(bad), weight, gradient)
    assert np.isfinite(found).all(1).tolist() == others
    assert not np.isfinite(of_weight).all()
    _, of_x, of_weight = of(x, weight, gradient.at[3, 4].set(bad))
    assert np.isfinite(of_x).all(1).tolist() == others
    assert not np.isfinite(of_weight[:, 4]).any()


def test_zeros_stay_zeros():
    x, weight, gradient = drawn()
    found, _, of_weight = of(jnp.zeros_like(x), weight, gradient)
    assert not np.any(found)
    assert not np.any(of_weight)
    assert not np.any(of(x, weight, jnp.zeros_like(gradient))[1])


def test_without_qwix_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix._src.core.dot_general_qt", None)
    with pytest.raises(UsageError) as error:
        layers.in_fp8(*drawn()[:2])
    assert str(error.value) == (
        "model.fp8 = 'current' needs the package qwix, which is not installed: pip install 'gangway[fp8]' on every host, or "
        "set model.fp8 = none"
    )
