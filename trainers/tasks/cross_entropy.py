"""The cross-entropy of each token, from one pass over the logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainers.config import LossConfig
from trainers.models.decoder import Hidden
from trainers.parallel import sequence
from trainers.parallel.mesh import on_each_replica
from trainers.parallel.platform import num_devices

MAX_LOGITS = 1 << 26
"""The logits of one device that are in memory at once: 256 MiB in float32. More are computed in parts."""


class TokenLosses(NamedTuple):
    """float32[B, T] each."""

    losses: jax.Array
    """With label smoothing and the z-loss, as the settings ask."""
    hits: jax.Array
    """1 where no token is likelier than the target."""
    z_losses: jax.Array


def from_logits(logits_BTV: jax.Array, targets_BT: jax.Array, config: LossConfig) -> TokenLosses:
    """Returns the losses of `targets_BT` (int32) under softmax(logits). The z-loss is that of PaLM (Chowdhery et al., 2022,
    section 5): it keeps log Z near 0, and so the logits from drifting. Only reverse mode can differentiate it."""
    # Flat: a CPU computes such arrays 1.1 times faster.
    flat = _of_flat(config, logits_BTV.reshape(-1, logits_BTV.shape[-1]), targets_BT.reshape(-1))
    return TokenLosses(*(each.reshape(targets_BT.shape) for each in flat))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_flat(config: LossConfig, logits_NV: jax.Array, targets_N: jax.Array) -> TokenLosses:
    """Returns the losses, [N] each."""
    return _forward(config, logits_NV, targets_N)[0]


def _forward(config: LossConfig, logits_NV: jax.Array, targets_N: jax.Array) -> tuple[TokenLosses, tuple[jax.Array, ...]]:
    """Returns the losses, and what `_backward` needs."""
    # What log-sum-exp needs of the logits answers for the accuracy too: an argmax would be another pass.
    highest = jnp.max(logits_NV, -1)
    log_z = jax.nn.logsumexp(logits_NV, -1)
    of_target = jnp.take_along_axis(logits_NV, targets_N[:, None], -1)[:, 0]
    losses = log_z - of_target
    if config.label_smoothing:
        uniform = log_z - jnp.mean(logits_NV, -1)
        losses = (1 - config.label_smoothing) * losses + config.label_smoothing * uniform
    z_losses = config.z_loss_weight * log_z**2
    hits = (of_target >= highest).astype(jnp.float32)
    return TokenLosses(losses + z_losses, hits, z_losses), (logits_NV, targets_N, log_z)


def _backward(config: LossConfig, kept: tuple[jax.Array, ...], cotangents: TokenLosses) -> tuple[jax.Array, None]:
    """Returns the gradient of the logits in one pass over them: JAX's own has a scatter into as many zeros as there are logits.
    With smoothing s: softmax - (1 - s) onehot - s / V, and for the z-loss 2 weight log Z softmax."""
    logits_NV, targets_N, log_z = kept
    smoothing, vocab_size = config.label_smoothing, logits_NV.shape[-1]
    of_losses = cotangents.losses
    of_softmax = of_losses + 2 * config.z_loss_weight * log_z * (of_losses + cotangents.z_losses)
    gradient = of_softmax[:, None] * jnp.exp(logits_NV - log_z[:, None])
    is_target = jnp.arange(vocab_size) == targets_N[:, None]
    gradient -= jnp.where(is_target, (1 - smoothing) * of_losses[:, None], 0)
    if smoothing:
        gradient -= smoothing / vocab_size * of_losses[:, None]
    return gradient.astype(logits_NV.dtype), None


_of_flat.defvjp(_forward, _backward)


def from_hidden(hidden: Hidden, targets_BT: jax.Array, config: LossConfig, max_logits: int | None = None) -> TokenLosses:
    """Returns the losses of `targets_BT` under softmax(logits). At most `max_logits` logits of a device are in memory at
    once (default: MAX_LOGITS), and at least those of one position of each row, also in the backward pass, which computes them
    again. With all logits at once the result is the same up to rounding."""

    def part(hidden_BCD: jax.Array, table_DV: jax.Array, targets_BC: jax.Array) -> TokenLosses:
        logits = hidden._replace(table_DV=table_DV).logits(hidden_BCD.reshape(-1, hidden_BCD.shape[-1]))
        return from_logits(logits.reshape(*targets_BC.shape, -1), targets_BC, config)

    num_parts = parts_of(targets_BT.shape, hidden.table_DV.shape[1], max_logits or MAX_LOGITS)
    return over_time(part, hidden.x_BTD, hidden.table_DV, targets_BT, num_parts)


def over_time(part: Callable[..., Any], x_BTD: jax.Array, weights: Any, targets: jax.Array, num_parts: int) -> Any:
    """Returns `part(x_BTD, weights, targets)`, arrays [B, T] in any pytree, in so many parts of the time. `targets` are [B, T,
    ...], and `weights` any pytree. What one part has in memory makes room for the next, forward and backward."""
    if num_parts == 1 and sequence.num_parts() == 1:
        return part(x_BTD, weights, targets)
    with jax.named_scope("unembed"):
        return on_each_replica(partial(_in_parts, part, num_parts), x_BTD, weights, targets)


def _in_parts(part: Callable[..., Any], num_parts: int, x_BTD: jax.Array, weights: Any, targets: jax.Array) -> Any:
    """Returns what `part` gives for the positions, a part of them at a time."""
    time = targets.shape[1]
    length = math.ceil(time / num_parts)

    def split(leaf: jax.Array) -> jax.Array:
        # Along time, so that the rows stay on their devices: [B, T, ...] -> [parts, B, length, ...], filled up with zeros.
        filled = jnp.pad(leaf, [(0, 0), (0, num_parts * length - time)] + [(0, 0)] * (leaf.ndim - 2))
        return jnp.moveaxis(filled.reshape(leaf.shape[0], num_parts, length, *leaf.shape[2:]), 1, 0)

    # In a loop, and checkpointed: the logits of one part make room for those of the next, forward and backward.
    compute = jax.checkpoint(lambda piece: part(piece[0], weights, piece[1]), prevent_cse=False)
    pieces = jax.lax.map(compute, (split(x_BTD), split(targets)))
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1).reshape(-1, num_parts * length)[:, :time], pieces)


def parts_of(shape: tuple[int, ...], vocab_size: int, max_logits: int) -> int:
    """Returns in how many parts the positions of a batch [B, T] are computed."""
    rows, time = shape
    # Devices share the rows, their tokens, or the vocabulary.
    positions = max_logits * num_devices() // (rows * vocab_size)
    return math.ceil(time / max(1, positions))
