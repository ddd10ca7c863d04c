"""An encoder of images: ViT (Dosovitskiy et al., 2020) and the one of SigLIP (Zhai et al., 2023).

Shape suffixes as in `trainers.models.decoder`; T are the tokens of an image: its patches row by row, after the class token if
there is one. Images are [B, height, width, colours], P is the side of a patch.

The layers are those of the decoder, without order: every token attends to all. The leaves that are no layers have the shapes of
the files of `transformers`, so that nothing is turned on the way.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gangway.errors import UsageError
from trainers.config.vision import VisionConfig
from trainers.models import lora, remat
from trainers.models.attention import dot_product
from trainers.models.decoder import TABLE_SCALE, Weights, activation, heads_of, layer_norm, mlp, norm, project
from trainers.models.layers import Layers, parameter
from trainers.parallel.mesh import by_rows
from trainers.parallel.platform import platform


class Encoder(nnx.Module):
    """An encoder of images. `__call__` maps float images [B, height, width, colours] to float32 logits [B, labels] of a model
    with a head for classes, or else to what `hidden` returns."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32):
        self.config, self.dtype = config, dtype
        width, patch = config.width, config.patch_size
        inputs = config.num_channels * patch**2
        shape = (width, config.num_channels, patch, patch)
        self.patch = parameter(rngs, ("embed", None, None, None), shape, inputs**-0.5, param_dtype)
        self.patch_bias = nnx.Param(jnp.zeros(width, param_dtype), logical_axes=("embed",))
        positions: tuple[int, ...] = (config.num_tokens, width)
        if config.family == "vit":
            self.class_token = parameter(rngs, (None, None, "embed"), (1, 1, width), TABLE_SCALE, param_dtype)
            positions = (1, *positions)
        axes = (*(None,) * (len(positions) - 1), "embed")
        # Beside patches of about 1: smaller ones would be learnt late.
        self.positions = parameter(rngs, axes, positions, width**-0.5, param_dtype)
        self.layers = Layers(config, rngs=rngs, param_dtype=param_dtype)
        self.final_norm = nnx.Param(jnp.ones(width, param_dtype), logical_axes=("embed",))
        self.final_norm_bias = nnx.Param(jnp.zeros(width, param_dtype), logical_axes=("embed",))
        if config.num_labels is not None:
            self.head = parameter(rngs, ("embed", None), (width, config.num_labels), TABLE_SCALE, param_dtype)
            self.head_bias = nnx.Param(jnp.zeros(config.num_labels, param_dtype), logical_axes=(None,))
        if config.attention_pooling:
            self.pooling = AttentionPooling(config, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, images_BHWC: jax.Array) -> jax.Array:
        hidden_BTD = self.hidden(images_BHWC)
        return hidden_BTD if self.config.num_labels is None else self.logits(hidden_BTD)

    def hidden(self, images_BHWC: jax.Array) -> jax.Array:
        """Returns the states of the last layer, after the norm, [B, T, D]."""
        config, batch = self.config, len(images_BHWC)

        def layer(x_ND: jax.Array, weights: Weights) -> tuple[jax.Array, None]:
            with jax.named_scope("attention"):
                heads = heads_of(config, norm(config, x_ND, weights, "attention_norm"), weights, batch, None)
                mixed_ND = dot_product(*heads).reshape(x_ND.shape)
                x_ND += project(mixed_ND, weights, "out")
            with jax.named_scope("mlp"):
                return by_rows(x_ND + mlp(config, norm(config, x_ND, weights, "mlp_norm"), weights)), None

        x_ND = by_rows(self._embedded(images_BHWC).reshape(-1, config.width))
        with jax.named_scope("layers"):
            weights = {name: weight.astype(self.dtype) for name, weight in lora.scaled(self.layers).items()}
            body = remat.wrap(layer, config.remat, in_loop=True)
            unroll = config.unrolled(platform())
            x_ND, _ = jax.lax.scan(body, x_ND, weights | lora.noise(self.layers), unroll=unroll)
        with jax.named_scope("final_norm"):
            x_ND = layer_norm(x_ND, self.final_norm[...], self.final_norm_bias[...], config.norm_eps)
        return x_ND.reshape(batch, -1, config.width)

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """Returns the float32 logits [B, labels], from the class token."""
        with jax.named_scope("head"):
            scores = hidden_BTD[:, 0] @ self.head[...].astype(self.dtype) + self.head_bias[...].astype(self.dtype)
            return scores.astype(jnp.float32)

    def pooled(self, hidden_BTD: jax.Array) -> jax.Array:
        """Returns one vector of each image, [B, D]; of a model with `attention_pooling`."""
        with jax.named_scope("pooling"):
            return self.pooling(hidden_BTD, self.dtype)

    def _embedded(self, images_BHWC: jax.Array) -> jax.Array:
        config = self.config
        expected = (config.image_size, config.image_size, config.num_channels)
        if images_BHWC.shape[1:] != expected:
            raise ValueError(f"images of {list(images_BHWC.shape[1:])}: expected {list(expected)} by the section vision")
        with jax.named_scope("embed"):
            matrix = self.patch[...].astype(self.dtype).reshape(config.width, -1).T
            x_BTD = patches(images_BHWC.astype(self.dtype), config.patch_size) @ matrix + self.patch_bias[...].astype(self.dtype)
            if config.family == "vit":
                first = jnp.broadcast_to(self.class_token[...].astype(self.dtype), (len(x_BTD), 1, config.width))
                x_BTD = jnp.concatenate([first, x_BTD], 1)
            return x_BTD + self.positions[...].astype(self.dtype)


