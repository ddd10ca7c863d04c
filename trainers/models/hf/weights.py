"""The weights of a decoder under the names and in the layouts of `transformers`, family by family."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from trainers.config import ModelConfig

Tensors = dict[str, np.ndarray]


class Part(NamedTuple):
    """Some of the last dimension of a matrix (as it is here) in which several weights lie side by side."""

    start: int
    size: int
    whole: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.size)


class Place(NamedTuple):
    """Where a weight lies in a file."""

    name: str
    turned: bool = False
    """The matrix is [out, in] there."""
    part: Part | None = None
    """It is this part of the last dimension: GPT-2 has queries, keys and values in one matrix."""
    experts: bool = False
    """There is one for each expert, whose number stands for `*` in the name."""

    def full(self, prefix: str, expert: int | None = None) -> str:
        """Returns the whole name of the tensor. The table of the logits is outside of the decoder."""
        name = self.name if expert is None else self.name.replace("*", str(expert))
        return name if name.startswith("lm_head") else prefix + name

    def all_names(self, prefix: str, num_experts: int | None) -> list[str]:
        """Returns the names of the tensors: one, or those of the experts."""
        return [self.full(prefix, expert) for expert in range(num_experts or 0)] if self.experts else [self.full(prefix)]


ATTENTION = {name: Place(f"self_attn.{name[0]}_proj.weight", turned=True) for name in ("query", "key", "value", "out")}
GATED_MLP = {name: Place(f"mlp.{name}_proj.weight", turned=True) for name in ("gate", "up", "down")}
MIXTRAL = {
    "router": Place("block_sparse_moe.gate.weight", turned=True),
    "expert_gate": Place("block_sparse_moe.experts.*.w1.weight", turned=True, experts=True),
    "expert_up": Place("block_sparse_moe.experts.*.w3.weight", turned=True, experts=True),
    "expert_down": Place("block_sparse_moe.experts.*.w2.weight", turned=True, experts=True),
}
QWEN3_MOE = {
    "router": Place("mlp.gate.weight", turned=True),
    "expert_gate": Place("mlp.experts.*.gate_proj.weight", turned=True, experts=True),
    "expert_up": Place("mlp.experts.*.up_proj.weight", turned=True, experts=True),
    "expert_down": Place("mlp.experts.*.down_proj.weight", turned=True, experts=True),
}
MLPS = {"mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE}
"""What is in place of GATED_MLP."""
BIASES = {f"{name}_bias": Place(place.name.replace(".weight", ".bias")) for name, place in (ATTENTION | GATED_MLP).items()}
QK_NORM = {f"{name}_norm": Place(f"self_attn.{name[0]}_norm.weight") for name in ("query", "key")}
NORMS = {"attention_norm": Place("input_layernorm.weight"), "mlp_norm": Place("post_attention_layernorm.weight")}
POST_NORMS = {
    "attention_norm": Place("input_layernorm.weight"),
    "attention_post_norm": Place("post_attention_layernorm.weight"),
    "mlp_norm": Place("pre_feedforward_layernorm.weight"),
    "mlp_post_norm": Place("post_feedforward_layernorm.weight"),
}
GPT2_LAYER = {
    "attention_norm": Place("ln_1.weight"),
    "attention_norm_bias": Place("ln_1.bias"),
    "out": Place("attn.c_proj.weight"),
    "out_bias": Place("attn.c_proj.bias"),
    "mlp_norm": Place("ln_2.weight"),
    "mlp_norm_bias": Place("ln_2.bias"),
    "up": Place("mlp.c_fc.weight"),
    "up_bias": Place("mlp.c_fc.bias"),
    "down": Place("mlp.c_proj.weight"),
    "down_bias": Place("mlp.c_proj.bias"),
}
GPT2_TOP = {
    "embed": Place("wte.weight"),
    "positions": Place("wpe.weight"),
    "final_norm": Place("ln_f.weight"),
    "final_norm_bias": Place("ln_f.bias"),
}
PREFIXES = ("model.", "transformer.", "")
"""Before the names of a file: of a whole language model in our families, of a whole GPT-2, or of a bare decoder."""


def beside(place: Place, sizes: Mapping[str, int]) -> dict[str, Place]:
    """Returns the places of weights that lie side by side in one matrix, in this order."""
    ends = list(itertools.accumulate(sizes.values()))
    spans = zip(sizes.items(), ends, strict=True)
    return {name: place._replace(part=Part(end - size, size, ends[-1])) for (name, size), end in spans}


def _heads(config: ModelConfig) -> dict[str, int]:
    """Returns the channels of all heads, by weight."""
    of_keys = config.num_kv_heads * config.channels
    return {"query": config.num_heads * config.channels, "key": of_keys, "value": of_keys}


def _gpt2_layer(config: ModelConfig) -> dict[str, Place]:
    heads = _heads(config)
    biases = beside(Place("attn.c_attn.bias"), {f"{name}_bias": size for name, size in heads.items()})
    return GPT2_LAYER | beside(Place("attn.c_attn.weight"), heads) | biases


def _fused(config: ModelConfig) -> dict[str, Place]:
    """Returns the places of what Phi-3 has in two matrices."""
    gated = {"gate": config.mlp_width, "up": config.mlp_width}
    return beside(Place("self_attn.qkv_proj.weight", turned=True), _heads(config)) | beside(
        Place("mlp.gate_up_proj.weight", turned=True), gated
    )


def layer_places(config: ModelConfig) -> dict[str, Place]:
    """Returns where the weights of one layer lie, by our name; below `layers.<number>.` or, of GPT-2, `h.<number>.`."""
    if config.family == "gpt2":
        return _gpt2_layer(config)
    structure = config.structure
    optional = {f"{name}_bias": BIASES[f"{name}_bias"] for name in sorted(config.biased)} | (
        QK_NORM if structure.qk_norm or structure.whole_qk_norm else {}
    )
    norms = POST_NORMS if structure.post_norms else NORMS
    if not structure.pre_norms:
        norms = {name: place for name, place in norms.items() if name.endswith("post_norm")}
    fused = _fused(config) if config.family == "phi3" else {}
    return ATTENTION | MLPS.get(config.family, GATED_MLP) | fused | optional | norms


def top_places(config: ModelConfig) -> dict[str, Place]:
    """Returns where the other weights lie. The embedding is [vocabulary, width] on both sides."""
    top = GPT2_TOP if config.family == "gpt2" else {"embed": Place("embed_tokens.weight"), "final_norm": Place("norm.weight")}
    return top if config.tie_embeddings else top | {"unembed": Place("lm_head.weight", turned=True)}


def layers_name(config: ModelConfig) -> str:
    return "h" if config.family == "gpt2" else "layers"


def is_derived(config: ModelConfig, name: str) -> bool:
    """Whether a file may have the tensor besides: a tied table once more, or the masks and frequencies that older files have."""
    tied = config.tie_embeddings and name == "lm_head.weight"
    return tied or name.endswith(("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))


def flat(params: Mapping[str, Any], prefix: str = "") -> Tensors:
    """Returns the leaves by dotted name."""
    named: Tensors = {}
    for name, value in params.items():
        named |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: np.ascontiguousarray(value)}
    return named
