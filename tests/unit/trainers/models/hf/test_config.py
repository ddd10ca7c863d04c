"""`config.json`: both forms, what is left out, what is not understood."""

from __future__ import annotations

import pytest

from trainers.config import ModelConfig
from trainers.config.model import RopeScaling
from trainers.errors import UsageError
from trainers.models.hf import config as hf_config

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": SCALING},
        {"rope_theta": 5e5, "rope_scaling": {**SCALING, "type": "llama3"}},
        {"rope_parameters": {"rope_theta": 5e5, **SCALING}},
    ],
)
def test_the_rope_of_llama_3_in_the_forms_of_both_versions(rope):
    read = hf_config.read({"model_type": "llama", **SIZES, **rope})
    assert read.rope_theta == 5e5
    assert read.rope_scaling == RopeScaling(factor=32.0)


@pytest.mark.parametrize(
    "form",
    [
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ],
)
def test_the_two_ropes_of_gemma_3(form):
    read = hf_config.read({"model_type": "gemma3_text", **SIZES, "sliding_window": 512, "sliding_window_pattern": 3, **form})
    assert (read.rope_theta, read.local_rope_theta) == (1e6, 1e4)
    assert read.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert read.local_layers == (True, True, False, True, True, False)


def test_what_a_file_leaves_out_is_the_default_of_transformers():
    gemma2 = hf_config.read({"model_type": "gemma2", **SIZES})
    assert (gemma2.head_dim, gemma2.window, gemma2.global_every) == (256, 4096, 2)
    assert (gemma2.attention_softcap, gemma2.logit_softcap, gemma2.query_scalar) == (50.0, 30.0, 256)
    assert gemma2.tie_embeddings
    assert hf_config.read({"model_type": "qwen3", **SIZES}).head_dim == 128
    assert hf_config.read({"model_type": "llama", **SIZES}).channels == 8


def test_the_experts_in_the_forms_of_both_versions():
    about = {"model_type": "qwen3_moe", **SIZES, "moe_intermediate_size": 24, "num_experts_per_tok": 4, "norm_topk_prob": True}
    for name in ("num_experts", "num_local_experts"):
        read = hf_config.read({**about, name: 16})
        assert (read.num_experts, read.experts_per_token, read.mlp_width, read.normalize_routing) == (16, 4, 24, True)
    default = hf_config.read({"model_type": "qwen3_moe", **SIZES})
    assert (default.num_experts, default.experts_per_token, default.mlp_width, default.normalize_routing) == (128, 8, 768, False)
    mixtral = hf_config.read({"model_type": "mixtral", **SIZES})
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.mlp_width, mixtral.normalize_routing) == (8, 2, 48, True)


@pytest.mark.parametrize(
    ("given", "window", "global_every"),
    [
        ({"model_type": "qwen2", "sliding_window": 8}, None, None),  # it is there, and not used
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, 8, None),
        ({"model_type": "mistral", "sliding_window": 8}, 8, None),
        ({"model_type": "mistral", "sliding_window": None}, None, None),
        ({"model_type": "gemma2", "sliding_window": 8}, 8, 2),
        ({"model_type": "gemma2", "sliding_window": 8, "layer_types": ["full_attention"] * 6}, None, None),
        ({"model_type": "gemma3_text", "sliding_window": 8}, 8, 6),
        ({"model_type": "mixtral"}, None, None),
        ({"model_type": "mixtral", "sliding_window": 8}, 8, None),
        ({"model_type": "qwen3_moe", "sliding_window": 8}, None, None),
        ({"model_type": "qwen3_moe", "sliding_window": 8, "use_sliding_window": True}, 8, None),
    ],
)
def test_which_layers_have_the_window(given, window, global_every):
    read = hf_config.read({**SIZES, **given})
    assert (read.window, read.global_every) == (window, global_every)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, r"model_type = 'lama': expected one of llama, .*; did you mean llama\?"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn': expected default, linear or llama3"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}}, "rope_type = 'longrope'"),
        ({"attention_bias": True}, "attention_bias = true: expected false in the family llama"),
        ({"hidden_act": "relu"}, "the activation 'relu': expected silu or swish in the family llama"),
        ({"layer_types": ["chunked_attention"] * 6}, r"layer_types = \['chunked_attention'\]"),
        (
            {"layer_types": ["full_attention"] + ["sliding_attention"] * 5, "sliding_window": 8},
            "expected a full layer after every so many",
        ),
        ({"num_attention_heads": 3}, "num_heads"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise = 0.1: expected 0"),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
            r"mlp_only_layers = \[0\], decoder_sparse_step = 1: expected experts in every layer",
        ),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step = 2: expected experts in every layer"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes, message):
    with pytest.raises(UsageError, match=message):
        hf_config.read({"model_type": "llama", **SIZES, **changes})


def test_all_that_is_not_understood_is_told_at_once():
    with pytest.raises(UsageError) as raised:
        hf_config.read({"model_type": "llama", **SIZES, "mlp_bias": True, "hidden_act": "relu"})
    assert "mlp_bias" in str(raised.value)
    assert "relu" in str(raised.value)


def test_a_missing_size_is_named():
    with pytest.raises(UsageError, match="hidden_size is missing: a configuration of model_type llama has it"):
        hf_config.read({name: value for name, value in {"model_type": "llama", **SIZES}.items() if name != "hidden_size"})


def test_what_a_family_cannot_say_is_not_written():
    with pytest.raises(UsageError, match=r"model\.attention_softcap = 50\.0: models of the family llama cannot say that"):
        hf_config.write(ModelConfig(attention_softcap=50.0), max_length=64, dtype="float32")
    mixtral = ModelConfig(family="mixtral", num_experts=4, experts_per_token=2, normalize_routing=False)
    with pytest.raises(UsageError, match=r"model\.normalize_routing = False: models of the family mixtral cannot say that"):
        hf_config.write(mixtral, max_length=64, dtype="float32")
