"""`config.json`: both forms, what is left out, what is not understood."""

from __future__ import annotations

import pytest

from gangway.errors import UsageError
from trainers.config import ModelConfig
from trainers.config.model import RopeScaling
from trainers.models.hf import config as hf_config
from trainers.models.hf.computed import differences, of_model

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
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
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
        ({"model_type": "olmo3", "sliding_window": 8}, 8, 4),
        ({"model_type": "mixtral"}, None, None),
        ({"model_type": "mixtral", "sliding_window": 8}, 8, None),
        ({"model_type": "qwen3_moe", "sliding_window": 8}, None, None),
        ({"model_type": "qwen3_moe", "sliding_window": 8, "use_sliding_window": True}, 8, None),
        # Layers are named, and the window is not in use.
        ({"model_type": "qwen3", "sliding_window": 8, "layer_types": ["sliding_attention"] * 6}, None, None),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["sliding_attention"] * 6}, 8, None),
    ],
)
def test_which_layers_have_the_window(given, window, global_every):
    read = hf_config.read({**SIZES, **given})
    assert (read.window, read.global_every) == (window, global_every)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, r"model_type = 'lama': expected one of llama, .*; did you mean llama\?"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type = 'dynamic': expected default, linear, llama3"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}}, "rope_type = 'longrope'"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias = true: expected false in the family mistral"),
        ({"hidden_act": "relu"}, "the activation 'relu': expected silu or swish in the family llama"),
        (
            {"model_type": "qwen3", "layer_types": ["chunked_attention"] * 6},
            "layer_types: chunked_attention: expected full_attention and sliding_attention",
        ),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention"] + ["sliding_attention"] * 5, "sliding_window": 8},
            "expected a full layer after every so many",
        ),
        ({"num_attention_heads": 3}, "num_heads"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise = 0.1: expected 0"),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
            r"mlp_only_layers = \[0\]: expected \[\]: experts in every layer in the family qwen3_moe",
        ),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step = 2: expected 1: experts in every layer"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes, message):
    with pytest.raises(UsageError, match=message):
        hf_config.read({"model_type": "llama", **SIZES, **changes})


LOCAL = {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 8.0}}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        # Of another family, or of none.
        ("llama", {"sliding_window": 8}, "sliding_window = 8: the family llama has no such key here, and it may change what"),
        ("llama", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar = 16: the family llama has no such key"),
        ("llama", {"clip_qkv": 8.0}, "clip_qkv = 8.0: the family llama has no such key"),
        ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier = 12.0: the family llama has no such key"),
        ("llama", {"is_causal": False}, "is_causal = false: the family llama has no such key"),
        ("llama", {"per_layer_config": {}}, "per_layer_config = {}: the family llama has no such key"),
        ("llama", {"original_max_position_embeddings": 16}, "original_max_position_embeddings = 16: the family llama has no"),
        ("llama", {"num_key_value_head": 2}, r"num_key_value_head = 2: .*; did you mean num_key_value_heads\?"),
        ("gpt2", {"num_key_value_heads": 2}, "num_key_value_heads = 2: the family gpt2 has no such key"),
        # With another value than the one that changes nothing.
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1: expected 0 in the family llama"),
        ("gpt2", {"resid_pdrop": 0.3}, r"resid_pdrop = 0\.3: expected 0 or 0\.1 in the family gpt2"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}: expected nothing in it, or null"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: expected 1 in the family llama"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = true: expected false"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = true: expected false"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0: expected null in the family gemma3"),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob = false: expected true in the family mixtral"),
        (
            "mistral",
            {"sliding_window": 8, "layer_types": ["full_attention"] * 6},
            "layer_types: full_attention: the family mistral",
        ),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 6}, "layer_types: sliding_attention: the family qwen3_moe"),
        # Of another type.
        ("llama", {"num_hidden_layers": 2.0}, "num_hidden_layers = 2.0: expected a whole number of at least 1"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers = true: expected a whole number"),
        ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6': expected a positive number"),
        ("llama", {"rope_theta": None}, "rope_theta = null: expected a positive number"),
        ("llama", {"rope_theta": float("nan")}, "rope_theta = nan: expected a positive number"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings = 1: expected true or false"),
        ("gemma2", {"query_pre_attn_scalar": 256.0}, "query_pre_attn_scalar = 256.0: expected a whole number"),
        ("gpt2", {"n_inner": 0}, "n_inner = 0: expected a whole number of at least 1, or null"),
        ("qwen2", {"layer_types": ["full_attention"] * 5}, r"layer_types has 5 layers: expected num_hidden_layers \(6\)"),
        ("gemma2", {"sliding_window": None}, "sliding_window = null: expected the window of the layers of sliding_attention"),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 1, 1, 1]}, "no_rope_layers: 0, 1, 1, 1, 1, 1: expected a 0 after every so many"),
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers has 2 layers: expected num_hidden_layers \(6\)"),
        ("olmo3", {"sliding_window": None}, "sliding_window = null: expected the window of the layers of sliding_attention"),
        ("olmo3", {"rope_theta": 10_000}, "rope_theta = 10000: transformers 4 reads it for all layers, and 5 for those without"),
        (
            "olmo3",
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
            "rope_scaling.type = 'linear': transformers reads rope_type",
        ),
        ("olmo3", {"rope_parameters": LOCAL}, r"sliding_attention: rope_type = 'linear': expected default: only the other"),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor = 0.75: expected 1 in the family phi3"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "rope_scaling: rope_type = 'longrope': expected default in the family phi3",
        ),
        # transformers takes it for longrope.
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn': expected default in the family phi3"),
        (
            "phi3",
            {"auto_map": {"AutoConfig": "mine.Config"}},
            "auto_map = .* expected the classes of Phi-3 that transformers has",
        ),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window = true: expected false in the family smollm3"),
        # Two keys for one thing.
        (
            "mixtral",
            {"num_experts": 4, "num_local_experts": 8},
            "num_experts = 4, num_local_experts = 8: both say the same thing",
        ),
        ("gpt2", {"n_embd": 64, "hidden_size": 32}, "hidden_size = 32, n_embd = 64: both say the same thing"),
        # In a section.
        ("llama", {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}}, "both say the same; delete one"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing: rope_type linear needs it"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor = 0.5: expected at least 1"),
        (
            "llama",
            {"rope_parameters": {"mrope_section": [1]}},
            r"rope_parameters.mrope_section = \[1\]: rope_type default has no",
        ),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor = 0.5: expected 1"),
        ("llama", {"rope_parameters": LOCAL}, "rope_parameters.full_attention = {}: rope_type default has no such key"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters: rope_theta: expected full_attention and"),
        (
            "gemma3_text",
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
            "rope_scaling.type = 'linear': transformers reads rope_type alone in the family gemma3; name it rope_type",
        ),
        ("gemma3_text", {"rope_parameters": LOCAL}, r"sliding_attention: rope_type = 'linear': expected default: only the other"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {}}, "rope_scaling": SCALING},
            "rope_scaling, rope_parameters: both",
        ),
    ],
)
def test_a_key_that_may_change_the_model_is_refused_by_name(family, changes, message):
    sizes = {} if family == "gpt2" else SIZES
    hf_config.read({"model_type": family, **sizes})
    with pytest.raises(UsageError, match=message):
        hf_config.read({"model_type": family, **sizes, **changes})


