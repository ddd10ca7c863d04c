"""Random models within what each family allows, drawn by the tables of the families and of the keys of a `config.json`: for
`make parity` and for the tests of configurations."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainers.config import ModelConfig
from trainers.config.families import FAMILIES
from trainers.config.model import MULTIPLIERS, RopeScaling
from trainers.models.hf import keys
from trainers.models.hf.config import FAMILY_OF, PAD_IS_NULL

MODEL_TYPE_OF = {family: kind for kind, family in FAMILY_OF.items()}
VOCABULARY = 64
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
HARMLESS: dict[str, Any] = {
    "architectures": None,
    "dtype": "float32",
    "torch_dtype": "float32",
    "_attn_implementation": "eager",
    "attn_implementation": "eager",
    "transformers_version": "4.40.0",
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "label2id": {"a": 0, "b": 1, "c": 2},
    "num_labels": 3,
    "initializer_range": 0.01,
    "problem_type": None,
    "bos_token_id": 5,
    "eos_token_id": [3, 4],
    "pad_token_id": 6,
    "output_attentions": False,
    "output_hidden_states": False,
    "return_dict": True,
    "task_specific_params": {"text-generation": {"max_length": 50}},
    "summary_type": "last",
    "summary_activation": "tanh",
    "summary_use_proj": False,
    "summary_proj_to_labels": False,
    "intermediate_size": 7,
    "output_router_logits": False,
    "use_cache": False,
    "router_aux_loss_coef": 0.5,
    "router_jitter_noise": 0.0,
    "cache_implementation": "hybrid",
    "_auto_class": None,
    "sliding_window": 5,
    "reorder_and_upcast_attn": True,
    "original_max_position_embeddings": 16,
}
"""Values of keys that may have any. Others have 1 here."""


class Draw:
    """Draws by a seed: the same for the same seed."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def one(self, *values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def now_and_then(self, probability: float = 0.5) -> bool:
        return bool(self.rng.random() < probability)


def model(seed: int) -> ModelConfig:
    """Returns a random model of a random family."""
    draw = Draw(seed)
    family = list(FAMILIES)[seed % len(FAMILIES)]
    has = FAMILIES[family].settings
    heads = draw.one(2, 4)
    settings: dict[str, Any] = {
        "family": family,
        "vocab_size": VOCABULARY,
        "num_layers": draw.one(1, 2, 3, 4),
        "num_heads": heads,
        "num_kv_heads": draw.one(1, 2, heads) if "num_kv_heads" in has else heads,
        "width": 8 * heads,
        "mlp_width": 24,
        "norm_eps": draw.one(1e-5, 1e-6, 0.01),
        "tie_embeddings": draw.now_and_then(),
    }
    if "head_dim" in has:
        settings["head_dim"] = draw.one(None, 4, 10)
        if settings["head_dim"] and not FAMILIES[family].whole_heads:
            settings["width"] = draw.one(8 * heads, 27)
    return ModelConfig(**settings, **_optional(draw, has))