class AttentionPooling(nnx.Module):
    """One vector of all tokens: a learned query attends to them, and an MLP follows. The matrices are [in, out]."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, param_dtype: Any):
        self.config = config
        width, embed, mlp_axis = config.width, ("embed", config.width), ("mlp", config.mlp_width)

        def linear(name: str, rows: tuple[str, int], columns: tuple[str | None, int]) -> None:
            axes, shape = (rows[0], columns[0]), (rows[1], columns[1])
            setattr(self, name, parameter(rngs, axes, shape, rows[1] ** -0.5, param_dtype))
            setattr(self, f"{name}_bias", nnx.Param(jnp.zeros(columns[1], param_dtype), logical_axes=(columns[0],)))

        self.probe = parameter(rngs, (None, None, "embed"), (1, 1, width), TABLE_SCALE, param_dtype)
        linear("query_key_value", embed, (None, 3 * width))
        linear("out", embed, (None, width))
        self.norm = nnx.Param(jnp.ones(width, param_dtype), logical_axes=("embed",))
        self.norm_bias = nnx.Param(jnp.zeros(width, param_dtype), logical_axes=("embed",))
        linear("up", embed, mlp_axis)
        linear("down", mlp_axis, embed)

    def __call__(self, x_BTD: jax.Array, dtype: Any) -> jax.Array:
        config, batch = self.config, len(x_BTD)
        weights = {name: value[...].astype(dtype) for name, value in vars(self).items() if isinstance(value, nnx.Param)}
        names = ("query", "key", "value")
        for suffix in ("", "_bias"):
            thirds = jnp.split(weights[f"query_key_value{suffix}"], 3, -1)
            weights |= {name + suffix: third for name, third in zip(names, thirds, strict=True)}

        def heads(x: jax.Array, name: str) -> jax.Array:
            return project(x, weights, name).reshape(batch, -1, config.num_heads, config.channels)

        query = heads(jnp.broadcast_to(weights["probe"], (batch, 1, config.width)), "query")
        mixed = dot_product(query, heads(x_BTD, "key"), heads(x_BTD, "value"))
        pooled_BD = project(mixed.reshape(batch, config.width), weights, "out")
        normed_BD = norm(config, pooled_BD, weights, "norm")
        return pooled_BD + project(activation(config)(project(normed_BD, weights, "up")), weights, "down")


def patches(images_BHWC: jax.Array, side: int) -> jax.Array:
    """Returns [B, patches, colours * side * side]: the patches row by row, each colour by colour."""
    batch, height, width, colours = images_BHWC.shape
    split = images_BHWC.reshape(batch, height // side, side, width // side, side, colours)
    return split.transpose(0, 1, 3, 5, 2, 4).reshape(batch, -1, colours * side**2)


def classifier(config: VisionConfig | None) -> VisionConfig:
    """Returns the section of an encoder that scores classes. Raises UsageError if it is none."""
    if config is None:
        raise UsageError("vision = null: the task classifies images by an encoder; set vision, such as vision: {num_labels: 10}")
    if config.num_labels is None:
        raise UsageError("vision.num_labels = null: the task needs family vit, and the number of its classes; set both")
    return config
