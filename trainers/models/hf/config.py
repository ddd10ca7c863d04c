"""The configuration of a decoder in the form of Hugging Face (`config.json`), from transformers 4 and 5 alike."""

from __future__ import annotations

from typing import Any

from gangway.errors import UsageError
from trainers.config import ModelConfig
from trainers.config.families import misspelt
from trainers.config.model import MULTIPLIERS, RopeScaling, all_but_every
from trainers.models.hf.computed import (
    ACTIVATIONS,
    DEFAULTS,
    FULL,
    SLIDING,
    WINDOW_IN_ALL,
    Json,
    Layer,
    Meaning,
    completed,
    differences,
    of_file,
    of_model,
    query_scalar_of,
    ropes,
    scaling_of,
    theta_of,
)

FAMILY_OF = {
    "llama": "llama",
    "mistral": "mistral",
    "ministral": "ministral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "granite": "granite",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
}
"""`model.family` by `model_type`."""
ARCHITECTURE_OF = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

PAD_IS_NULL = ("smollm3", "phi3")
"""What their files leave out is a token that a smaller vocabulary does not have, and the model does not load."""


def read(found: Json) -> ModelConfig:
    """Returns the configuration of the decoder that a `config.json` describes. Raises UsageError that names all that is not
    understood: nothing is guessed."""
    kind = str(found.get("model_type"))
    if kind not in FAMILY_OF:
        raise UsageError(f"model_type = {kind!r}: expected one of {', '.join(FAMILY_OF)}{misspelt(kind, FAMILY_OF)}")
    family = FAMILY_OF[kind]
    given = completed(family, found)
    try:
        meant = of_file(family, given)
        config = _gpt2(given) if family == "gpt2" else _decoder(family, given, meant)
    except KeyError as error:
        raise UsageError(f"{error.args[0]} is missing: a configuration of model_type {kind} has it") from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    if lost := list(differences(meant, of_model(config))):
        raise UsageError(f"a model of the family {family} with {'; '.join(lost)}: none here computes that")
    return config


def _decoder(family: str, given: Json, meant: Meaning) -> ModelConfig:
    window, global_every = _window(meant.layers)
    sections = list(ropes(family, given).values())
    has_two = window is not None and len(sections) == 2
    return ModelConfig(
        family=family,
        vocab_size=meant.vocab_size,
        width=meant.width,
        num_layers=len(meant.layers),
        num_heads=meant.num_heads,
        num_kv_heads=meant.num_kv_heads,
        head_dim=given.get("head_dim"),
        mlp_width=meant.mlp_width,
        num_experts=meant.num_experts,
        experts_per_token=meant.experts_per_token,
        normalize_routing=meant.normalize_routing,
        rope_theta=theta_of(sections[0], given["rope_theta"]),
        rope_scaling=scaling_of(sections[0], given),
        local_rope_theta=theta_of(sections[1], given["rope_local_base_freq"]) if has_two else None,
        unturned_every=_unturned_every(meant.layers),
        window=window,
        global_every=global_every,
        query_scalar=query_scalar_of(given),
        attention_softcap=meant.attention_softcap,
        logit_softcap=meant.logit_softcap,
        attention_bias=meant.attention_bias,
        mlp_bias=meant.mlp_bias,
        **{name: getattr(meant, name) for name in MULTIPLIERS if getattr(meant, name) != 1.0},
        norm_eps=meant.norm_eps,
        tie_embeddings=meant.tie_embeddings,
    )


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


def _window(layers: tuple[Layer, ...]) -> tuple[int | None, int | None]:
    """Returns (window, global_every). Raises UsageError if the layers with a window are not those of any such pair."""
    local = tuple(layer.window is not None for layer in layers)
    window = next((layer.window for layer in layers if layer.window is not None), None)
    if window is None:
        return None, None
    kinds = ", ".join(SLIDING if one else FULL for one in local)
    problem = f"layer_types: {kinds}: expected a full layer after every so many with a window, and no others"
    return window, _exception(local, problem)


def _unturned_every(layers: tuple[Layer, ...]) -> int | None:
    """Returns `unturned_every`. Raises UsageError if the layers without rotary positions are not those of any."""
    turned = tuple(layer.rope_theta is not None for layer in layers)
    shown = ", ".join(str(int(one)) for one in turned)
    return _exception(turned, f"no_rope_layers: {shown}: expected a 0 after every so many layers with a 1, and no others")


def _exception(layers: tuple[bool, ...], problem: str) -> int | None:
    """Returns the number of which every so manieth layer alone is False (`all_but_every`). Raises UsageError(`problem`)."""
    for every in (None, *range(1, len(layers) + 1)):
        if layers == all_but_every(every, len(layers)):
            return every
    raise UsageError(problem)


