"""The configuration of a decoder in the form of Hugging Face (`config.json`), from transformers 4 and 5 alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from trainers.config import ModelConfig
from trainers.config.families import FAMILIES
from trainers.config.model import OF_EXECUTION, RopeScaling
from trainers.config.section import did_you_mean
from trainers.errors import UsageError

Json = Mapping[str, Any]

FAMILY_OF = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
}
"""`model.family` by `model_type`."""
ARCHITECTURE_OF = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
DEFAULTS: dict[str, Json] = {
    "llama": {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0},
    "mistral": {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
    },
    "gemma2": {
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3": {
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gpt2": {
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "qwen3_moe": {
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
}
"""What a file may leave out, for `transformers` leaves out its own defaults."""
WITH_EXPERTS = tuple(name for name, family in FAMILIES.items() if family.experts)
ACTIVATIONS = {"silu": ("silu", "swish"), "gelu": ("gelu_pytorch_tanh", "gelu_new")}


def read(found: Json) -> ModelConfig:
    """Returns the configuration of the decoder that a `config.json` describes. Raises UsageError that names all that is not
    understood: nothing is guessed."""
    kind = found.get("model_type")
    if kind not in FAMILY_OF:
        raise UsageError(f"model_type = {kind!r}: expected one of {', '.join(FAMILY_OF)}{did_you_mean(str(kind), FAMILY_OF)}")
    family = FAMILY_OF[kind]
    given = {**DEFAULTS[family], **found}
    if problems := list(_problems(family, given)):
        raise UsageError("\n".join(problems))
    try:
        return _gpt2(given) if family == "gpt2" else _decoder(family, given)
    except KeyError as error:
        raise UsageError(f"{error.args[0]} is missing: a configuration of model_type {kind} has it") from error
    except ValueError as error:
        raise UsageError(str(error)) from error


def _decoder(family: str, given: Json) -> ModelConfig:
    theta, scaling, local_theta = _rope(given)
    window, global_every = _window(family, given)
    return ModelConfig(
        family=family,
        vocab_size=given["vocab_size"],
        width=given["hidden_size"],
        num_layers=given["num_hidden_layers"],
        num_heads=given["num_attention_heads"],
        num_kv_heads=given.get("num_key_value_heads") or given["num_attention_heads"],
        head_dim=given.get("head_dim"),
        mlp_width=given["moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"],
        **(_experts(given) if family in WITH_EXPERTS else {}),
        rope_theta=theta,
        rope_scaling=scaling,
        local_rope_theta=None if window is None else local_theta,
        window=window,
        global_every=global_every,
        query_scalar=given.get("query_pre_attn_scalar"),
        attention_softcap=given.get("attn_logit_softcapping"),
        logit_softcap=given.get("final_logit_softcapping"),
        norm_eps=given["rms_norm_eps"],
        tie_embeddings=given.get("tie_word_embeddings", False),
    )


def _experts(given: Json) -> dict[str, Any]:
    return {
        # transformers 5 says the first in every family.
        "num_experts": given.get("num_local_experts") or given["num_experts"],
        "experts_per_token": given["num_experts_per_tok"],
        "normalize_routing": given["norm_topk_prob"],
    }


def _gpt2(given: Json) -> ModelConfig:
    return ModelConfig(
        family="gpt2",
        vocab_size=given["vocab_size"],
        width=given["n_embd"],
        num_layers=given["n_layer"],
        num_heads=given["n_head"],
        num_kv_heads=given["n_head"],
        mlp_width=given.get("n_inner") or 4 * given["n_embd"],
        num_positions=given["n_positions"],
        norm_eps=given["layer_norm_epsilon"],
        tie_embeddings=given["tie_word_embeddings"],
    )


def _problems(family: str, given: Json) -> Iterator[str]:
    """Yields what would make another model of it."""
    of_family = FAMILIES[family]
    activation = given.get("hidden_activation") or given.get("hidden_act") or given.get("activation_function") or "silu"
    allowed = ACTIVATIONS[of_family.activation]
    if activation not in allowed:
        yield f"the activation {activation!r}: expected {' or '.join(allowed)} in the family {family}"
    for name in ("attention_bias", "mlp_bias", "scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if given.get(name):
            yield f"{name} = true: expected false in the family {family}"
    if family in WITH_EXPERTS:
        yield from _problems_of_experts(given)
    if not given.get("scale_attn_weights", True):
        yield "scale_attn_weights = false: expected true"
    for rope in _ropes(given):
        if (kind := _kind(rope)) not in ("default", "linear", "llama3"):
            yield f"rope_type = {kind!r}: expected default, linear or llama3"
    if _kinds_of_layers(given) - {"full_attention", "sliding_attention"}:
        yield f"layer_types = {sorted(_kinds_of_layers(given))}: expected full_attention and sliding_attention"


def _problems_of_experts(given: Json) -> Iterator[str]:
    if given.get("mlp_only_layers") or given.get("decoder_sparse_step", 1) != 1:
        yield (
            f"mlp_only_layers = {given.get('mlp_only_layers')}, decoder_sparse_step = {given.get('decoder_sparse_step', 1)}: "
            "expected experts in every layer ([] and 1)"
        )
    if given.get("router_jitter_noise"):
        yield f"router_jitter_noise = {given['router_jitter_noise']}: expected 0"


def _kinds_of_layers(given: Json) -> set[str]:
    return set(given.get("layer_types") or ())


def _kind(rope: Json) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _ropes(given: Json) -> list[Json]:
    """Returns the RoPE of all layers, or those of the layers with full and with sliding attention."""
    if rope := given.get("rope_parameters"):
        nested = [rope[kind] for kind in ("full_attention", "sliding_attention") if rope.get(kind)]
        return nested or [rope]
    first = {"rope_theta": given.get("rope_theta"), **(given.get("rope_scaling") or {})}
    local = given.get("rope_local_base_freq")
    return [first] if local is None else [first, {"rope_theta": local}]


def _rope(given: Json) -> tuple[float, RopeScaling | None, float | None]:
    """Returns (theta, scaling, theta of the layers with a window)."""
    first, *second = _ropes(given)
    theta = first.get("rope_theta", given.get("rope_theta"))
    local = second[0]["rope_theta"] if second else None
    kind = _kind(first)
    if kind == "default":
        return theta, None, local
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=first["factor"]), local
    return (
        theta,
        RopeScaling(
            kind="llama3",
            factor=first["factor"],
            low_freq_factor=first["low_freq_factor"],
            high_freq_factor=first["high_freq_factor"],
            original_length=first["original_max_position_embeddings"],
        ),
        local,
    )


def _window(family: str, given: Json) -> tuple[int | None, int | None]:
    """Returns (window, global_every). `layer_types` says which layers have the window; older files say it otherwise."""
    window, layers = given.get("sliding_window"), given["num_hidden_layers"]
    if family == "qwen3_moe" and not given.get("use_sliding_window"):
        return None, None
    if kinds := given.get("layer_types"):
        local = tuple(kind == "sliding_attention" for kind in kinds)
    elif family in ("qwen2", "qwen3"):
        # The window of these files is not used unless they say so.
        first = given.get("max_window_layers", 28)
        local = tuple(bool(given.get("use_sliding_window")) and layer >= first for layer in range(layers))
    else:
        every = {"gemma2": 2, "gemma3": given.get("sliding_window_pattern")}.get(family) or layers + 1
        local = tuple((layer + 1) % every != 0 for layer in range(layers))
    if window is None or not any(local):
        return None, None
    for every in (None, *range(2, layers + 1)):
        if local == tuple((layer + 1) % (every or layers + 1) != 0 for layer in range(layers)):
            return window, every
    raise UsageError(
        f"layer_types = {given.get('layer_types', local)}: expected a full layer after every so many with a window, and no others"
    )


def write(config: ModelConfig, *, max_length: int, dtype: str) -> dict[str, Any]:
    """Returns `config.json`, in the form of transformers 4, which version 5 reads too. Raises UsageError if the family has no
    form for what `config` asks for."""
    about: dict[str, Any] = {
        "architectures": [ARCHITECTURE_OF[config.family]],
        "model_type": next(kind for kind, family in FAMILY_OF.items() if family == config.family),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }
    about |= _write_gpt2(config) if config.family == "gpt2" else _write_decoder(config, max_length)
    meant, kept = meaning(config), meaning(read(about))
    if lost := [f"model.{name} = {meant[name]}" for name in meant if meant[name] != kept[name]]:
        raise UsageError(f"{', '.join(lost)}: models of the family {config.family} cannot say that in the form of Hugging Face")
    return about


def meaning(config: ModelConfig) -> dict[str, Any]:
    """Returns the settings that make a difference, with what null stands for."""
    about = dataclasses.asdict(config) | {"head_dim": config.channels, "query_scalar": config.query_scalar or config.channels}
    about["local_rope_theta"] = config.local_rope_theta or config.rope_theta if config.window is not None else None
    without = (*OF_EXECUTION, "rope_theta") if config.structure.positions == "learned" else OF_EXECUTION
    return {name: value for name, value in about.items() if name not in without}


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": config.width,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.mlp_width,
        "n_positions": config.num_positions,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
    }


def _write_decoder(config: ModelConfig, max_length: int) -> dict[str, Any]:
    activation = ACTIVATIONS[config.structure.activation][0]
    about: dict[str, Any] = {
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.channels,
        "hidden_act": activation,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _write_scaling(config.rope_scaling),
        "max_position_embeddings": max_length,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": config.window,
    }
    if config.family in ("qwen2", "qwen3", "qwen3_moe"):
        about["use_sliding_window"] = config.window is not None
    about |= _write_experts(config)
    if config.family not in ("llama", "mistral", *WITH_EXPERTS) and config.window is not None:
        about["layer_types"] = ["sliding_attention" if local else "full_attention" for local in config.local_layers]
    if config.family.startswith("gemma"):
        about |= {
            "hidden_activation": activation,
            "query_pre_attn_scalar": config.query_scalar or config.channels,
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap,
        }
    if config.family == "gemma3":
        about["rope_local_base_freq"] = config.local_rope_theta or config.rope_theta
    return about


def _write_experts(config: ModelConfig) -> dict[str, Any]:
    if config.family == "mixtral":
        return {"num_local_experts": config.num_experts, "num_experts_per_tok": config.experts_per_token}
    if config.family != "qwen3_moe":
        return {}
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.normalize_routing,
        "moe_intermediate_size": config.mlp_width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    }
