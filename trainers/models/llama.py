"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shape suffixes: B batch, T time, D width, H query heads, K key/value heads, G query heads per key/value head, C channels of a head,
F inner width of the MLP, V vocabulary, N = B * T. A leading L: one slice per layer.

The layers are stacked and run in one scan: a program to trace, compile and load after a failure whose size does not grow with depth.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainers.arguments import ModelConfig


class Llama(nnx.Module):
    """`__call__` maps int32 tokens [B, T] to float32 logits [B, T, V].

    Every parameter carries logical axis names; `trainers.mesh.LOGICAL_AXIS_RULES` says where they lie.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32):
        self.config, self.dtype = config, dtype
        layers, width, head_dim = config.num_layers, config.width, config.width // config.num_heads
        # Each layer adds two branches to the residual stream: scaled so that its variance does not grow with depth.
        branch = 1 / math.sqrt(2 * layers)

        def normal(axes: tuple[str, ...], *shape: int, fan_in: int, scale: float = 1.0) -> nnx.Param:
            values = jax.random.normal(rngs.params(), shape, param_dtype) * (scale / math.sqrt(fan_in))
            return nnx.Param(values, logical_axes=axes)

        def ones(axes: tuple[str, ...], *shape: int) -> nnx.Param:
            return nnx.Param(jnp.ones(shape, param_dtype), logical_axes=axes)

        heads, kv_heads, mlp = config.num_heads, config.num_kv_heads, config.mlp_width
        self.embed = normal(("vocab", "embed"), config.vocab_size, width, fan_in=width)
        self.attention_norm = ones(("layers", "embed"), layers, width)
        self.query = normal(("layers", "embed", "heads", "head_dim"), layers, width, heads, head_dim, fan_in=width)
        self.key = normal(("layers", "embed", "kv_heads", "head_dim"), layers, width, kv_heads, head_dim, fan_in=width)
        self.value = normal(("layers", "embed", "kv_heads", "head_dim"), layers, width, kv_heads, head_dim, fan_in=width)
        self.out = normal(("layers", "heads", "head_dim", "embed"), layers, heads, head_dim, width, fan_in=width, scale=branch)
        self.mlp_norm = ones(("layers", "embed"), layers, width)
        self.gate = normal(("layers", "embed", "mlp"), layers, width, mlp, fan_in=width)
        self.up = normal(("layers", "embed", "mlp"), layers, width, mlp, fan_in=width)
        self.down = normal(("layers", "mlp", "embed"), layers, mlp, width, fan_in=mlp, scale=branch)
        self.final_norm = ones(("embed",), width)
        if not config.tie_embeddings:
            self.unembed = normal(("embed", "vocab"), width, config.vocab_size, fan_in=width)

    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array | None = None) -> jax.Array:
        config, (batch, time) = self.config, tokens_BT.shape
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(time), (batch, time))
        angles = rotary_angles(positions_BT, config.width // config.num_heads, config.rope_theta)
        layers = {name: getattr(self, name)[...].astype(self.dtype) for name in LAYER_PARAMETERS}

        def layer(x_ND: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            x_ND = x_ND + attend(rms_norm(x_ND, weights["attention_norm"], config.norm_eps), weights, angles)
            x_ND = x_ND + swiglu(rms_norm(x_ND, weights["mlp_norm"], config.norm_eps), weights)
            return x_ND, None

        # Scaled by sqrt(D): the table is small enough to serve as the output matrix, the stream starts with variance 1.
        embedded = self.embed[...].astype(self.dtype)[tokens_BT] * math.sqrt(config.width)
        # Flat [B * T, D] operands: a CPU multiplies them 1.3 times faster than [B, T, D].
        x_ND, _ = jax.lax.scan(layer, embedded.reshape(batch * time, config.width), layers)
        x_ND = rms_norm(x_ND, self.final_norm[...].astype(self.dtype), config.norm_eps)
        table_DV = self.embed[...].T if config.tie_embeddings else self.unembed[...]
        logits_NV = (x_ND @ table_DV.astype(self.dtype)).astype(jnp.float32)
        return logits_NV.reshape(batch, time, config.vocab_size)


LAYER_PARAMETERS = ("attention_norm", "query", "key", "value", "out", "mlp_norm", "gate", "up", "down")


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale, in float32 (Zhang & Sennrich, 2019)."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale


def attend(x_ND: jax.Array, weights: dict[str, jax.Array], angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Causal grouped-query attention (Ainslie et al., 2023)."""
    (batch, time, _), (width, heads, head_dim) = angles[0].shape, weights["query"].shape

    def project(weight: jax.Array) -> jax.Array:
        return (x_ND @ weight.reshape(width, -1)).reshape(batch, time, weight.shape[1], head_dim)

    query = rotate(project(weights["query"]), angles)
    key = rotate(project(weights["key"]), angles)
    out_BTHC = jax.nn.dot_product_attention(query, key, project(weights["value"]), is_causal=True)
    return out_BTHC.reshape(batch * time, heads * head_dim) @ weights["out"].reshape(heads * head_dim, width)


def swiglu(x_ND: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """(silu(x gate) * (x up)) down (Shazeer, 2020)."""
    return (jax.nn.silu(x_ND @ weights["gate"]) * (x_ND @ weights["up"])) @ weights["down"]


def rotary_angles(positions_BT: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, T, C/2] of position * theta^(-2i/C) (Su et al., 2021, eq. 15)."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTHC: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns channel i and i + C/2 of each head by the position's angle i."""
    cos, sin = (part[:, :, None, :] for part in angles)
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BTHC.dtype)