def test_keys_about_the_file_change_nothing():
    plain = hf_config.read({"model_type": "llama", **SIZES})
    about = {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "pretraining_tp": 2,
        "top_p": 0.9,
    }
    off = {"attention_bias": False, "attention_dropout": 0.0, "rope_scaling": None, "partial_rotary_factor": 1.0}
    assert hf_config.read({"model_type": "llama", **SIZES, **about, **off, "eos_token_id": [1, 2]}) == plain


def test_of_two_sections_about_positions_the_one_counts_that_transformers_reads():
    both = {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
    }
    read = hf_config.read({"model_type": "llama", **SIZES, **both})
    assert (read.rope_theta, read.rope_scaling) == (10_000.0, RopeScaling(kind="linear", factor=4.0))
    assert hf_config.read({"model_type": "llama", **SIZES, **both, "rope_scaling": {}}).rope_theta == 5.0


def test_the_length_of_the_first_training_may_be_that_of_the_positions():
    scaling = {name: value for name, value in SCALING.items() if name != "original_max_position_embeddings"}
    given = {"model_type": "llama", **SIZES, "rope_scaling": scaling}
    assert hf_config.read({**given, "max_position_embeddings": 512}).rope_scaling.original_length == 512
    with pytest.raises(UsageError, match="original_max_position_embeddings is missing: rope_type llama3 needs it"):
        hf_config.read(given)


@pytest.mark.parametrize("kind", ["ministral3", "mistral3", "pixtral", "gemma3n_text", "olmo4", "smollm4", "qwen2_moe"])
def test_no_other_model_is_suggested_for_one_that_is_not_there(kind):
    with pytest.raises(UsageError, match=rf"model_type = '{kind}': expected one of [^;]*$"):
        hf_config.read({"model_type": kind, **SIZES})


