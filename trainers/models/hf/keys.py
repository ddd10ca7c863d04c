"""What each key of a `config.json` may be, by family: it is read, or it changes nothing at the values named here. All others are
refused by name, for nothing is guessed. Measured with the version of transformers in `tests/parity.txt` (`make parity`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from gangway.config.section import did_you_mean
from gangway.text import shortened

Json = Mapping[str, Any]
Plain = int | float | str | bool


class Kind(NamedTuple):
    """The values that a key may have."""

    shown: str
    fits: Callable[[Any], bool]


def _shown(value: Any) -> str:
    """As it stands in the file."""
    text = str({None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value))
    return shortened(text)


class Only:
    """One of some plain values, or null. 0 and false are not the same; 0 and 0.0 are."""

    def __init__(self, *values: Plain):
        self.values = values

    def __call__(self, found: Any) -> bool:
        same = (value == found and isinstance(value, bool) == isinstance(found, bool) for value in self.values)
        return found is None or (isinstance(found, Plain) and any(same))


def only(*values: Plain) -> Kind:
    return Kind(" or ".join(map(_shown, values)), Only(*values))


def or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.shown}, or null", lambda found: found is None or kind.fits(found))


def is_number(found: Any) -> bool:
    return type(found) in (int, float) and math.isfinite(found)


ANY = Kind("anything", lambda found: True)
COUNT = Kind("a whole number of at least 1", lambda found: type(found) is int and found >= 1)
INDEX = Kind("a whole number of at least 0", lambda found: type(found) is int and found >= 0)
NUMBER = Kind("a number", is_number)
POSITIVE = Kind("a positive number", lambda found: is_number(found) and found > 0)
FLAG = Kind("true or false", lambda found: type(found) is bool)
TEXT = Kind("a text", lambda found: isinstance(found, str))
SECTION = Kind("a section of keys and values", lambda found: isinstance(found, Mapping))
TEXTS = Kind("a list of texts", lambda found: isinstance(found, list) and all(isinstance(item, str) for item in found))
ZERO, OFF, ON = only(0), only(False), only(True)
EMPTY = Kind("nothing in it, or null", lambda found: found is None or found in ([], {}))
NULL = Kind("null", lambda found: found is None)


def _flags(found: Any) -> bool:
    return isinstance(found, list) and all(type(item) in (int, bool) and item in (0, 1) for item in found)


def _classes_of_phi3(found: Any) -> bool:
    classes = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    return isinstance(found, Mapping) and found.items() <= classes.items()


Keys = Mapping[str, Kind]

ABOUT_THE_FILE: Keys = dict.fromkeys(
    (
        *("model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path"),
        *("_commit_hash", "_attn_implementation_autoset", "_attn_implementation", "attn_implementation", "_auto_class"),
        *("use_cache", "torchscript", "use_bfloat16", "return_dict", "output_attentions", "output_hidden_states"),
        *("initializer_range", "initializer_factor", "chunk_size_feed_forward", "gradient_checkpointing"),
        *("finetuning_task", "task_specific_params", "problem_type", "id2label", "label2id", "num_labels", "_num_labels"),
        *("tokenizer_class", "prefix", "is_decoder", "cross_attention_hidden_size"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
        *("transformers.js_config", "unsloth_version"),
    ),
    ANY,
)
"""Where the file comes from, how it is computed, and what only other uses of the model read."""
OF_GENERATION: Keys = dict.fromkeys(
    (
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
        *("temperature", "top_k", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty", "length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "bad_words_ids"),
        *("num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id"),
        *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
        *("cache_implementation", "assistant_confidence_threshold", "assistant_lookbehind", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "target_lookbehind"),
    ),
    ANY,
)
"""How texts are generated. Generating here reads `generation_config.json`."""
OF_EVERY_MODEL: Keys = {
    **ABOUT_THE_FILE,
    **OF_GENERATION,
    "is_encoder_decoder": OFF,
    "add_cross_attention": OFF,
    "tie_encoder_decoder": OFF,
    "pruned_heads": EMPTY,
    "quantization_config": EMPTY,
}
DECODER: Keys = {
    **OF_EVERY_MODEL,
    "vocab_size": COUNT,
    "hidden_size": COUNT,
    "num_hidden_layers": COUNT,
    "num_attention_heads": COUNT,
    "num_key_value_heads": or_null(COUNT),
    "intermediate_size": COUNT,
    "hidden_act": TEXT,
    "rms_norm_eps": POSITIVE,
    "tie_word_embeddings": FLAG,
    "max_position_embeddings": COUNT,
    "rope_theta": POSITIVE,
    "rope_scaling": or_null(SECTION),
    "rope_parameters": or_null(SECTION),
    "partial_rotary_factor": only(1),
    "attention_dropout": ZERO,
    "attention_bias": OFF,
    "mlp_bias": OFF,
}
"""Llama and those with its form."""
HEAD_DIM: Keys = {"head_dim": COUNT}
WINDOW: Keys = {"sliding_window": or_null(COUNT)}
OF_EXPERTS: Keys = {
    "num_local_experts": COUNT,
    "num_experts": COUNT,
    "num_experts_per_tok": COUNT,
    # Of the loss, which `loss.load_balancing_weight` sets here.
    "output_router_logits": ANY,
    "router_aux_loss_coef": ANY,
}
QWEN: Keys = {**DECODER, **HEAD_DIM, **WINDOW, "use_sliding_window": FLAG, "max_window_layers": INDEX, "use_mrope": OFF}
BIAS: Keys = {"attention_bias": FLAG}
GEMMA1: Keys = {
    **DECODER,
    **HEAD_DIM,
    **BIAS,
    "hidden_act": TEXT,
    "hidden_activation": only("gelu_pytorch_tanh"),
    "use_bidirectional_attention": OFF,
}
GEMMA: Keys = {
    **DECODER,
    **HEAD_DIM,
    **WINDOW,
    **BIAS,
    "hidden_act": only("gelu_pytorch_tanh"),
    "hidden_activation": TEXT,
    "layer_types": or_null(TEXTS),
    "query_pre_attn_scalar": COUNT,
    "final_logit_softcapping": or_null(POSITIVE),
    "attn_logit_softcapping": or_null(POSITIVE),
    "use_bidirectional_attention": OFF,
}
DROPOUT_OF_GPT2 = only(0, 0.1)
"""0.1 is in every published file. It is of training alone, and training here drops nothing."""
OF_FAMILY: Mapping[str, Keys] = {
    "llama": {
        **DECODER,
        **BIAS,
        "mlp_bias": FLAG,
        "head_dim": or_null(COUNT),
        "pretraining_tp": ANY,
        "is_llama_config": ON,
        "rope_interleaved": OFF,
    },
    "mistral": {**DECODER, "head_dim": or_null(COUNT), **WINDOW, "layer_types": or_null(TEXTS)},
    "ministral": {**DECODER, **HEAD_DIM, **WINDOW, "layer_types": or_null(TEXTS)},
    "qwen2": {**QWEN, "layer_types": or_null(TEXTS)},
    "qwen3": {**QWEN, **BIAS, "layer_types": or_null(TEXTS)},
    "gemma": GEMMA1,
    "gemma2": {**GEMMA, "sliding_window_size": ANY},
    "gemma3": {
        **GEMMA,
        "attn_logit_softcapping": NULL,
        "sliding_window_pattern": COUNT,
        "_sliding_window_pattern": ANY,
        "rope_local_base_freq": POSITIVE,
    },
    "granite": {
        **DECODER,
        **BIAS,
        **HEAD_DIM,
        "mlp_bias": FLAG,
        "embedding_multiplier": POSITIVE,
        "residual_multiplier": POSITIVE,
        "logits_scaling": POSITIVE,
        "attention_multiplier": POSITIVE,
    },
    "smollm3": {
        **DECODER,
        **BIAS,
        **HEAD_DIM,
        "mlp_bias": FLAG,
        "pretraining_tp": ANY,
        "no_rope_layers": Kind("a 0 or a 1 for each layer, or null", lambda found: found is None or _flags(found)),
        "no_rope_layer_interval": COUNT,
        "use_sliding_window": OFF,
        "sliding_window": ANY,
        "max_window_layers": ANY,
        "layer_types": Kind(
            "full_attention alone, or null",
            lambda found: found is None or (TEXTS.fits(found) and set(found) == {"full_attention"}),
        ),
    },
    "olmo2": {**DECODER, **BIAS, **HEAD_DIM},
    "olmo3": {**DECODER, **BIAS, **HEAD_DIM, **WINDOW, "layer_types": or_null(TEXTS)},
    "phi3": {
        **DECODER,
        **HEAD_DIM,
        **WINDOW,
        "embd_pdrop": ZERO,
        "resid_pdrop": ZERO,
        # Of scaled positions alone.
        "original_max_position_embeddings": ANY,
        "auto_map": Kind("the classes of Phi-3 that transformers has", _classes_of_phi3),
    },
    "gpt2": {
        **OF_EVERY_MODEL,
        "vocab_size": COUNT,
        "n_embd": COUNT,
        "n_layer": COUNT,
        "n_head": COUNT,
        "n_positions": COUNT,
        "n_ctx": ANY,
        "n_inner": or_null(COUNT),
        "hidden_size": COUNT,
        "num_hidden_layers": COUNT,
        "num_attention_heads": COUNT,
        "max_position_embeddings": COUNT,
        "activation_function": TEXT,
        "layer_norm_epsilon": POSITIVE,
        "tie_word_embeddings": FLAG,
        "attn_pdrop": DROPOUT_OF_GPT2,
        "embd_pdrop": DROPOUT_OF_GPT2,
        "resid_pdrop": DROPOUT_OF_GPT2,
        "scale_attn_weights": ON,
        "scale_attn_by_inverse_layer_idx": OFF,
        "reorder_and_upcast_attn": ANY,
        **dict.fromkeys(("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"), ANY),
        "summary_use_proj": ANY,
    },
    "mixtral": {
        **DECODER,
        "head_dim": or_null(COUNT),
        **WINDOW,
        **OF_EXPERTS,
        "layer_types": or_null(TEXTS),
        "router_jitter_noise": ZERO,
        "norm_topk_prob": ON,
    },
    "qwen3_moe": {
        **QWEN,
        **BIAS,
        **OF_EXPERTS,
        "layer_types": or_null(TEXTS),
        "intermediate_size": ANY,
        "max_window_layers": ANY,
        "moe_intermediate_size": COUNT,
        "norm_topk_prob": FLAG,
        "decoder_sparse_step": only(1)._replace(shown="1: experts in every layer"),
        "mlp_only_layers": EMPTY._replace(shown="[]: experts in every layer"),
    },
}
"""The keys of a decoder, by `model.family`."""
ALIASES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
"""Keys that mean another one, by family."""

ROPE: Keys = {"rope_type": TEXT, "type": TEXT, "rope_theta": POSITIVE, "partial_rotary_factor": only(1)}
OF_ROPE_TYPE: Mapping[str, Keys] = {
    "default": ROPE,
    "linear": {**ROPE, "factor": POSITIVE},
    "llama3": {
        **ROPE,
        "factor": POSITIVE,
        "low_freq_factor": POSITIVE,
        "high_freq_factor": POSITIVE,
        "original_max_position_embeddings": COUNT,
    },
    "yarn": {
        **ROPE,
        "factor": POSITIVE,
        "original_max_position_embeddings": COUNT,
        "beta_fast": or_null(POSITIVE),
        "beta_slow": or_null(POSITIVE),
        "attention_factor": or_null(POSITIVE),
        "mscale": or_null(POSITIVE),
        "mscale_all_dim": or_null(POSITIVE),
        "truncate": FLAG,
    },
}
"""The keys of `rope_parameters` and `rope_scaling`."""
NEEDED_OF_ROPE: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Those that must be there, by `rope_type`."""

