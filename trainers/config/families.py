"""The families of decoders, and of encoders of images: what sets the structure of one apart from that of another. Free of JAX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ROTARY = frozenset({"num_kv_heads", "head_dim", "rope_theta", "rope_scaling"})
OPTIONAL = (
    *("num_kv_heads", "head_dim", "rope_theta", "rope_scaling", "local_rope_theta", "num_positions", "window", "global_every"),
    *("query_scalar", "attention_softcap", "logit_softcap", "num_experts", "experts_per_token", "normalize_routing"),
    *("attention_bias", "mlp_bias", "embedding_multiplier", "residual_multiplier", "logit_divisor", "unturned_every"),
)
"""The keys of `model` that not every family has."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The structure of a family's models. The defaults are those of Llama; sizes and other numbers are settings of `model`."""

    norm: Literal["rms", "layer"] = "rms"
    """`layer`: LayerNorm, with a bias (Ba et al., 2016)."""
    norm_offset: bool = False
    """The scale of a norm is 1 + weight, applied in float32."""
    pre_norms: bool = True
    """A norm before the attention and before the MLP."""
    post_norms: bool = False
    """A norm also after the attention and after the MLP, before their sums with the residual stream."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias."""
    bias: bool = False
    """So have the attention's output and the MLP."""
    qk_norm: bool = False
    """A norm over the channels of each head of queries and keys, before their rotation."""
    whole_qk_norm: bool = False
    """A norm over the channels of all heads of queries together, and one of keys."""
    activation: Literal["silu", "gelu", "exact_gelu"] = "silu"
    """`gelu`: the approximation by tanh (Hendrycks & Gimpel, 2016)."""
    gated: bool = True
    """The MLP multiplies its activations by a second projection (Shazeer, 2020)."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(width)."""
    positions: Literal["rotary", "learned"] = "rotary"
    experts: bool = False
    """In place of the MLP: many MLPs, of which a router chooses a few for each token (Shazeer et al., 2017)."""
    settings: frozenset[str] = ROTARY
    """The keys of OPTIONAL that models of the family have in transformers."""
    whole_heads: bool = False
    """transformers loads only models whose width is a multiple of `num_heads`, even if `head_dim` says the channels of a head."""

    @property
    def has_two_ropes(self) -> bool:
        """Layers with a window turn by angles of their own."""
        return "local_rope_theta" in self.settings


BIASES = frozenset({"attention_bias", "mlp_bias"})
EVERY_OTHER = ROTARY | {"window", "global_every"}
EXPERTS = ROTARY | {"window", "num_experts", "experts_per_token"}
OF_GEMMA = EVERY_OTHER | {"query_scalar", "logit_softcap", "attention_bias"}
OF_GRANITE = ROTARY | BIASES | {"query_scalar", "embedding_multiplier", "residual_multiplier", "logit_divisor"}
GEMMA = {"norm_offset": True, "post_norms": True, "activation": "gelu", "scaled_embedding": True, "whole_heads": True}
OLMO = {"pre_norms": False, "post_norms": True, "whole_qk_norm": True}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(settings=ROTARY | BIASES, whole_heads=True),
        "mistral": Family(settings=ROTARY | {"window"}),
        "ministral": Family(settings=EVERY_OTHER),
        "qwen2": Family(qkv_bias=True, settings=EVERY_OTHER),
        "qwen3": Family(qk_norm=True, settings=EVERY_OTHER | {"attention_bias"}),
        "gemma": Family(norm_offset=True, activation="gelu", scaled_embedding=True, settings=ROTARY | {"attention_bias"}),
        # mypy takes the values for one type.
        "gemma2": Family(**GEMMA, settings=OF_GEMMA | {"attention_softcap"}),  # type: ignore[arg-type]
        "gemma3": Family(**GEMMA, qk_norm=True, settings=OF_GEMMA | {"local_rope_theta"}),  # type: ignore[arg-type]
        "granite": Family(settings=OF_GRANITE),
        "smollm3": Family(settings=ROTARY | BIASES | {"unturned_every"}),
        "olmo2": Family(**OLMO, settings=ROTARY | {"attention_bias"}),  # type: ignore[arg-type]
        "olmo3": Family(**OLMO, settings=EVERY_OTHER | {"attention_bias", "local_rope_theta"}),  # type: ignore[arg-type]
        "phi3": Family(settings=ROTARY - {"rope_scaling"} | {"window"}),
        "gpt2": Family(
            norm="layer",
            qkv_bias=True,
            bias=True,
            activation="gelu",
            gated=False,
            positions="learned",
            settings=frozenset({"num_positions"}),
            whole_heads=True,
        ),
        "mixtral": Family(experts=True, settings=EXPERTS),
        "qwen3_moe": Family(qk_norm=True, experts=True, settings=EXPERTS | {"normalize_routing", "attention_bias"}),
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


def biased(structure: Family, *, attention: bool = False, mlp: bool = False) -> frozenset[str]:
    """Returns the names of a layer's matrices that have a bias: of the family, and of its settings."""
    names = {"query", "key", "value"} if structure.qkv_bias or attention else set()
    names |= {"out"} if structure.bias or attention else set()
    if structure.bias or mlp:
        names |= {"up", "down", *(["gate"] if structure.gated else [])}
    return frozenset(names)


def misspelt(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error about an unknown family: `; did you mean llama?`, or nothing. Families whose names are alike
    compute different things, so only a name with other separators or cases, a letter left out, or two turned round is one
    that is meant."""
    plain = {_plain(family): family for family in known}
    found = _plain(name)
    spellings = {found, *(found[:i] + found[i + 1] + found[i] + found[i + 2 :] for i in range(len(found) - 1))}
    for written, family in plain.items():
        shorter = {written[:i] + written[i + 1 :] for i in range(len(written)) if not written[i].isdigit()}
        if written in spellings or found in shorter:
            return f"; did you mean {family}?"
    return ""


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
