"""Random configurations: each is read or written as transformers understands it, or refused by the name of what is not."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from gangway.errors import UsageError
from tests import fuzz, random_models
from trainers.config import ModelConfig
from trainers.config.families import FAMILIES, OPTIONAL
from trainers.config.model import RopeScaling
from trainers.models.hf import config as hf_config
from trainers.models.hf import keys
from trainers.models.hf.computed import Layer, Meaning, differences, of_model

FOREIGN = (
    *(
        "clip_qkv",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
        "attention_multiplier",
        "is_causal",
        "rope_dim",
    ),
    *("use_qk_norm", "qkv_bias", "no_rope_layers", "layer_norm_eps", "per_layer_config", "original_max_position_embeddings"),
    *(
        "attention_chunk_size",
        "mlp_layer_types",
        "num_hidden_layer",
        "shared_expert_intermediate_size",
        "auto_map",
        "hidden_dropout",
    ),
)
"""Keys of other models, and of none."""
BIASED = ("attention_bias", "mlp_bias")
KNOWN = sorted({name for table in keys.OF_FAMILY.values() for name in table} - {"model_type"})
ROPES = st.fixed_dictionaries(
    {},
    optional={
        "rope_type": st.sampled_from(["default", "linear", "llama3", "yarn", "dynamic"]),
        "type": st.sampled_from(["default", "linear"]),
        "rope_theta": st.sampled_from([10.0, 500, None]),
        "factor": st.sampled_from([2.0, 4, 0.5]),
        "low_freq_factor": st.just(1.0),
        "high_freq_factor": st.sampled_from([4.0, 0.5]),
        "original_max_position_embeddings": st.just(16),
        "partial_rotary_factor": st.sampled_from([1.0, 0.5]),
        "attention_factor": st.just(2.0),
        "truncate": st.booleans(),
        "mscale": st.just(2.0),
        "mscale_all_dim": st.just(1.0),
        "beta_fast": st.sampled_from([None, 8, 0.5]),
    },
)
TWO_ROPES = st.fixed_dictionaries({}, optional={"full_attention": ROPES, "sliding_attention": ROPES, "rope_theta": st.just(7.0)})
KINDS = st.lists(st.sampled_from(["full_attention", "sliding_attention", "chunked_attention"]), min_size=1, max_size=4)
PLAIN = st.sampled_from(
    [None, True, False, 0, 1, 2, 3, 8, 0.0, 0.1, 0.5, 1.0, 2.0, 50.0, "silu", "gelu_pytorch_tanh", "8", [], {}]
)
CHANGES = st.dictionaries(st.sampled_from([*KNOWN, *FOREIGN]), st.one_of(PLAIN, PLAIN, ROPES, TWO_ROPES, KINDS), max_size=4)
MORE_OF_THE_RISKY = st.fixed_dictionaries(
    {}, optional={"rope_parameters": st.one_of(ROPES, TWO_ROPES), "rope_scaling": ROPES, "layer_types": KINDS}
)


def meant_by_transformers(found):
    """Returns what the models of transformers read off their configuration; None if it has none of this file. Its own code, not
    ours, has understood the file."""
    from transformers import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[found["model_type"]].from_dict(copy.deepcopy(found))
    except Exception:
        return None
    family = hf_config.FAMILY_OF[found["model_type"]]
    heads = config.num_attention_heads
    channels = getattr(config, "head_dim", None) or config.hidden_size // heads
    gemma, moe = family in ("gemma2", "gemma3"), FAMILIES[family].experts
    biases = {name: name in FAMILIES[family].settings and bool(getattr(config, name, None)) for name in BIASED}
    meant = {
        "family": family,
        "vocab_size": config.vocab_size,
        "width": config.hidden_size,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "channels": channels,
        "mlp_width": inner_width(family, config),
        "layers": tuple(layers_of(family, config)),
        "query_scalar": scalar_of(family, config, channels),
        **biases,
        "embedding_multiplier": getattr(config, "embedding_multiplier", 1.0),
        "residual_multiplier": getattr(config, "residual_multiplier", 1.0),
        "logit_divisor": getattr(config, "logits_scaling", 1.0),
        "norm_eps": config.layer_norm_epsilon if family == "gpt2" else config.rms_norm_eps,
        "tie_embeddings": config.tie_word_embeddings,
        "num_positions": config.n_positions if family == "gpt2" else None,
        "attention_softcap": config.attn_logit_softcapping if family == "gemma2" else None,
        "logit_softcap": config.final_logit_softcapping if gemma else None,
        "num_experts": config.num_local_experts if moe else None,
        "experts_per_token": config.num_experts_per_tok if moe else None,
        "normalize_routing": config.norm_topk_prob if family == "qwen3_moe" else True,
    }
    activation = config.activation_function if family == "gpt2" else config.hidden_activation if gemma else config.hidden_act
    tanh = gemma or family in ("gemma", "gpt2")
    like_ours = activation in (("gelu_new", "gelu_pytorch_tanh") if tanh else ("silu", "swish"))
    off = ("use_bidirectional_attention", "attention_dropout", "router_jitter_noise", "mlp_only_layers", "quantization_config")
    off += ("scale_attn_by_inverse_layer_idx", "add_cross_attention", "is_encoder_decoder")
    other = [name for name in BIASED if name not in FAMILIES[family].settings]
    return meant if like_ours and not any(getattr(config, name, None) for name in (*off, *other)) else "not ours"


def scalar_of(family, config, channels):
    if family == "granite":
        return float(config.attention_multiplier**-2)
    return config.query_pre_attn_scalar if family in ("gemma2", "gemma3") else channels


def yarn_of(rope):
    factor = rope.get("attention_factor")
    if factor is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        factor = (0.1 * rope["mscale"] * np.log(rope["factor"]) + 1) / (0.1 * rope["mscale_all_dim"] * np.log(rope["factor"]) + 1)
    return RopeScaling(
        kind="yarn",
        factor=rope["factor"],
        original_length=rope["original_max_position_embeddings"],
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        truncate=rope.get("truncate", True),
        attention_factor=factor,
    )


def inner_width(family, config):
    if family == "gpt2":
        return config.n_inner if config.n_inner is not None else 4 * config.n_embd
    return config.moe_intermediate_size if family == "qwen3_moe" else config.intermediate_size


def layers_of(family, config):
    for layer in range(config.num_hidden_layers):
        window, ropes = getattr(config, "sliding_window", None), getattr(config, "rope_parameters", None)
        if family in ("qwen2", "qwen3", "gemma2", "gemma3", "ministral", "olmo3"):
            kind = config.layer_types[layer]
            window = window if kind == "sliding_attention" else None
            ropes = ropes[kind] if family in ("gemma3", "olmo3") else ropes
        if family == "smollm3":
            window, ropes = None, ropes if config.no_rope_layers[layer] else None
        yield Layer(window, None, None) if ropes is None else Layer(window, *rope_of(ropes))


def rope_of(rope):
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "in part", None
    if rope["rope_type"] == "default":
        return rope["rope_theta"], None
    if rope["rope_type"] == "linear":
        return rope["rope_theta"], RopeScaling(kind="linear", factor=rope["factor"])
    if rope["rope_type"] == "yarn":
        return rope["rope_theta"], yarn_of(rope)
    return rope["rope_theta"], RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_length=rope["original_max_position_embeddings"],
    )


def outcome(make, refusal):
    """Returns (what is made, None), or (None, the text of the refusal)."""
    try:
        return make(), None
    except refusal as error:
        return None, str(error)


def check_file(number, changes, risky, left_out):
    found = random_models.file(number) | changes | risky
    found = {name: value for name, value in found.items() if name not in left_out or name == "model_type"}
    read, refusal = outcome(lambda: hf_config.read(found), UsageError)
    if refusal is not None:
        # By the name of a key, ours or theirs.
        named = [*found, *left_out, *keys.OF_FAMILY["llama"], *OPTIONAL]
        assert all(any(name in line for name in named) for line in refusal.splitlines()), refusal
        return False
    assert not {*FOREIGN} & {*found} - {*keys.OF_FAMILY[read.family]}
    expected = meant_by_transformers(found)
    if expected is not None:
        assert expected != "not ours"
        assert list(differences(of_model(read), Meaning(**expected))) == []
    return True


FILES = (
    st.integers(0, 10_000),
    CHANGES,
    st.one_of(st.just({}), MORE_OF_THE_RISKY),
    st.one_of(st.just(set()), st.sets(st.sampled_from(KNOWN), max_size=6)),
)


@seed(1)
@settings(max_examples=50)
@given(*FILES)
def test_a_file_is_read_as_transformers_reads_it_or_refused(number, changes, risky, left_out):
    check_file(number, changes, risky, left_out)


@pytest.mark.slow("many files; `make fuzz KIND=configs` has more")
@seed(fuzz.seed(2))
@settings(max_examples=fuzz.count(200), suppress_health_check=list(HealthCheck))
@given(*FILES)
def test_many_files_are_read_as_transformers_reads_them_or_refused(number, changes, risky, left_out):
    check_file(number, changes, risky, left_out)


@pytest.mark.parametrize("number", range(len(FAMILIES)))
def test_a_file_of_understood_keys_is_read(number):
    for more in range(0, 10 * len(FAMILIES), len(FAMILIES)):
        assert check_file(number + more, {}, {}, set())


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "head_dim": st.sampled_from([None, 4, 6, 8]),
        "num_kv_heads": st.sampled_from([1, 2, 4]),
        "width": st.sampled_from([16, 32, 36]),
        "num_positions": st.sampled_from([None, 16]),
        "rope_theta": st.sampled_from([100.0, 500]),
        "rope_scaling": st.sampled_from([None, RopeScaling(kind="linear", factor=2), RopeScaling(original_length=16)]),
        "local_rope_theta": st.sampled_from([None, 10.0, 500]),
        "window": st.sampled_from([None, 1, 4]),
        "global_every": st.sampled_from([None, 1, 2, 3]),
        "query_scalar": st.sampled_from([None, 8, 12.0, 8.5]),
        "attention_softcap": st.sampled_from([None, 2, 50.0]),
        "logit_softcap": st.sampled_from([None, 2, 30.0]),
        "num_experts": st.sampled_from([None, 4]),
        "experts_per_token": st.sampled_from([None, 2]),
        "normalize_routing": st.booleans(),
        "norm_eps": st.sampled_from([1e-6, 1]),
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "unturned_every": st.sampled_from([None, 1, 3]),
        "embedding_multiplier": st.sampled_from([None, 3]),
        "logit_divisor": st.sampled_from([None, 0.7]),
        "tie_embeddings": st.booleans(),
    },
)


def check_model(number, changes, left_out):
    settings = {**vars(random_models.model(number)), **changes}
    settings = {name: value for name, value in settings.items() if name not in left_out}
    config, refusal = outcome(lambda: ModelConfig(**settings), ValueError)
    if refusal is not None:
        assert all(any(name in line for name in (*settings, *OPTIONAL)) for line in refusal.splitlines()), refusal
        return
    written = hf_config.write(config, max_length=64, dtype="float32")
    expected = meant_by_transformers(written)
    assert expected is not None, "transformers does not load it"
    assert list(differences(of_model(config), Meaning(**expected))) == []
    assert list(differences(of_model(hf_config.read(written)), of_model(config))) == []


MODELS = (st.integers(0, 10_000), SETTINGS, st.one_of(st.just(set()), st.sets(st.sampled_from(OPTIONAL), max_size=4)))


@seed(3)
@settings(max_examples=50)
@given(*MODELS)
def test_a_model_is_written_as_transformers_reads_it_or_refused(number, changes, left_out):
    check_model(number, changes, left_out)


@pytest.mark.slow("many models; `make fuzz KIND=models` has more")
@seed(fuzz.seed(4))
@settings(max_examples=fuzz.count(200), suppress_health_check=list(HealthCheck))
@given(*MODELS)
def test_many_models_are_written_as_transformers_reads_them_or_refused(number, changes, left_out):
    check_model(number, changes, left_out)


def test_no_family_is_suggested_for_another_model_of_transformers():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for name in set(CONFIG_MAPPING_NAMES) - set(hf_config.FAMILY_OF):
        with pytest.raises(UsageError) as raised:
            hf_config.read({"model_type": name})
        assert "did you mean" not in str(raised.value)