def write(config: ModelConfig, *, max_length: int, dtype: str) -> dict[str, Any]:
    """Returns `config.json`, in the form of transformers 4, which version 5 reads too. Raises UsageError if transformers would
    compute something else of it."""
    family = config.family
    about: dict[str, Any] = {
        "architectures": [ARCHITECTURE_OF[family]],
        "model_type": next(kind for kind, name in FAMILY_OF.items() if name == family),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }
    about |= _write_gpt2(config) if family == "gpt2" else _write_decoder(config, max_length)
    if lost := list(differences(of_model(config), of_file(family, completed(family, about)))):
        raise UsageError(f"the family {family} with {'; '.join(lost)}: transformers cannot compute that")
    return about


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": config.width,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.mlp_width,
        "n_positions": config.num_positions,
        "layer_norm_epsilon": float(config.norm_eps),
        "activation_function": "gelu_new",
        # As the model was trained. What is left out is 0.1.
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _write_decoder(config: ModelConfig, max_length: int) -> dict[str, Any]:
    """transformers refuses a whole `float` where it wants an `int`, and the other way round."""
    activation = ACTIVATIONS[config.structure.activation][0]
    return {
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.channels,
        "hidden_activation" if config.family in ("gemma2", "gemma3") else "hidden_act": activation,
        "rms_norm_eps": float(config.norm_eps),
        "rope_theta": float(config.rope_theta),
        "rope_scaling": _write_scaling(config.rope_scaling),
        "max_position_embeddings": max(max_length, _stretched(config.rope_scaling)),
        **_write_window(config),
        **_write_experts(config),
        **{name: getattr(config, name) for name in ("attention_bias", "mlp_bias") if name in config.structure.settings},
        **({"pad_token_id": None} if config.family in PAD_IS_NULL else {}),
        **(_write_ropes_of_olmo3(config) if config.family == "olmo3" else {}),
        **({"no_rope_layers": list(map(int, config.turned_layers))} if config.family == "smollm3" else {}),
        **(_write_gemma(config) if config.family in ("gemma2", "gemma3") else {}),
        **(_write_granite(config) if config.family == "granite" else {}),
    }


def _stretched(scaling: RopeScaling | None) -> int:
    """Returns the length of the texts that positions are stretched for; 0 if nothing says it."""
    return 0 if scaling is None or scaling.kind == "linear" else round(scaling.factor * scaling.original_length)


def _write_window(config: ModelConfig) -> dict[str, Any]:
    if "window" not in config.structure.settings:
        return {}
    about: dict[str, Any] = {"sliding_window": config.window}
    if config.family.startswith("qwen"):
        about["use_sliding_window"] = config.window is not None
    elif config.window is None and config.family not in WINDOW_IN_ALL:
        # No layer has it, and still transformers wants a number.
        about["sliding_window"] = DEFAULTS[config.family]["sliding_window"]
    if config.family not in WINDOW_IN_ALL:
        about["layer_types"] = [SLIDING if local else FULL for local in config.local_layers]
    return about


def _write_ropes_of_olmo3(config: ModelConfig) -> dict[str, Any]:
    """The form of transformers 4 has no other place for these numbers."""
    usual, local = DEFAULTS["olmo3"]["rope_theta"], config.local_rope_theta or config.rope_theta
    if config.rope_theta == local == usual:
        return {}
    full = {"rope_type": "default", **(_write_scaling(config.rope_scaling) or {}), "rope_theta": float(config.rope_theta)}
    near = {"rope_type": "default", "rope_theta": float(local)}
    return {"rope_scaling": None, "rope_parameters": {FULL: full, SLIDING: near}}


def _write_granite(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_multiplier": float((config.query_scalar or config.channels) ** -0.5),
        "embedding_multiplier": float(config.embedding_multiplier or 1.0),
        "residual_multiplier": float(config.residual_multiplier or 1.0),
        "logits_scaling": float(config.logit_divisor or 1.0),
    }


def _write_gemma(config: ModelConfig) -> dict[str, Any]:
    about: dict[str, Any] = {
        "query_pre_attn_scalar": int(config.query_scalar or config.channels),
        "attn_logit_softcapping": _or_none(config.attention_softcap),
        "final_logit_softcapping": _or_none(config.logit_softcap),
    }
    if config.family == "gemma3":
        about["rope_local_base_freq"] = float(config.local_rope_theta or config.rope_theta)
    return about


def _or_none(value: float | None) -> float | None:
    return None if value is None else float(value)


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
        return {"rope_type": "linear", "factor": float(scaling.factor)}
    if scaling.kind == "yarn":
        of_attention = {} if scaling.attention_factor is None else {"attention_factor": float(scaling.attention_factor)}
        return {
            "rope_type": "yarn",
            "factor": float(scaling.factor),
            "original_max_position_embeddings": scaling.original_length,
            "beta_fast": float(scaling.beta_fast),
            "beta_slow": float(scaling.beta_slow),
            "truncate": scaling.truncate,
            **of_attention,
        }
    return {
        "rope_type": "llama3",
        "factor": float(scaling.factor),
        "low_freq_factor": float(scaling.low_freq_factor),
        "high_freq_factor": float(scaling.high_freq_factor),
        "original_max_position_embeddings": scaling.original_length,
    }
