"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shape suffixes: B batch, T time (of queries), S time (of keys), D width, K key/value heads, G query heads for each of them, C
channels of a head, N = B * T, V vocabulary. A leading L: one slice for each layer.

The layers are stacked and run in one scan: a program to trace, compile and load after a failure whose size does not grow with
depth.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainers.config import ModelConfig
from trainers.models import remat

Cache = dict[str, jax.Array]
"""`key` and `value` of the tokens so far: [L, B, S, H, C], with S slots of one token each."""

TABLE_SCALE = 0.02
"""The standard deviation of the embedding's initial values. It is small beside what the layers add: otherwise a table that also
scores the next token would begin by expecting every token to repeat itself."""


class Llama(nnx.Module):
    """A Llama decoder. `__call__` maps int32 tokens [B, T] to float32 logits [B, T, V].

    Every parameter has logical axis names; `trainers.parallel.mesh.LOGICAL_AXIS_RULES` maps them to mesh axes. The channels of
    all heads are one dimension, so that each weight of a layer is a matrix.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32):
        self.config, self.dtype = config, dtype
        shape = (config.vocab_size, config.width)
        self.embed = parameter(rngs, ("vocab", "embed"), shape, TABLE_SCALE, param_dtype)
        self.layers = Layers(config, rngs=rngs, param_dtype=param_dtype)
        self.final_norm = nnx.Param(jnp.ones(config.width, param_dtype), logical_axes=("embed",))
        if not config.tie_embeddings:
            self.unembed = parameter(rngs, ("embed", "vocab"), shape[::-1], TABLE_SCALE, param_dtype)

    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array | None = None) -> jax.Array:
        x_BTD, table_DV = self.hidden_and_table(tokens_BT, positions_BT)
        return self._logits(x_BTD.reshape(-1, self.config.width), table_DV).reshape(*tokens_BT.shape, -1)

    def hidden_and_table(self, tokens_BT: jax.Array, positions_BT: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns (x [B, T, D], table [D, V]): the logits are x @ table, which a loss may compute in parts."""
        config, (batch, time) = self.config, tokens_BT.shape
        if positions_BT is None:
            # [1, T]: the same positions for every row.
            positions_BT = jnp.arange(time)[None]
        angles = rotary_angles(positions_BT, config.width // config.num_heads, config.rope_theta)

        def layer(x_ND: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            with jax.named_scope("attention"):
                normed_ND = rms_norm(x_ND, weights["attention_norm"], config.norm_eps)
                query, key, value = heads_of(config, normed_ND, weights, batch, angles)
                mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
                # mixed: [B, T, H, C] -> [N, D].
                x_ND = x_ND + mixed.reshape(x_ND.shape) @ weights["out"]
            return mlp(config, x_ND, weights), None

        with jax.named_scope("layers"):
            unroll = config.unrolled(jax.default_backend())
            body = remat.wrap(layer, config.remat, in_loop=True)
            x_ND, _ = jax.lax.scan(body, self._embedded(tokens_BT), self._layer_weights(), unroll=unroll)
        return self._final_normed(x_ND).reshape(batch, time, config.width), self._table()

    def init_cache(self, batch: int, length: int) -> Cache:
        """Returns an empty cache for `decode_step`, for the keys and values of `length` tokens: [L, B, S, H, C] each."""
        config = self.config
        shape = (config.num_layers, batch, length, config.num_kv_heads, config.width // config.num_heads)
        return {name: jnp.zeros(shape, self.dtype) for name in ("key", "value")}

    def decode_step(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, mask_BTS: jax.Array, cache: Cache, slot: jax.Array | int
    ) -> tuple[jax.Array, Cache]:
        """Returns (float32 logits [B, V] for the token after the last of the T tokens, the cache with these tokens).

        The keys and values of the tokens go to the slots from `slot` on. `mask_BTS` is true where token t attends to slot s,
        including its own.
        """
        config, batch = self.config, tokens_BT.shape[0]
        angles = rotary_angles(positions_BT, config.width // config.num_heads, config.rope_theta)

        def layer(x_ND: jax.Array, weights_and_cache: tuple[dict[str, jax.Array], Cache]) -> tuple[jax.Array, Cache]:
            weights, cache = weights_and_cache
            normed_ND = rms_norm(x_ND, weights["attention_norm"], config.norm_eps)
            query, key, value = heads_of(config, normed_ND, weights, batch, angles)
            new = {"key": key, "value": value}
            # old: [B, S, H, C], so the slots are dimension 1.
            cache = {name: jax.lax.dynamic_update_slice_in_dim(old, new[name], slot, 1) for name, old in cache.items()}
            # The mask is the same for all heads: [B, 1, T, S].
            mixed = jax.nn.dot_product_attention(query, cache["key"], cache["value"], mask=mask_BTS[:, None])
            return mlp(config, x_ND + mixed.reshape(x_ND.shape) @ weights["out"], weights), cache

        # Never unrolled: previews are rare, and training waits while this program is compiled.
        x_ND, cache = jax.lax.scan(layer, self._embedded(tokens_BT), (self._layer_weights(), cache))
        # Of the last token alone: logits of a whole prompt would be [B, T, V], for nothing.
        return self._logits(self._final_normed(x_ND.reshape(batch, -1, config.width)[:, -1]), self._table()), cache

    def _layer_weights(self) -> dict[str, jax.Array]:
        return jax.tree.map(lambda weight: weight.astype(self.dtype), nnx.to_pure_dict(nnx.state(self.layers)))

    def _embedded(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the embeddings as [B * T, D]: a CPU multiplies such operands 1.3 times faster than [B, T, D]."""
        with jax.named_scope("embed"):
            return self.embed[...].astype(self.dtype)[tokens_BT].reshape(tokens_BT.size, self.config.width)

    def _final_normed(self, x_ND: jax.Array) -> jax.Array:
        with jax.named_scope("final_norm"):
            return rms_norm(x_ND, self.final_norm[...].astype(self.dtype), self.config.norm_eps)

    def _table(self) -> jax.Array:
        table_DV = self.embed[...].T if self.config.tie_embeddings else self.unembed[...]
        return table_DV.astype(self.dtype)

    def _logits(self, x_ND: jax.Array, table_DV: jax.Array) -> jax.Array:
        with jax.named_scope("unembed"):
            return (x_ND @ table_DV).astype(jnp.float32)


class Layers(nnx.Module):
    """The parameters of all layers, each [L, ...]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, param_dtype: Any):
        layers, width = config.num_layers, config.width
        kv_width = width // config.num_heads * config.num_kv_heads
        # Each layer adds two branches to the residual stream: scaled so that its variance does not grow with depth.
        branch = 1 / math.sqrt(2 * layers)

        def matrix(rows: tuple[str, int], columns: tuple[str, int], scale: float = 1.0) -> nnx.Param:
            (row_axis, num_rows), (column_axis, num_columns) = rows, columns
            shape, axes = (layers, num_rows, num_columns), ("layers", row_axis, column_axis)
            return parameter(rngs, axes, shape, scale / math.sqrt(num_rows), param_dtype)

        def norm() -> nnx.Param:
            return nnx.Param(jnp.ones((layers, width), param_dtype), logical_axes=("layers", "embed"))

        embed, heads, kv_heads, mlp = ("embed", width), ("heads", width), ("kv_heads", kv_width), ("mlp", config.mlp_width)
        self.attention_norm = norm()
        self.query = matrix(embed, heads)
        self.key = matrix(embed, kv_heads)
        self.value = matrix(embed, kv_heads)
        self.out = matrix(heads, embed, scale=branch)
        self.mlp_norm = norm()
        self.gate = matrix(embed, mlp)
        self.up = matrix(embed, mlp)
        self.down = matrix(mlp, embed, scale=branch)


def parameter(rngs: nnx.Rngs, axes: tuple[str, ...], shape: tuple[int, ...], scale: float, dtype: Any) -> nnx.Param:
    # Drawn in float32 and then cast: the same start for every type of the parameters.
    return nnx.Param((jax.random.normal(rngs.params(), shape) * scale).astype(dtype), logical_axes=axes)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale, in float32 (Zhang & Sennrich, 2019)."""
    # A mean of squares in bfloat16 would lose most of its digits.
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale


def heads_of(
    config: ModelConfig, x_ND: jax.Array, weights: dict[str, jax.Array], batch: int, angles: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query [B, T, heads, C], key and value [B, T, kv_heads, C], turned to their places, of grouped-query attention (Ainslie et
    al., 2023)."""
    channels = config.width // config.num_heads

    def project(name: str) -> jax.Array:
        return (x_ND @ weights[name]).reshape(batch, -1, weights[name].shape[1] // channels, channels)

    return rotate(project("query"), angles), rotate(project("key"), angles), project("value")


def mlp(config: ModelConfig, x_ND: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    with jax.named_scope("mlp"):
        return x_ND + swiglu(rms_norm(x_ND, weights["mlp_norm"], config.norm_eps), weights)


def swiglu(x_ND: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """Returns (silu(x gate) * (x up)) down (Shazeer, 2020)."""
    return (jax.nn.silu(x_ND @ weights["gate"]) * (x_ND @ weights["up"])) @ weights["down"]


def rotary_angles(positions_BT: jax.Array, channels: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin [B, T, C/2] of position * theta^(-2i/C) (Su et al., 2021, eq. 15)."""
    # [C/2]; in float32, for the angles of late positions need its precision.
    frequencies = theta ** (-jnp.arange(0, channels, 2, dtype=jnp.float32) / channels)
    angles = positions_BT[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTHC: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates channels i and i + C/2 of each head by the position's angle i."""
    # [B, T, 1, C/2]: the same angles for all heads.
    cos, sin = (part[:, :, None, :] for part in angles)
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BTHC.dtype)
