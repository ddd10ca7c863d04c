"""What a decoder computes, layer by layer: the form in which a configuration of ours and a `config.json` are compared; and what
transformers computes of such a file, family by family, as its own code reads it (`make parity` holds this against transformers
itself)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from gangway.errors import UsageError
from trainers.config import ModelConfig
from trainers.config.families import FAMILIES
from trainers.config.model import MULTIPLIERS, RopeScaling
from trainers.models.hf import keys
from trainers.models.hf.keys import Json


class Layer(NamedTuple):
    """The attention of a layer."""

    window: int | None
    rope_theta: float | None
    """None: it turns nothing."""
    rope_scaling: RopeScaling | None


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """All that the logits depend on but the weights, with no default left open."""

    family: str
    vocab_size: int
    width: int
    num_heads: int
    num_kv_heads: int
    channels: int
    mlp_width: int
    layers: tuple[Layer, ...]
    query_scalar: float
    """The scores of the attention are divided by its square root."""
    norm_eps: float
    tie_embeddings: bool
    num_positions: int | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    normalize_routing: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0


def of_model(config: ModelConfig) -> Meaning:
    """Returns what `trainers.models.decoder.Decoder` computes."""

    def layer(local: bool, turned: bool) -> Layer:
        window = config.window if local else None
        if not turned:
            return Layer(window, None, None)
        if local and config.local_rope_theta is not None:
            return Layer(window, config.local_rope_theta, None)
        return Layer(window, config.rope_theta, config.rope_scaling)

    named: dict[str, Any] = {item.name: getattr(config, item.name, None) for item in fields(Meaning)}
    named |= {name: getattr(config, name) or 1.0 for name in MULTIPLIERS}
    named["layers"] = tuple(map(layer, config.local_layers, config.turned_layers))
    named["query_scalar"] = config.query_scalar or config.channels
    return Meaning(**named)


def differences(found: Meaning, expected: Meaning) -> Iterator[str]:
    """Yields what differs, as `name = found, and not expected`."""
    for item in fields(Meaning):
        values: tuple[Any, Any] = getattr(found, item.name), getattr(expected, item.name)
        if values[0] != values[1] and not _nearly(*values):
            yield f"{item.name} = {values[0]}, and not {values[1]}"


def _nearly(one: Any, other: Any) -> bool:
    # Granite has another form of the scale: what is written and read again may differ in the last digit.
    return isinstance(one, int | float) and isinstance(other, int | float) and math.isclose(one, other, rel_tol=1e-12)


SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu", "tie_word_embeddings": False}
QWEN = {**LLAMA, "num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
GEMMA = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
DEFAULTS: Mapping[str, Json] = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "num_key_value_heads": 8, "sliding_window": 4096},
    "ministral": {**LLAMA, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": QWEN,
    "qwen3": {**QWEN, "head_dim": 128},
    "gemma": {
        **LLAMA,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "gemma2": {**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    # With sizes: the files of Gemma 3 with images leave out those of 4B.
    "gemma3": {
        **GEMMA,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
    "granite": {
        **LLAMA,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "attention_multiplier": 1.0,
    },
    "smollm3": {
        **LLAMA,
        "rope_theta": 2_000_000.0,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    "olmo2": {**LLAMA, "rms_norm_eps": 1e-5},
    "olmo3": {
        **LLAMA,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        # No key of its files: what a section of the layers with a window leaves out.
        "rope_local_base_freq": 500_000.0,
        "sliding_window": 4096,
    },
    "phi3": {**LLAMA, "rms_norm_eps": 1e-5},
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
        **LLAMA,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        **QWEN,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
}
"""What a file may leave out, for transformers leaves out its own defaults."""
ACTIVATIONS = {"silu": ("silu", "swish"), "gelu": ("gelu_pytorch_tanh", "gelu_new")}


def completed(family: str, found: Json) -> dict[str, Any]:
    """Returns all keys of a file, under their own names and with the defaults. Raises UsageError that names each key that is not
    understood."""
    known = keys.OF_FAMILY[family]
    wrong = list(keys.problems(found, known, f"the family {family}"))
    # What is wrong is reported once: the default is in its place.
    right = {name: value for name, value in found.items() if name in known and known[name].fits(value)}
    try:
        given = {**DEFAULTS[family], **keys.without_aliases(family, right)}
    except ValueError as error:
        raise UsageError("\n".join([*wrong, str(error)])) from error
    if wrong := [*wrong, *_problems(family, given)]:
        raise UsageError("\n".join(wrong))
    return given


def _problems(family: str, given: Json) -> Iterator[str]:
    allowed = ACTIVATIONS[FAMILIES[family].activation]
    name = {"gpt2": "activation_function", "gemma2": "hidden_activation", "gemma3": "hidden_activation"}.get(family, "hidden_act")
    if family == "gemma":
        # The files of Gemma 1 say so and mean the approximation.
        allowed = ("gelu", "gelu_pytorch_tanh")
    if given[name] not in allowed:
        yield f"{name}: the activation {given[name]!r}: expected {' or '.join(allowed)} in the family {family}"
    if family != "gpt2":
        yield from _problems_of_ropes(family, given)
        yield from _problems_of_layers(family, given)


def _problems_of_ropes(family: str, given: Json) -> Iterator[str]:
    if FAMILIES[family].has_two_ropes and given.get("rope_parameters"):
        if given.get("rope_scaling"):
            yield "rope_scaling, rope_parameters: both say how positions are scaled; delete one of them"
        if other := sorted(set(given["rope_parameters"]) - {FULL, SLIDING}):
            yield f"rope_parameters: {', '.join(other)}: expected {FULL} and {SLIDING}, one section each"
    yield from _problem_of_theta(family, given)
    for where, rope in ropes(family, given).items():
        if not isinstance(rope, Mapping):
            yield f"{where} = {rope!r}: expected a section of keys and values"
            continue
        kind = kind_of(rope)
        if kind not in keys.OF_ROPE_TYPE and "rope_scaling" in FAMILIES[family].settings:
            yield f"{where}: rope_type = {kind!r}: expected {', '.join(keys.OF_ROPE_TYPE)}"
        elif kind != "default" and "rope_scaling" not in FAMILIES[family].settings:
            yield f"{where}: rope_type = {kind!r}: expected default in the family {family}, whose positions are not scaled here"
        elif kind != "default" and where.endswith(SLIDING):
            yield f"{where}: rope_type = {kind!r}: expected default: only the other layers have scaled positions here"
        else:
            yield from keys.problems(rope, keys.OF_ROPE_TYPE[kind], f"rope_type {kind}", f"{where}.")
            for name in sorted({*keys.NEEDED_OF_ROPE[kind]} - set(rope)):
                yield f"{where}.{name} is missing: rope_type {kind} needs it"
        if FAMILIES[family].has_two_ropes and where == "rope_scaling" and "rope_type" not in rope and kind != "default":
            yield f"rope_scaling.type = {kind!r}: transformers reads rope_type alone in the family {family}; name it rope_type"
        if {"type", "rope_type"} <= set(rope) and rope["type"] != rope["rope_type"]:
            yield f"{where}: rope_type = {rope['rope_type']!r}, type = {rope['type']!r}: both say the same; delete one of them"


def _problem_of_theta(family: str, given: Json) -> Iterator[str]:
    usual, rope = DEFAULTS[family]["rope_theta"], next(iter(ropes(family, given).values()))
    if family == "olmo3" and given["rope_theta"] != usual and isinstance(rope, Mapping) and "rope_theta" not in rope:
        yield (
            f"rope_theta = {given['rope_theta']}: transformers 4 reads it for all layers, and 5 for those without a window alone "
            f"(the others have {usual}); write rope_parameters with the sections {FULL} and {SLIDING}, each with its rope_theta"
        )


def _problems_of_layers(family: str, given: Json) -> Iterator[str]:
    kinds, count = given.get("layer_types"), given.get("num_hidden_layers")
    flags = given.get("no_rope_layers")
    if flags is not None and count is not None and len(flags) != count:
        yield f"no_rope_layers has {len(flags)} layers: expected num_hidden_layers ({count})"
    if kinds is None or count is None:
        return
    if other := sorted(set(kinds) - {FULL, SLIDING}):
        yield f"layer_types: {', '.join(other)}: expected {FULL} and {SLIDING}"
    elif len(kinds) != count:
        yield f"layer_types has {len(kinds)} layers: expected num_hidden_layers ({count})"
    elif family in WINDOW_IN_ALL and set(kinds) != {FULL if window_of(family, given) is None else SLIDING}:
        # transformers does not read it in these families.
        yield (
            f"layer_types: {', '.join(sorted(set(kinds)))}: the family {family} has a window in all layers or in none, as "
            f"sliding_window says; delete layer_types"
        )


WINDOW_IN_ALL = ("mistral", "mixtral", "qwen3_moe", "phi3")


def kind_of(rope: Json) -> Any:
    return rope.get("rope_type") or rope.get("type") or "default"


def ropes(family: str, given: Json) -> dict[str, Any]:
    """Returns the sections that say the rotary positions, by where they stand in the file. Of a family with two, the first is of
    the layers without a window."""
    named = given.get("rope_parameters") or {}
    scaling = given.get("rope_scaling") or {}
    if not FAMILIES[family].has_two_ropes:
        # The first of them that says anything.
        return {"rope_scaling": scaling} if scaling else {"rope_parameters": named}
    if not named:
        return {"rope_scaling": scaling, f"rope_parameters.{SLIDING}": {}}
    return {f"rope_parameters.{kind}": {} if named.get(kind) is None else named[kind] for kind in (FULL, SLIDING)}


def window_of(family: str, given: Json) -> int | None:
    """Returns the window of the layers that have one."""
    unused = family.startswith("qwen") and not given["use_sliding_window"]
    if unused or "window" not in FAMILIES[family].settings:
        return None
    return given.get("sliding_window")


def of_file(family: str, given: Json) -> Meaning:
    """Returns what transformers computes of a file, all of whose keys are there (`completed`). Raises KeyError for a size that is
    missing, and UsageError that names what transformers cannot compute."""
    if family == "gpt2":
        return _gpt2(given)
    heads = given["num_attention_heads"]
    # Of Ministral, transformers takes no other number in its place.
    channels = given["head_dim"] if family == "ministral" else given.get("head_dim") or given["hidden_size"] // heads
    of_experts = FAMILIES[family].experts
    return Meaning(
        family=family,
        vocab_size=given["vocab_size"],
        width=given["hidden_size"],
        num_heads=heads,
        num_kv_heads=given.get("num_key_value_heads") or heads,
        channels=channels,
        mlp_width=given["moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"],
        layers=tuple(_layers(family, given)),
        query_scalar=query_scalar_of(given) or channels,
        norm_eps=given["rms_norm_eps"],
        tie_embeddings=given["tie_word_embeddings"],
        attention_softcap=given.get("attn_logit_softcapping"),
        logit_softcap=given.get("final_logit_softcapping"),
        num_experts=given["num_local_experts" if family == "mixtral" else "num_experts"] if of_experts else None,
        experts_per_token=given["num_experts_per_tok"] if of_experts else None,
        attention_bias=bool(given.get("attention_bias")),
        mlp_bias=bool(given.get("mlp_bias")),
        embedding_multiplier=given.get("embedding_multiplier", 1.0),
        residual_multiplier=given.get("residual_multiplier", 1.0),
        logit_divisor=given.get("logits_scaling", 1.0),
        # Mixtral always divides the shares by their sum.
        normalize_routing=given["norm_topk_prob"] if family == "qwen3_moe" else True,
    )


def _gpt2(given: Json) -> Meaning:
    channels = given["n_embd"] // given["n_head"]
    return Meaning(
        family="gpt2",
        vocab_size=given["vocab_size"],
        width=given["n_embd"],
        num_heads=given["n_head"],
        num_kv_heads=given["n_head"],
        channels=channels,
        mlp_width=given.get("n_inner") or 4 * given["n_embd"],
        layers=(Layer(None, None, None),) * given["n_layer"],
        query_scalar=channels,
        norm_eps=given["layer_norm_epsilon"],
        tie_embeddings=given["tie_word_embeddings"],
        num_positions=given["n_positions"],
    )


def _layers(family: str, given: Json) -> Iterator[Layer]:
    window, sections = window_of(family, given), list(ropes(family, given).values())
    first = (theta_of(sections[0], given["rope_theta"]), scaling_of(sections[0], given))
    # Without scaling: else the file is refused.
    second = (theta_of(sections[1], given["rope_local_base_freq"]), None) if sections[1:] else first
    for kind, turned in zip(kinds_of_layers(family, given), turned_layers(given), strict=True):
        if kind == SLIDING and window is None and family in ("gemma2", "gemma3", "ministral", "olmo3"):
            raise UsageError(f"sliding_window = null: expected the window of the layers of {SLIDING}, which the file has")
        if not turned:
            yield Layer(window if kind == SLIDING else None, None, None)
            continue
        yield Layer(window, *second) if kind == SLIDING else Layer(None, *first)


def turned_layers(given: Json) -> list[bool]:
    """Returns for each layer whether it has rotary positions. A 1 in `no_rope_layers` says that it has."""
    count = given["num_hidden_layers"]
    if given.get("no_rope_layers") is not None:
        return [bool(flag) for flag in given["no_rope_layers"]]
    every = given.get("no_rope_layer_interval", count + 1)
    return [(layer + 1) % every != 0 for layer in range(count)]


def kinds_of_layers(family: str, given: Json) -> list[str]:
    count, window = given["num_hidden_layers"], window_of(family, given)
    if family in WINDOW_IN_ALL or "window" not in FAMILIES[family].settings:
        return [FULL if window is None else SLIDING] * count
    if given.get("layer_types") is not None:
        return list(given["layer_types"])
    if family == "ministral":
        return [FULL if window is None else SLIDING] * count
    if family.startswith("qwen"):
        first = count if window is None else given["max_window_layers"]
        return [SLIDING if layer >= first else FULL for layer in range(count)]
    every = {"gemma2": 2, "olmo3": 4}.get(family) or given["sliding_window_pattern"]
    return [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(count)]


def query_scalar_of(given: Json) -> float | None:
    """Returns what the scores are divided by the square root of; None: the channels of a head."""
    if "attention_multiplier" in given:
        return float(given["attention_multiplier"] ** -2)
    return given.get("query_pre_attn_scalar")


def theta_of(rope: Json, otherwise: float) -> float:
    return rope.get("rope_theta", otherwise)


def scaling_of(rope: Json, given: Json) -> RopeScaling | None:
    kind = kind_of(rope)
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope["factor"])
    length = rope.get("original_max_position_embeddings", given.get("max_position_embeddings"))
    if length is None:
        raise UsageError(f"original_max_position_embeddings is missing: rope_type {kind} needs it")
    if kind == "yarn":
        return RopeScaling(
            kind="yarn",
            factor=rope["factor"],
            original_length=length,
            beta_fast=rope.get("beta_fast") or 32.0,
            beta_slow=rope.get("beta_slow") or 1.0,
            truncate=rope.get("truncate", True),
            attention_factor=_attention_factor(rope),
        )
    return RopeScaling(
        kind="llama3",
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_length=length,
    )


def _attention_factor(rope: Json) -> float | None:
    if rope.get("attention_factor") is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        over, under = (0.1 * rope[name] * math.log(rope["factor"]) + 1.0 for name in ("mscale", "mscale_all_dim"))
        return over / under
    return rope.get("attention_factor")
