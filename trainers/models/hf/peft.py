"""The adapters of a decoder in the form of the library PEFT: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gangway.errors import UsageError
from trainers.config import LoraConfig, ModelConfig
from trainers.models.hf.weights import PREFIXES, Place, Tensors, layer_places, layers_name, top_places
from trainers.models.lora import A, B

WRAPPER = "base_model.model."
"""PEFT puts the model into two others."""


def to_adapter(
    config: ModelConfig, lora: LoraConfig, adapters: Mapping[str, np.ndarray], base: str
) -> tuple[dict[str, Any], Tensors]:
    """Returns (the configuration, the tensors) of PEFT. `adapters` are [L, ...] by our names, such as `layers.query_lora_a`.
    Raises UsageError if they are not those of a `trainers.models.decoder.Decoder`."""
    modules, whole = _modules(config, adapters), _whole(config, adapters)
    fused = {module: len(parts) for module, parts in modules.items() if len(parts) > 1}
    prefix = PREFIXES[1] if config.family == "gpt2" else PREFIXES[0]
    tensors: Tensors = {}
    for module, parts in modules.items():
        for number in range(config.num_layers):
            of_layer = {place: (adapters[f"{name}{A}"][number], adapters[f"{name}{B}"][number]) for name, place in parts.items()}
            name = f"{WRAPPER}{prefix}{layers_name(config)}.{number}.{module}"
            tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = _pair(of_layer)
    for name, place in whole.items():
        table = adapters[name].T if place.turned else adapters[name]
        tensors[f"{WRAPPER}{place.full(prefix)}"] = np.ascontiguousarray(table)
    names = {module: _shortest(module, config) for module in modules}
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(names.values()),
        # A module that holds several of our weights has their adapters side by side: the rank and alpha of all, one scale.
        "rank_pattern": {names[module]: lora.rank * number for module, number in fused.items()},
        "alpha_pattern": {names[module]: lora.alpha * number for module, number in fused.items()},
        "bias": "none",
        "fan_in_fan_out": config.family == "gpt2",
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": sorted(map(module_of, whole.values())) or None,
        "use_dora": False,
        "use_rslora": False,
    }
    if config.tie_embeddings and "embed" in whole:
        # Else PEFT unties the table of the logits, and it wants that under its own name too.
        about["ensure_weight_tying"] = True
        tensors[f"{WRAPPER}lm_head.weight"] = np.ascontiguousarray(adapters["embed"])
    return about, tensors


def _whole(config: ModelConfig, adapters: Mapping[str, np.ndarray]) -> dict[str, Place]:
    """Returns the places of what was trained whole, by our name."""
    # PEFT goes by the ends of names: `norm` would be every norm there is.
    top = {name: place for name, place in top_places(config).items() if not name.startswith("final_norm")}
    whole = [name for name in adapters if not name.endswith((A, B))]
    if other := [name for name in whole if name not in top]:
        raise UsageError(
            f"{', '.join(other)}: the form of PEFT has {', '.join(top)} whole, and no other parameter; export the merged model, "
            f"without --adapter"
        )
    return {name: top[name] for name in whole}


def _modules(config: ModelConfig, adapters: Mapping[str, np.ndarray]) -> dict[str, dict[str, Place]]:
    """Returns the places of the adapted weights, by our name, for each module of `transformers` that has some."""
    places = {f"layers.{name}": place for name, place in layer_places(config).items()}
    modules: dict[str, dict[str, Place]] = {}
    for name in (each.removesuffix(A) for each in adapters if each.endswith(A)):
        if name not in places:
            raise UsageError(f"{name} has an adapter: PEFT has no name for it in a decoder of the family {config.family}")
        modules.setdefault(module_of(places[name]), {})[name] = places[name]
    return modules


def module_of(place: Place) -> str:
    return place.name.removesuffix(".weight")


def _shortest(module: str, config: ModelConfig) -> str:
    """Returns the end of a module's name that PEFT finds no other module by."""
    last = module.rpartition(".")[2]
    same = {module_of(place) for place in layer_places(config).values() if module_of(place).rpartition(".")[2] == last}
    return last if len(same) == 1 else module


def _pair(of_layer: Mapping[Place, tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns A [rank, in] and B [out, rank] of one module. In a module with several weights each has rows of its own in B."""
    firsts = [a.T for a, _ in of_layer.values()]
    if all(place.part is None for place in of_layer):
        [(_, b)] = of_layer.values()
        return np.ascontiguousarray(firsts[0]), np.ascontiguousarray(b.T)
    parts = [(place.part, b) for place, (_, b) in of_layer.items() if place.part is not None]
    rank = len(parts[0][1])
    whole = np.zeros((parts[0][0].whole, rank * len(parts)), firsts[0].dtype)
    for number, (part, b) in enumerate(parts):
        whole[part.span, number * rank : (number + 1) * rank] = b.T
    return np.concatenate(firsts), whole
