"""A mixture of experts: a router sends each token to a few of many MLPs, and adds up what they return. No token is dropped.

Shape suffixes: N tokens, D width, E experts, K experts of one token, M = N * K places, sorted by expert or in the order of the
tokens.

Nothing here is added into an array by index (`scatter-add`): GPUs do that in no fixed order, and a run would not be repeatable
bit for bit. Tokens are permuted, in the backward pass by the inverse permutation, and summed over K.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from trainers.config import LossConfig, ModelConfig
from trainers.config.arguments import load_object
from trainers.config.mesh import CONTEXT, TENSOR
from trainers.parallel.mesh import dividing, in_stage, traced_for

Weights = dict[str, jax.Array]
Activation = Callable[[jax.Array], jax.Array]

EXPERT = "expert"
WITH_TIME = 3
"""The dimensions of tokens [B, T, D]."""


class RouterSums(NamedTuple):
    """What a router has done with the tokens that count: float32 sums over them, each token by its weight. A leading dimension is
    over the layers."""

    tokens_E: jax.Array
    """The tokens that went to each expert."""
    probabilities_E: jax.Array
    log_z_squared: jax.Array
    """Of log Z, the logarithm of the sum of exp(logits)."""
    weight: jax.Array


def mixture(
    config: ModelConfig, x_ND: jax.Array, weights: Weights, counted_N: jax.Array | None, activation: Activation
) -> tuple[jax.Array, RouterSums | None]:
    """Returns (the sum of what the experts of each token return, by their shares; the router's sums over tokens with the weights
    `counted_N`, None if that is None). Where several devices share a sequence, N is two dimensions, B and T. `weights` has
    `router` [D, E], `expert_gate` and `expert_up` [E, D, F], and `expert_down` [E, F, D]."""
    mesh = traced_for()
    own = {name: weights[name] for name in ("router", "expert_gate", "expert_up", "expert_down")}
    if mesh is None:
        return _of_devices(config, activation, (), (), x_ND, own, counted_N)
    # By hand: the compiler would gather all tokens on each device to sort them.
    split = dividing(mesh, x_ND.shape[0]) or ()
    of_tokens: tuple[Any, ...] = (split or None,)
    if x_ND.ndim == WITH_TIME:
        split, of_tokens = (*split, CONTEXT), (*of_tokens, CONTEXT)
    inner = TENSOR if config.mlp_width % mesh.shape[TENSOR] == 0 else None
    # Each device has a part of these sums: some columns of the inner width, or some experts of tokens that are not divided.
    summed = tuple(axis for axis, is_part in ((TENSOR, inner is not None), (EXPERT, EXPERT not in split)) if is_part)
    rows, columns = PartitionSpec(*of_tokens), PartitionSpec(EXPERT, None, inner)
    specs = {"router": PartitionSpec(), "expert_gate": columns, "expert_up": columns}
    run = jax.shard_map(
        partial(_of_devices, config, activation, split, summed),
        mesh=mesh,
        in_specs=(rows, specs | {"expert_down": PartitionSpec(EXPERT, inner, None)}, rows),
        out_specs=(rows, PartitionSpec()),
        # `vmap` over stages does not keep the types of what differs between devices.
        check_vma=not in_stage(),
    )
    return run(x_ND, own, counted_N)


def _of_devices(
    config: ModelConfig,
    activation: Activation,
    split: tuple[str, ...],
    summed: tuple[str, ...],
    x_ND: jax.Array,
    weights: Weights,
    counted_N: jax.Array | None,
) -> tuple[jax.Array, RouterSums | None]:
    """Computes what one device does. `split`: the axes of the mesh over which the tokens are divided; `summed`: those over which
    what the experts return is to be summed. Without a mesh both are empty."""
    shape = x_ND.shape
    if x_ND.ndim == WITH_TIME:
        x_ND, counted_N = x_ND.reshape(-1, shape[-1]), None if counted_N is None else counted_N.reshape(-1)
    index_NK, share_NK, sums = route(config, x_ND, weights["router"], counted_N)
    if split and sums is not None:
        sums = jax.tree.map(lambda each: jax.lax.psum(each, split), sums)
    tokens, num_here = (x_ND, index_NK, share_NK), weights["expert_up"].shape[0]
    # With some of the experts, a device needs the tokens of all devices along the axis.
    is_part, first = num_here < (config.num_experts or 0), None
    if is_part:
        first = jax.lax.axis_index(EXPERT) * num_here
    if is_part:
        tokens = jax.tree.map(_gathered if EXPERT in split else _whole, tokens)
    mixed_ND = apply(config, activation, *tokens, weights, first)
    if is_part and EXPERT in split:
        mixed_ND = jax.lax.psum_scatter(mixed_ND, EXPERT, tiled=True)
    return (jax.lax.psum(mixed_ND, summed) if summed else mixed_ND).reshape(shape), sums


def _gathered(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, EXPERT, tiled=True)


def _whole(x: jax.Array) -> jax.Array:
    # The same on each device. Said of it, for else its gradient would be that of one device's experts alone.
    return jax.lax.pcast(x, EXPERT, to="varying")


def route(
    config: ModelConfig, x_ND: jax.Array, router_DE: jax.Array, counted_N: jax.Array | None
) -> tuple[jax.Array, jax.Array, RouterSums | None]:
    """Returns (int32[N, K] the likeliest experts of each token, float32[N, K] their shares, the sums). In float32: rounding would
    choose other experts."""
    logits_NE = jnp.dot(x_ND.astype(jnp.float32), router_DE.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    p_NE = jax.nn.softmax(logits_NE)
    _, index_NK = jax.lax.top_k(jax.lax.stop_gradient(p_NE), config.experts_per_token or 0)
    chosen_NKE = index_NK[..., None] == jnp.arange(config.num_experts)
    # A sum and no look-up, whose gradient would be a scatter-add.
    share_NK = jnp.sum(jnp.where(chosen_NKE, p_NE[:, None], 0.0), -1)
    if config.normalize_routing:
        share_NK /= jnp.sum(share_NK, -1, keepdims=True)
    if counted_N is None:
        return index_NK, share_NK, None
    log_z_N = jax.nn.logsumexp(logits_NE, -1)
    sums = RouterSums(
        jnp.sum(jnp.where(chosen_NKE, counted_N[:, None, None], 0.0), (0, 1)),
        # Not by a product alone: what a row of filling holds may be NaN.
        jnp.sum(jnp.where(counted_N[:, None] > 0, counted_N[:, None] * p_NE, 0.0), 0),
        jnp.sum(jnp.where(counted_N > 0, counted_N * log_z_N**2, 0.0)),
        jnp.sum(counted_N),
    )
    return index_NK, share_NK, sums


def apply(
    config: ModelConfig,
    activation: Activation,
    x_ND: jax.Array,
    index_NK: jax.Array,
    share_NK: jax.Array,
    weights: Weights,
    first: jax.Array | None,
) -> jax.Array:
    """Returns the sum over each token's experts, [N, D]. `first`: the number of the first expert that `weights` has, of which
    other experts count for nothing; None: they have all."""
    (num_tokens, width), num_here = x_ND.shape, weights["expert_up"].shape[0]
    expert_M = index_NK.reshape(-1)
    if first is not None:
        # Those of other devices at the end, beyond the places of the products.
        expert_M = jnp.where((expert_M >= first) & (expert_M < first + num_here), expert_M - first, num_here)
    order_M = jnp.argsort(expert_M, stable=True)
    inverse_M = jnp.argsort(order_M)
    sizes_E = jnp.sum(expert_M[:, None] == jnp.arange(num_here), 0, dtype=jnp.int32)
    here_M1 = None if first is None else (jnp.arange(expert_M.size) < jnp.sum(sizes_E))[:, None]

    def only_here(rows_MD: jax.Array) -> jax.Array:
        # A product may leave anything in the places beyond its groups; so may its gradient.
        return rows_MD if here_M1 is None else jnp.where(here_M1, rows_MD, 0)

    product = grouped_product(config)
    rows_MD = only_here(_sorted(x_ND, order_M, inverse_M))
    up_MF = product(rows_MD, weights["expert_up"], sizes_E)
    inner_MF = activation(product(rows_MD, weights["expert_gate"], sizes_E)) * up_MF
    sorted_MD = only_here(product(inner_MF, weights["expert_down"], sizes_E))
    mixed_NKD = _unsorted(sorted_MD, order_M, inverse_M).reshape(num_tokens, -1, width)
    return jnp.sum(mixed_NKD.astype(jnp.float32) * share_NK[..., None], 1).astype(x_ND.dtype)


def grouped_product(config: ModelConfig) -> Callable[..., jax.Array]:
    """Returns the function (rows [m, k], matrices [E, k, n], rows of each matrix [E]) -> [m, n]. Raises ValueError if there is
    none of that name."""
    return jax.lax.ragged_dot if config.grouped_product == "xla" else load_object(config.grouped_product)


@jax.custom_vjp
def _sorted(x_ND: jax.Array, order_M: jax.Array, inverse_M: jax.Array) -> jax.Array:
    """Returns each token K times, sorted by expert: [M, D]."""
    return x_ND[order_M // (order_M.size // x_ND.shape[0])]


def _sorted_forward(x_ND: jax.Array, order_M: jax.Array, inverse_M: jax.Array) -> tuple[jax.Array, Any]:
    return _sorted(x_ND, order_M, inverse_M), (inverse_M, x_ND.shape[0])


def _sorted_backward(kept: Any, gradient_MD: jax.Array) -> tuple[jax.Array, None, None]:
    inverse_M, num_tokens = kept
    by_token = gradient_MD[inverse_M].reshape(num_tokens, -1, gradient_MD.shape[-1])
    return jnp.sum(by_token, 1, dtype=jnp.float32).astype(gradient_MD.dtype), None, None


_sorted.defvjp(_sorted_forward, _sorted_backward)


@jax.custom_vjp
def _unsorted(sorted_MD: jax.Array, order_M: jax.Array, inverse_M: jax.Array) -> jax.Array:
    """Returns the rows in the order of the tokens."""
    return sorted_MD[inverse_M]


def _unsorted_forward(sorted_MD: jax.Array, order_M: jax.Array, inverse_M: jax.Array) -> tuple[jax.Array, Any]:
    return sorted_MD[inverse_M], order_M


def _unsorted_backward(order_M: Any, gradient_MD: jax.Array) -> tuple[jax.Array, None, None]:
    return gradient_MD[order_M], None, None


_unsorted.defvjp(_unsorted_forward, _unsorted_backward)


class RouterLosses(NamedTuple):
    """What routers add to the loss of each target, and how even the load of their experts is."""

    losses: dict[str, jax.Array]
    """By name, with their weights; only those that have one."""
    load: dict[str, jax.Array]


def router_losses(sums: RouterSums, config: LossConfig) -> RouterLosses:
    """Returns them from the sums of all layers."""
    weights = {"load_balancing_loss": config.load_balancing_weight, "router_z_loss": config.router_z_loss_weight}
    functions = {"load_balancing_loss": load_balancing_loss, "router_z_loss": router_z_loss}
    return RouterLosses({name: weight * functions[name](sums) for name, weight in weights.items() if weight}, load(sums))


def load_balancing_loss(sums: RouterSums) -> jax.Array:
    """Returns E sum(f p), where f is the part of the tokens that an expert gets, and p its mean probability, over all layers:
    K where the load is even (Fedus et al., 2021, equations 4 - 6)."""
    weight = _at_least_something(jnp.sum(sums.weight))
    f_E, p_E = jnp.sum(sums.tokens_E, 0) / weight, jnp.sum(sums.probabilities_E, 0) / weight
    return f_E.size * jnp.sum(jax.lax.stop_gradient(f_E) * p_E)


def router_z_loss(sums: RouterSums) -> jax.Array:
    """Returns the mean of log^2 Z over tokens and layers (Zoph et al., 2022, equation 5)."""
    return jnp.sum(sums.log_z_squared) / _at_least_something(jnp.sum(sums.weight))


def load(sums: RouterSums) -> dict[str, jax.Array]:
    """Returns how even the load is: `busiest_expert`, the largest part of one layer's tokens that one expert gets of what all get
    (1 / E: even; 1: one expert gets all), and `router_entropy`, the entropy of the load by that of an even one, the mean over the
    layers (1: even; 0: one expert gets all)."""
    total = jnp.sum(sums.tokens_E, -1, keepdims=True)
    load_LE = sums.tokens_E / _at_least_something(total)
    entropy_L = -jnp.sum(jax.scipy.special.xlogy(load_LE, load_LE), -1) / jnp.log(max(load_LE.shape[-1], 2))
    values = {"busiest_expert": jnp.max(load_LE), "router_entropy": jnp.mean(entropy_L)}
    return jax.tree.map(jax.lax.stop_gradient, values)


def _at_least_something(weight: jax.Array) -> jax.Array:
    # A batch of filling alone has the loss 0, and no NaN.
    return jnp.where(weight > 0, weight, 1.0)