def _optional(draw: Draw, has: frozenset[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if "num_positions" in has:
        settings["num_positions"] = 64
    if "num_experts" in has:
        settings |= {"num_experts": draw.one(3, 4), "experts_per_token": draw.one(1, 2, 3)}
    if "normalize_routing" in has:
        settings["normalize_routing"] = draw.now_and_then()
    if "rope_theta" in has:
        settings["rope_theta"] = draw.one(10_000.0, 50, 1e6)
    if "rope_scaling" in has:
        settings["rope_scaling"] = draw.one(
            None,
            RopeScaling(kind="linear", factor=draw.one(2, 4.5)),
            RopeScaling(factor=4, original_length=draw.one(8, 32)),
            RopeScaling(
                kind="yarn", factor=4, original_length=16, beta_fast=draw.one(32, 3.0), attention_factor=draw.one(None, 2)
            ),
        )
    if "window" in has and draw.now_and_then(0.7):
        settings["window"] = draw.one(1, 3, 5)
        if "global_every" in has:
            settings["global_every"] = draw.one(None, 2, 3)
        if "local_rope_theta" in has and (settings["rope_scaling"] or draw.now_and_then()):
            settings["local_rope_theta"] = draw.one(10.0, 10_000)
    if "unturned_every" in has:
        settings["unturned_every"] = draw.one(None, 1, 2, 3)
    settings |= {name: draw.now_and_then() for name in ("attention_bias", "mlp_bias") if name in has}
    settings |= {name: draw.one(None, 3, 0.7) for name in MULTIPLIERS if name in has}
    for name, values in (
        ("query_scalar", (None, 3.0, 24)),
        ("attention_softcap", (None, 1.5, 2)),
        ("logit_softcap", (None, 2, 1.5)),
    ):
        if name in has:
            settings[name] = draw.one(*values)
    return settings


def file(seed: int) -> dict[str, Any]:
    """Returns a random `config.json` of a random family, whose keys are all understood."""
    draw = Draw(seed)
    family = list(FAMILIES)[seed % len(FAMILIES)]
    found = _gpt2(draw) if family == "gpt2" else _decoder(draw, family)
    found |= {name: value for name, value in harmless(family).items() if name not in found and draw.now_and_then(0.2)}
    names = list(found)
    draw.rng.shuffle(names)
    return {"model_type": MODEL_TYPE_OF[family], **{name: found[name] for name in names}}


def harmless(family: str) -> dict[str, Any]:
    """Returns all keys that change nothing in a family, with a value each."""
    values: dict[str, Any] = {}
    for name, kind in keys.OF_FAMILY[family].items():
        if name == "model_type":
            continue
        if kind is keys.ANY:
            values[name] = HARMLESS.get(name, 1)
        elif isinstance(kind.fits, keys.Only):
            values[name] = HARMLESS.get(name, kind.fits.values[-1])
        elif kind in (keys.EMPTY, keys.NULL):
            values[name] = None
    return values


def _gpt2(draw: Draw) -> dict[str, Any]:
    alias = draw.now_and_then()
    found: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size" if alias else "n_embd": 32,
        "num_hidden_layers" if alias else "n_layer": draw.one(1, 2, 3),
        "num_attention_heads" if alias else "n_head": draw.one(1, 2, 4),
        "max_position_embeddings" if alias else "n_positions": 64,
    }
    optional = {
        "n_inner": draw.one(None, 20),
        "layer_norm_epsilon": draw.one(1e-5, 0.01),
        "activation_function": draw.one("gelu_new", "gelu_pytorch_tanh"),
        "tie_word_embeddings": draw.now_and_then(),
    }
    return found | {name: value for name, value in optional.items() if draw.now_and_then()}


def _decoder(draw: Draw, family: str) -> dict[str, Any]:
    known, heads = keys.OF_FAMILY[family], draw.one(2, 4)
    layers = draw.one(1, 2, 3, 4)
    found: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8 * heads,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": draw.one(1, 2, heads, *((None,) if family in ("llama", "qwen2", "qwen3") else ())),
        "max_position_embeddings": draw.one(128, 8),
    }
    activations = ("gelu_pytorch_tanh", "gelu_new") if family in ("gemma2", "gemma3") else ("silu", "swish")
    if family == "gemma":
        activations = ("gelu", "gelu_pytorch_tanh")
    optional = {
        "hidden_activation" if family in ("gemma2", "gemma3") else "hidden_act": draw.one(*activations),
        "attention_bias": draw.now_and_then() and "attention_bias" in FAMILIES[family].settings,
        "mlp_bias": draw.now_and_then() and "mlp_bias" in FAMILIES[family].settings,
        "embedding_multiplier": draw.one(3.0, 0.7),
        "residual_multiplier": draw.one(2.0, 0.7),
        "logits_scaling": draw.one(3.0, 0.7),
        "attention_multiplier": draw.one(0.5, 0.125),
        "head_dim": draw.one(4, 10),
        "rms_norm_eps": draw.one(1e-5, 0.01),
        "tie_word_embeddings": draw.now_and_then(),
        "query_pre_attn_scalar": draw.one(3, 24),
        "final_logit_softcapping": draw.one(None, 2.0),
        "attn_logit_softcapping": None if family == "gemma3" else draw.one(None, 2.0),
        "norm_topk_prob": True if family == "mixtral" else draw.now_and_then(),
        "decoder_sparse_step": 1,
        "mlp_only_layers": draw.one([], None),
    }
    found |= {name: value for name, value in optional.items() if name in known and draw.now_and_then(0.6)}
    if family == "ministral":
        # transformers builds none without it.
        found.setdefault("head_dim", 10)
    if "num_experts" in known:
        found[draw.one("num_experts", "num_local_experts")] = draw.one(3, 4)
        found["num_experts_per_tok"] = draw.one(1, 2)
    if family == "qwen3_moe":
        found["moe_intermediate_size"] = draw.one(12, 20)
    if family == "ministral":
        found["head_dim"] = draw.one(4, 10)
    if family in PAD_IS_NULL:
        found["pad_token_id"] = 0
    if family == "smollm3":
        every = draw.one(1, 2, 3, 9)
        flags = [int((layer + 1) % every != 0) for layer in range(layers)]
        found |= draw.one({}, {"no_rope_layer_interval": every}, {"no_rope_layers": flags, "no_rope_layer_interval": 2})
        found |= draw.one({}, {"layer_types": ["full_attention"] * layers})
    return found | _windows(draw, family, layers) | _ropes(draw, family)