EXPERTS = {"num_experts": 4, "experts_per_token": 2}
YARN = RopeScaling(kind="yarn", factor=8, attention_factor=1.2)
EXPORTED = {
    "llama": {"rope_scaling": RopeScaling(kind="linear", factor=4)},
    "mistral without a window": {"family": "mistral"},
    "mistral": {"family": "mistral", "window": 8},
    "qwen2": {"family": "qwen2", "window": 8, "global_every": 3},
    "qwen3 without a window": {"family": "qwen3", "head_dim": 12},
    "gemma2": {"family": "gemma2", "window": 8, "global_every": 2, "query_scalar": 256.0, "attention_softcap": 50},
    "gemma2 without a window": {"family": "gemma2", "logit_softcap": 30},
    "gemma3 without a window": {"family": "gemma3", "rope_scaling": RopeScaling(), "query_scalar": 24},
    "gemma3 with one rope": {"family": "gemma3", "window": 8, "global_every": 2, "rope_theta": 5e5},
    "gemma3": {"family": "gemma3", "window": 8, "local_rope_theta": 1e4, "rope_scaling": RopeScaling(), "logit_softcap": 3.0},
    "gemma": {"family": "gemma", "attention_bias": True},
    "ministral without a window": {"family": "ministral"},
    "olmo3": {
        "family": "olmo3",
        "window": 8,
        "global_every": 4,
        "rope_theta": 5e5,
        "local_rope_theta": 5e5,
        "rope_scaling": YARN,
    },
    "olmo3 with two thetas": {"family": "olmo3", "window": 8, "rope_theta": 1e4, "local_rope_theta": 50, "rope_scaling": YARN},
    "olmo3 without a window": {"family": "olmo3"},
    "phi3": {"family": "phi3", "window": 8},
    "phi3 without a window": {"family": "phi3", "head_dim": 12},
    "granite": {
        "family": "granite",
        "query_scalar": 3.0,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "logit_divisor": 8,
    },
    "yarn": {"family": "qwen3", "attention_bias": True, "rope_scaling": RopeScaling(kind="yarn", factor=4, attention_factor=2)},
    "gpt2": {"family": "gpt2", "num_positions": 16},
    "mixtral": {"family": "mixtral", "window": 8, **EXPERTS},
    "qwen3_moe": {"family": "qwen3_moe", "window": 8, **EXPERTS, "normalize_routing": False},
    "qwen3_moe without a window": {"family": "qwen3_moe", **EXPERTS},
}


@pytest.mark.parametrize("settings", EXPORTED.values(), ids=EXPORTED)
def test_what_is_written_means_the_same(settings):
    config = ModelConfig(**{"norm_eps": 1e-6, **settings})
    written = hf_config.write(config, max_length=64, dtype="float32")
    assert list(differences(of_model(hf_config.read(written)), of_model(config))) == []
    whole = {"hidden_size", "num_hidden_layers", "sliding_window", "query_pre_attn_scalar", "max_position_embeddings", "n_embd"}
    real = {"rms_norm_eps", "layer_norm_epsilon", "rope_theta", "attn_logit_softcapping", "final_logit_softcapping"}
    assert {name for name, value in written.items() if name in whole and type(value) not in (int, type(None))} == set()
    assert {name for name, value in written.items() if name in real and type(value) not in (float, type(None))} == set()
    assert config.family not in ("smollm3", "phi3") or written["pad_token_id"] is None
    # Also where no layer has the window, transformers wants a number.
    assert config.family not in ("gemma2", "gemma3", "ministral", "olmo3") or written["sliding_window"] is not None


def test_an_export_that_means_something_else_is_not_written(monkeypatch):
    monkeypatch.setattr(hf_config, "_write_window", lambda config: {"sliding_window": 7})
    with pytest.raises(UsageError, match=r"the family mistral with layers = .*window=8.*transformers cannot compute that"):
        hf_config.write(ModelConfig(family="mistral", window=8), max_length=64, dtype="float32")


def test_all_that_is_not_understood_is_reported_at_once():
    with pytest.raises(UsageError) as raised:
        hf_config.read({"model_type": "mistral", **SIZES, "mlp_bias": True, "hidden_act": "relu"})
    assert "mlp_bias" in str(raised.value)
    assert "relu" in str(raised.value)


def test_a_missing_size_is_named():
    with pytest.raises(UsageError, match="head_dim is missing: a configuration of model_type ministral has it"):
        hf_config.read({"model_type": "ministral", **SIZES})
    with pytest.raises(UsageError, match="hidden_size is missing: a configuration of model_type llama has it"):
        hf_config.read({name: value for name, value in {"model_type": "llama", **SIZES}.items() if name != "hidden_size"})


@pytest.mark.parametrize(("kind", "context"), [("llama3", 32), ("yarn", 32), ("linear", 8)])
def test_the_context_of_a_file_is_what_its_positions_are_stretched_for(kind, context):
    scaling = {"kind": kind, "factor": 4.0} | ({} if kind == "linear" else {"original_length": 8})
    for length in (8, 64):
        written = hf_config.write(ModelConfig(rope_scaling=RopeScaling(**scaling)), max_length=length, dtype="float32")
        assert written["max_position_embeddings"] == max(length, context)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("linear", "original_length", 8),
        ("linear", "high_freq_factor", 8.0),
        ("llama3", "truncate", False),
        ("yarn", "low_freq_factor", 2.0),
    ],
)
def test_a_number_that_a_kind_of_scaling_does_not_use_is_refused(kind, name, value):
    with pytest.raises(ValueError, match=f"{name} = {value}: {kind} does not use it; leave it out"):
        RopeScaling(kind=kind, **{name: value})
