"""The families of decoders, and of encoders of images: what sets the structure of one apart from that of another. Free of JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol


@dataclass(frozen=True, kw_only=True)
class Family:
    """The structure of a family's models. The defaults are those of Llama; sizes and other numbers are settings of `model`."""

    norm: Literal["rms", "layer"] = "rms"
    """`layer`: LayerNorm, with a bias (Ba et al., 2016)."""
    norm_offset: bool = False
    """The scale of a norm is 1 + weight, applied in float32."""
    post_norms: bool = False
    """A norm also after the attention and after the MLP, before their sums with the residual stream."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias."""
    bias: bool = False
    """So have the attention's output and the MLP."""
    qk_norm: bool = False
    """A norm over the channels of each head of queries and keys, before their rotation."""
    activation: Literal["silu", "gelu", "exact_gelu"] = "silu"
    """`gelu`: the approximation by tanh (Hendrycks & Gimpel, 2016)."""
    gated: bool = True
    """The MLP multiplies its activations by a second projection (Shazeer, 2020)."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(width)."""
    positions: Literal["rotary", "learned"] = "rotary"
    experts: bool = False
    """In place of the MLP: many MLPs, of which a router chooses a few for each token (Shazeer et al., 2017)."""


GEMMA = {"norm_offset": True, "post_norms": True, "activation": "gelu", "scaled_embedding": True}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(),
        "mistral": Family(),
        "qwen2": Family(qkv_bias=True),
        "qwen3": Family(qk_norm=True),
        "gemma2": Family(**GEMMA),  # type: ignore[arg-type]  # mypy takes the values for one type
        "gemma3": Family(**GEMMA, qk_norm=True),  # type: ignore[arg-type]
        "gpt2": Family(norm="layer", qkv_bias=True, bias=True, activation="gelu", gated=False, positions="learned"),
        "mixtral": Family(experts=True),
        "qwen3_moe": Family(qk_norm=True, experts=True),
    }
)
"""By the name of `model.family`."""

ENCODER = {"norm": "layer", "qkv_bias": True, "bias": True, "gated": False, "positions": "learned"}

ENCODERS: Mapping[str, Family] = MappingProxyType(
    {
        "vit": Family(**ENCODER, activation="exact_gelu"),  # type: ignore[arg-type]
        "siglip": Family(**ENCODER, activation="gelu"),  # type: ignore[arg-type]
    }
)
"""By the name of `vision.family`."""


class LayerSizes(Protocol):
    """What the layers of a decoder (`ModelConfig`) and of an encoder (`VisionConfig`) are made by."""

    @property
    def structure(self) -> Family: ...
    @property
    def width(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def mlp_width(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def num_experts(self) -> int | None: ...
