"""The weights and the configuration of a Llama model in the format of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainers.config import ModelConfig
from trainers.errors import UsageError


def flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """Returns the leaves by dotted name."""
    named: dict[str, np.ndarray] = {}
    for name, value in params.items():
        named |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: np.ascontiguousarray(value)}
    return named


HF_NAMES = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def llama_tensors(config: ModelConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the weights with the names and layouts of `transformers`: there a matrix is [out, in], and each layer has its
    own. The rotary convention is the same: channel i rotates with channel i + C / 2."""
    top = {"embed", "layers", "final_norm"} | (set() if config.tie_embeddings else {"unembed"})
    if set(params) != top or set(params["layers"]) != set(HF_NAMES):
        raise UsageError(
            f"the model has the parameters {', '.join(sorted(flat(params)))}: expected those of trainers.models.llama"
        )
    # [vocabulary, width] on both sides: not transposed.
    tensors = {"model.embed_tokens.weight": params["embed"]}
    for layer in range(config.num_layers):
        for name, hf_name in HF_NAMES.items():
            # The scale of a norm has one dimension, which `.T` leaves as it is.
            tensors[f"model.layers.{layer}.{hf_name}.weight"] = params["layers"][name][layer].T
    tensors["model.norm.weight"] = params["final_norm"]
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = params["unembed"].T
    return tensors


def llama_config(config: ModelConfig, arguments: Mapping[str, Any], dtype: np.dtype) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.width // config.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": arguments["data"]["sequence_length"],
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype.name,
    }
