"""An adapter of the library PEFT, as what a run with LoRA begins with: its folder as our parameters, or what does not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gangway.errors import UsageError
from trainers.config import LoraConfig, ModelConfig
from trainers.config.hf_files import ADAPTER_FILE
from trainers.models.hf import keys
from trainers.models.hf.keys import ANY, COUNT, EMPTY, FLAG, NULL, OFF, POSITIVE, SECTION, TEXTS, only, or_null
from trainers.models.hf.peft import WRAPPER, module_of
from trainers.models.hf.vision_weights import TEXT_PREFIXES
from trainers.models.hf.weights import PREFIXES, Place, Tensors, layer_places, layers_name, top_places
from trainers.models.layers import Layers
from trainers.models.lora import A, B

WEIGHTS = "adapter_model.safetensors"
FILES = (ADAPTER_FILE, WEIGHTS)
OTHER_KINDS = ("layers_to_transform", "layers_pattern", "layer_replication", "trainable_token_indices", "target_parameters")
OTHER_SECTIONS = (
    "arrow_config",
    "eva_config",
    "corda_config",
    "kasa_config",
    "lora_ga_config",
    "monteclora_config",
    "velora_config",
)
KEYS: keys.Keys = {
    **dict.fromkeys(("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version", "task_type"), ANY),
    # The tensors say which modules have adapters, and their ranks. What is dropped out is a setting of the run.
    **dict.fromkeys(("target_modules", "exclude_modules", "lora_dropout", "rank_pattern"), ANY),
    **dict.fromkeys(("megatron_config", "megatron_core", "qalora_group_size", "fan_in_fan_out"), ANY),
    **dict.fromkeys(("use_dora", "use_rslora", "use_qalora", "use_bdlora", "lora_bias"), OFF),
    **dict.fromkeys((*OTHER_KINDS, *OTHER_SECTIONS, "alora_invocation_tokens"), NULL),
    "peft_type": only("LORA"),
    "r": COUNT,
    "lora_alpha": POSITIVE,
    "alpha_pattern": or_null(SECTION),
    "bias": only("none"),
    # With the others the base is no longer what it was.
    "init_lora_weights": only(True, False, "gaussian"),
    "loftq_config": EMPTY,
    "modules_to_save": or_null(TEXTS),
    "ensure_weight_tying": FLAG,
}
"""What each key of `adapter_config.json` may be."""


class _Found(NamedTuple):
    """The adapter of one module, of all layers."""

    a_LDR: np.ndarray
    b_LRE: np.ndarray


def read(folder: Path, model: ModelConfig, lora: LoraConfig) -> dict[str, np.ndarray]:
    """Returns the parameters of a run with these settings, by our names, such as `layers.query_lora_a` [L, in, rank]. Raises
    UsageError that names all that does not fit, and OSError or ValueError for a damaged file."""
    from safetensors.numpy import load_file

    about, tensors = json.loads((folder / ADAPTER_FILE).read_text()), load_file(folder / WEIGHTS)
    if problems := [*keys.problems(about, KEYS, "an adapter of PEFT"), *_problems(about, model)]:
        raise UsageError("\n".join(problems))
    adapter = _Adapter(about, tensors, model, lora)
    params, problems = adapter.whole(), []
    for module, places in _modules(model).items():
        try:
            params |= adapter.of_module(module, places)
        except UsageError as error:
            problems.append(str(error))
    problems += adapter.left_over()
    if problems:
        raise UsageError("\n".join(problems))
    return params


def _problems(about: Mapping[str, Any], model: ModelConfig) -> Iterator[str]:
    for name in ("r", "lora_alpha"):
        if name not in about:
            yield f"{name} is missing: an adapter of PEFT has it"
    if model.tie_embeddings and about.get("modules_to_save") and not about.get("ensure_weight_tying"):
        yield "ensure_weight_tying is not true: the table of the logits is that of the embeddings here, and PEFT has parted them"


def _modules(model: ModelConfig) -> dict[str, dict[str, Place]]:
    """Returns the places of the linear weights of a layer, by our name, for each module of transformers."""
    modules: dict[str, dict[str, Place]] = {}
    for name, place in layer_places(model).items():
        if name in Layers.LINEAR:
            modules.setdefault(module_of(place), {})[name] = place
    return modules


class _Adapter:
    def __init__(self, about: Mapping[str, Any], tensors: Tensors, model: ModelConfig, lora: LoraConfig):
        self.about, self.tensors, self.model, self.lora = about, tensors, model, lora
        self.used: set[str] = set()
        first = PREFIXES[1] if model.family == "gpt2" else PREFIXES[0]
        prefixes = [WRAPPER + prefix for prefix in (first, *PREFIXES, *TEXT_PREFIXES)]
        of_layers = [f"{prefix}{layers_name(model)}." for prefix in prefixes]
        there = (
            prefix for prefix, start in zip(prefixes, of_layers, strict=True) if any(name.startswith(start) for name in tensors)
        )
        self.prefix = next(there, prefixes[0])

    def whole(self) -> dict[str, np.ndarray]:
        """Returns the tables that were trained whole, by our name."""
        params = {}
        for name, place in top_places(self.model).items():
            if not any(self.lora.matches(pattern, name) for pattern in self.lora.whole):
                continue
            full = place.full(self.prefix) if not place.name.startswith("lm_head") else WRAPPER + place.name
            stem = full.removesuffix(".weight")
            copies = (f"{stem}.modules_to_save.weight", full)
            self.used |= {*copies, f"{stem}.original_module.weight"}
            found = next((self.tensors[copy] for copy in copies if copy in self.tensors), None)
            if found is not None:
                params[name] = found.T if place.turned else found
        return params

    def of_module(self, module: str, places: Mapping[str, Place]) -> dict[str, np.ndarray]:
        """Returns the adapters of the weights in a module, by our name. Raises UsageError if they are not those of the run."""
        wanted = [name for name in places if self._is_adapted(name)]
        found = self._stacked(module)
        if found is None:
            if wanted:
                raise UsageError(f"lora.targets: {', '.join(wanted)} has an adapter here, and {module} has none there")
            return {}
        if not wanted and np.any(found.b_LRE):
            raise UsageError(f"lora.targets: {module} has an adapter there, and {', '.join(places)} has none here; add it")
        rank, parted = found.a_LDR.shape[-1], self._parted(found, places, wanted)
        if parted is None:
            raise UsageError(
                f"lora.rank = {self.lora.rank}: {module} has the rank {rank} there; set lora.rank: {rank} and a lora.alpha of "
                f"{self._alpha(module):g}"
            )
        scale = self._alpha(module) / rank
        if wanted and not np.isclose(scale, self.lora.scale):
            raise UsageError(
                f"lora.alpha = {self.lora.alpha:g}: {module} has the alpha {self._alpha(module):g} for the rank {rank} there; "
                f"set lora.alpha: {scale * self.lora.rank:g}"
            )
        return parted

    def left_over(self) -> Iterator[str]:
        """Yields what no parameter of the run is made of."""
        if left := sorted({*self.tensors} - self.used):
            tied = f"{WRAPPER}lm_head."
            left = [name for name in left if not (self.model.tie_embeddings and name.startswith(tied))]
            tables = ["embed_tokens", "wte", "lm_head"]
            way_out = "; name the tables in lora.whole" if any(table in name for name in left for table in tables) else ""
            if left:
                yield f"{', '.join(left[:8])}: the adapter has them, and this run has none such{way_out}"

    def _is_adapted(self, name: str) -> bool:
        return not self.lora.targets or any(self.lora.matches(target, f"layers.{name}") for target in self.lora.targets)

    def _alpha(self, module: str) -> float:
        """Returns the alpha of a module, which must be one in all layers."""
        found = [self._alpha_in(module, number) for number in range(self.model.num_layers)]
        if other := next((number for number, alpha in enumerate(found) if alpha != found[0]), None):
            raise UsageError(
                f"alpha_pattern: {module} has the alpha {found[0]:g} in layer 0 and {found[other]:g} in layer {other}: expected "
                "one in all layers; merge the adapter with its base by PEFT, and begin with the result"
            )
        return found[0]

    def _alpha_in(self, module: str, number: int) -> float:
        """As PEFT looks it up: by a regular expression for the end of the module's name."""
        patterns: Mapping[str, float] = self.about.get("alpha_pattern") or {}
        name = f"{self.prefix.removeprefix(WRAPPER)}{layers_name(self.model)}.{number}.{module}"
        return next(
            (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name)), self.about["lora_alpha"]
        )

    def _stacked(self, module: str) -> _Found | None:
        pairs = []
        for number in range(self.model.num_layers):
            start = f"{self.prefix}{layers_name(self.model)}.{number}.{module}"
            names = [f"{start}.lora_{end}.weight" for end in "AB"]
            self.used.update(names)
            pairs.append([self.tensors.get(name) for name in names])
        if all(matrix is None for pair in pairs for matrix in pair):
            return None
        if any(matrix is None for pair in pairs for matrix in pair):
            raise UsageError(f"{module} has an adapter in some layers alone: expected all of them")
        a, b = ([pair[which].T for pair in pairs] for which in (0, 1))  # type: ignore[union-attr]
        if len({matrix.shape for matrix in a}) > 1 or len({matrix.shape for matrix in b}) > 1:
            raise UsageError(f"{module} has other ranks in some layers: expected one rank")
        return _Found(np.stack(a), np.stack(b))

    def _parted(self, found: _Found, places: Mapping[str, Place], wanted: list[str]) -> dict[str, np.ndarray] | None:
        """Returns the adapters of the weights in a module; None if they have not the rank of the run. Those of a module with
        several weights have either one rank together, or a part of it each, where B is 0 elsewhere (`to_adapter` writes that)."""
        rank, together = self.lora.rank, found.a_LDR.shape[-1]
        spans = {name: slice(None) if place.part is None else place.part.span for name, place in places.items()}
        if other := [name for name in places if name not in wanted and np.any(found.b_LRE[..., spans[name]])]:
            raise UsageError(f"lora.targets: {', '.join(other)} has an adapter there, and none here; add it")
        parts = {name: slice(number * rank, (number + 1) * rank) for number, name in enumerate(wanted)}
        if together == rank:
            parts = dict.fromkeys(wanted, slice(None))
        elif together != rank * len(wanted) or any(
            np.any(np.delete(found.b_LRE[..., spans[name]], parts[name], 1)) for name in wanted
        ):
            return None
        params = {}
        for name in wanted:
            params[f"layers.{name}{A}"] = found.a_LDR[..., parts[name]]
            params[f"layers.{name}{B}"] = found.b_LRE[:, parts[name], spans[name]]
        return params