ENCODER: Keys = {
    **OF_EVERY_MODEL,
    "hidden_size": COUNT,
    "intermediate_size": COUNT,
    "num_hidden_layers": COUNT,
    "num_attention_heads": COUNT,
    "image_size": COUNT,
    "patch_size": COUNT,
    "num_channels": COUNT,
    "layer_norm_eps": POSITIVE,
    "hidden_act": TEXT,
}
OF_ENCODER: Mapping[str, Keys] = {
    "vit": {
        **ENCODER,
        "hidden_dropout_prob": ZERO,
        "attention_probs_dropout_prob": ZERO,
        "qkv_bias": ON,
        **dict.fromkeys(("encoder_stride", "pooler_act", "pooler_output_size"), ANY),
    },
    "siglip": {**ENCODER, "attention_dropout": ZERO, "vision_use_head": FLAG, "projection_dim": ANY},
}
"""The keys of an encoder of images, by `vision.family`."""
SIGLIP: Keys = {**OF_EVERY_MODEL, "text_config": ANY, "vision_config": SECTION}
"""Of both encoders: that of texts is not read."""
IMAGE_TEXT: Keys = {
    **OF_EVERY_MODEL,
    "text_config": SECTION,
    "vision_config": SECTION,
    "mm_tokens_per_image": COUNT,
    "image_token_index": INDEX,
    "image_token_id": INDEX,
    "tie_word_embeddings": FLAG,
    **dict.fromkeys(("boi_token_index", "boi_token_id", "eoi_token_index", "eoi_token_id"), ANY),
}
"""Of Gemma 3 with images."""
TEXT_PART: Keys = {
    **OF_EVERY_MODEL,
    "text_config": SECTION,
    "tie_word_embeddings": FLAG,
    **dict.fromkeys(("vision_config", "image_token_index", "image_token_id", "projector_hidden_act"), ANY),
    **dict.fromkeys(("vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size"), ANY),
}
"""Of a model with images of which the decoder alone is read. The other keys are of its encoder."""


def problems(found: Json, keys: Keys, of: str, within: str = "") -> Iterator[str]:
    """Yields a line for each key that is not of `keys`, or has a value that is none of its kind. `of`: whose keys they are;
    `within`: the section that has them."""
    for name, value in found.items():
        kind = keys.get(name)
        if kind is None:
            yield (
                f"{within}{name} = {_shown(value)}: {of} has no such key here, and it may change what the model computes; if it "
                f"does not, delete it from the file{did_you_mean(name, keys, cutoff=0.85)}"
            )
        elif not kind.fits(value):
            yield f"{within}{name} = {_shown(value)}: expected {kind.shown} in {of}"


def without_aliases(family: str, found: Json) -> dict[str, Any]:
    """Returns the keys under their own names. Raises ValueError if a key and its other name say different things."""
    given = dict(found)
    for alias, name in ALIASES.get(family, {}).items():
        if alias in given:
            value = given.pop(alias)
            if given.setdefault(name, value) != value:
                raise ValueError(f"{alias} = {value}, {name} = {given[name]}: both say the same thing; delete one of them")
    return given
