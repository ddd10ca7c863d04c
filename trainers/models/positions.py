"""Positions of tokens: rotary ones, which turn the channels of queries and keys."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from trainers.config.model import RopeScaling

Angles = tuple[jax.Array, jax.Array]
"""cos and sin, [B, T, C/2] each."""


def rotary_angles(positions_BT: jax.Array, channels: int, theta: float, scaling: RopeScaling | None = None) -> Angles:
    """Returns cos and sin [B, T, C/2] of position * theta^(-2i/C) (Su et al., 2021, eq. 15)."""
    # [C/2]; in float32, for the angles of late positions need its precision.
    frequencies = theta ** (-jnp.arange(0, channels, 2, dtype=jnp.float32) / channels)
    if scaling is not None:
        frequencies = scaled(frequencies, scaling, theta)
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies
    factor = attention_factor(scaling)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def scaled(frequencies: jax.Array, scaling: RopeScaling, theta: float) -> jax.Array:
    """Returns the frequencies for longer texts (`model.rope_scaling`), [C/2]."""
    slow = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "yarn":
        share = changed_over(len(frequencies), scaling, theta)
        return share * slow + (1 - share) * frequencies
    turns = scaling.original_length * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0: turns seldom, and is slowed down; 1: turns often, and stays.
    share = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - share) * slow + share * frequencies


def changed_over(pairs: int, scaling: RopeScaling, theta: float) -> jax.Array:
    """Returns how far each pair of channels is slowed down by YaRN, from 0 to 1 (Peng et al., 2023, section 3.2)."""

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(scaling.original_length / (times * 2 * math.pi)) / math.log(theta)

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    return jnp.clip((jnp.arange(pairs, dtype=jnp.float32) - first) / ((last - first) or 0.001), 0.0, 1.0)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Returns what queries and keys are multiplied by: 1, but for YaRN."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.attention_factor is None else scaling.attention_factor


def rotate(x_BTHC: jax.Array, angles: Angles) -> jax.Array:
    """Rotates channels i and i + C/2 of each head by the position's angle i."""
    # [B, T, 1, C/2]: the same angles for all heads.
    cos, sin = (part[:, :, None, :] for part in angles)
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BTHC.dtype)