def _windows(draw: Draw, family: str, layers: int) -> dict[str, Any]:
    known = keys.OF_FAMILY[family]
    if "window" not in FAMILIES[family].settings:
        return {}
    window = draw.one(1, 3, 5)
    found: dict[str, Any] = {"sliding_window": window}
    if family in ("mistral", "mixtral", "phi3"):
        found["sliding_window"] = draw.one(window, None)
    if "use_sliding_window" in known:
        found["use_sliding_window"] = draw.now_and_then(0.7)
    every = draw.one(1, 2, 3)
    kinds = ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(layers)]
    if family == "ministral" and draw.now_and_then():
        found["layer_types"] = kinds
    if family in ("gemma2", "gemma3", "olmo3") or (family in ("qwen2", "qwen3") and found["use_sliding_window"]):
        form = draw.one("layer_types", "pattern")
        if form == "layer_types":
            found["layer_types"] = kinds
        elif family == "gemma3":
            found["sliding_window_pattern"] = every
        elif family in ("qwen2", "qwen3"):
            found["max_window_layers"] = draw.one(0, layers)
    return found


def _ropes(draw: Draw, family: str) -> dict[str, Any]:
    theta, two_ropes = draw.one(10_000.0, 50.0, 500), FAMILIES[family].has_two_ropes
    llama3 = {**LLAMA3, **({"original_max_position_embeddings": 16} if draw.now_and_then(0.7) else {})}
    yarn = {"rope_type": "yarn", "factor": 4.0, **draw.one({}, {"original_max_position_embeddings": 16}, {"beta_fast": 3.0})}
    yarn |= draw.one({}, {"attention_factor": 2.0}, {"mscale": 2.0, "mscale_all_dim": 0.5}, {"truncate": two_ropes})
    scaling = draw.one(
        {"rope_type": "default"}, {draw.one("type", "rope_type"): "linear", "factor": draw.one(2.0, 4)}, llama3, yarn
    )
    if "rope_scaling" not in FAMILIES[family].settings:
        scaling = {"rope_type": "default"}
    old = {"rope_theta": theta, "rope_scaling": draw.one(None, {}, scaling)}
    new = {"rope_parameters": {**scaling, **({"rope_theta": theta} if draw.now_and_then() else {})}}
    if two_ropes:
        # The older name is not read there.
        old["rope_scaling"] = draw.one(None, {}, {("rope_type" if key == "type" else key): scaling[key] for key in scaling})
        if family == "gemma3":
            old["rope_local_base_freq"] = draw.one(10.0, 10_000.0)
        else:
            old["rope_theta"] = 500_000.0
        local = {"rope_type": "default", "rope_theta": draw.one(10.0, 100.0)}
        new = {"rope_parameters": {"full_attention": new["rope_parameters"], "sliding_attention": draw.one(local, None, {})}}
        return draw.one({}, old, new)
    # Of both forms in one file, the first counts.
    return draw.one({}, old, new, {"rope_theta": theta, **new}, {**new, **old})
