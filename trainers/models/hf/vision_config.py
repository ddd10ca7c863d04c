"""The configurations of encoders of images, and of Gemma 3 with images, in the form of Hugging Face (`config.json`)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gangway.errors import UsageError
from trainers.config import ModelConfig
from trainers.config.hf_files import CONFIG_FILE
from trainers.config.vision import VisionConfig
from trainers.models.hf import config as text
from trainers.models.hf import keys, text_part
from trainers.models.hf.computed import Meaning, of_model

ENCODER_OF = {"vit": "vit", "siglip_vision_model": "siglip", "siglip": "siglip"}
"""`vision.family` by `model_type`. `siglip` has a `vision_config` beside that of the encoder of texts, which is not read."""
ACTIVATION_OF = {"vit": "gelu", "siglip": "gelu_pytorch_tanh"}
EPS_OF = {"vit": 1e-12, "siglip": 1e-6}
SIZES = {
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
"""What a file may leave out, for `transformers` leaves out its own defaults."""
GEMMA3 = "gemma3"
CONTEXT_OF_GEMMA3 = 131_072
"""What its files leave out if it is so."""
PARTS = ("text_config", "vision_config")
SAME = (
    (("", "image_token_index"), ("", "image_token_id")),
    (("text_config", "tie_word_embeddings"), ("", "tie_word_embeddings")),
)
"""Keys, with their sections, that mean the same."""


class ImageTextConfig(NamedTuple):
    """The sections `vision` and `model` of a `trainers.models.vlm.ImageTextModel`."""

    vision: VisionConfig
    model: ModelConfig

    @property
    def family(self) -> str:
        return f"{self.model.family} with images"


Config = ModelConfig | VisionConfig | ImageTextConfig


def read(found: keys.Json) -> Config:
    """Returns the configuration of the model that a `config.json` describes: of an encoder of images, of a decoder, or of both.
    Raises UsageError that names all that is not understood."""
    kind = str(found.get("model_type"))
    if kind == "siglip":
        _refuse(keys.problems(found, keys.SIGLIP, f"model_type {kind}"))
        return _encoder("siglip", found.get("vision_config") or {}, "vision_config.")
    if kind in ENCODER_OF:
        return _encoder(ENCODER_OF[kind], found)
    return decoder(found)


def decoder(found: keys.Json) -> ModelConfig | ImageTextConfig:
    """Returns the configuration of a decoder, with the encoder of its images if that is read too. Raises UsageError that names
    all that is not understood."""
    if text_part.is_one(found):
        return text_part.read(found)
    return image_text(found) if found.get("model_type") == GEMMA3 else text.read(found)


def _refuse(problems: Iterable[str]) -> None:
    if lines := list(problems):
        raise UsageError("\n".join(lines))


def _encoder(family: str, found: keys.Json, within: str = "", *, has_head: bool | None = None) -> VisionConfig:
    """`within`: the section of the file that has the keys."""
    _refuse(_problems(family, found, within))
    given = {**SIZES, "layer_norm_eps": EPS_OF[family], **found}
    try:
        return VisionConfig(
            family=family,
            image_size=given["image_size"],
            patch_size=given["patch_size"],
            num_channels=given["num_channels"],
            width=given["hidden_size"],
            num_layers=given["num_hidden_layers"],
            num_heads=given["num_attention_heads"],
            mlp_width=given["intermediate_size"],
            norm_eps=given["layer_norm_eps"],
            num_labels=_num_labels(given) if family == "vit" else None,
            attention_pooling=family == "siglip" and given.get("vision_use_head", True) if has_head is None else has_head,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _num_labels(given: keys.Json) -> int | None:
    """Returns the classes of the head; None if the file is of a model without one. The file has names of them, or their number;
    it has neither if they are the two of the default."""
    if "ForImageClassification" not in "".join(given.get("architectures") or ()):
        return None
    names, number = given.get("id2label"), given.get("num_labels")
    if names:
        return len(names)
    return 2 if number is None else number


def _problems(family: str, found: keys.Json, within: str = "") -> Iterator[str]:
    yield from keys.problems(found, keys.OF_ENCODER[family], f"the family {family}", within)
    if (activation := found.get("hidden_act", ACTIVATION_OF[family])) != ACTIVATION_OF[family]:
        yield f"{within}hidden_act = {activation!r}: expected {ACTIVATION_OF[family]} in the family {family}"
    if (kind := found.get("model_type")) is not None and ENCODER_OF.get(str(kind)) != family:
        yield f"{within}model_type = {kind!r}: expected that of the family {family}"


def image_text(found: keys.Json) -> ImageTextConfig:
    """Returns the configuration of a decoder with an encoder of images. Raises UsageError that names what is not understood."""
    if missing := [name for name in PARTS if not isinstance(found.get(name), Mapping)]:
        raise UsageError(f"{' and '.join(missing)} missing: a configuration of model_type {GEMMA3} has both")
    _refuse(_problems_of_both(found))
    # transformers reads it beside the sections, and nowhere else.
    of_text = {**found["text_config"], "model_type": "gemma3_text", "tie_word_embeddings": found.get("tie_word_embeddings", True)}
    vision = _encoder("siglip", found["vision_config"], "vision_config.", has_head=False)
    tokens, token = found.get("mm_tokens_per_image", 256), found.get("image_token_index", found.get("image_token_id", 262_144))
    try:
        vision = dataclasses.replace(vision, tokens_per_image=tokens, image_token=token)
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        return ImageTextConfig(vision, text.read(of_text))
    except UsageError as error:
        raise UsageError("\n".join(f"text_config: {line}" for line in str(error).splitlines())) from error


def _problems_of_both(found: keys.Json) -> Iterator[str]:
    yield from keys.problems(found, keys.IMAGE_TEXT, f"model_type {GEMMA3}")
    of_text = found["text_config"]
    if of_text.get("model_type", "gemma3_text") != "gemma3_text":
        yield f"text_config.model_type = {of_text['model_type']!r}: expected gemma3_text"
    if of_text.get("final_logit_softcapping") is not None:
        yield f"text_config.final_logit_softcapping = {of_text['final_logit_softcapping']}: expected null in a model with images"
    for (where, name), (beside, other) in SAME:
        one, two = (found[where] if where else found).get(name), (found[beside] if beside else found).get(other)
        if None not in (one, two) and one != two:
            yield f"{where}{'.' if where else ''}{name} = {one}, {other} = {two}: both say the same thing; delete one of them"


def context(folder: Path) -> int | None:
    """Returns the length of the texts that the model of a folder is for, as its `config.json` says; None if that is not there, or
    does not say it."""
    try:
        found = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return None
    if "text_config" in found:
        found = {"max_position_embeddings": CONTEXT_OF_GEMMA3, **found["text_config"]}
    length = found.get("max_position_embeddings") or found.get("n_positions")
    return int(length) if length else None


def write(config: Config, *, max_length: int, dtype: str) -> dict[str, Any]:
    """Returns `config.json`. Raises UsageError if the family has no form for what `config` asks for."""
    if isinstance(config, ModelConfig):
        return text.write(config, max_length=max_length, dtype=dtype)
    if isinstance(config, VisionConfig):
        kind = {"vit": "ViTForImageClassification" if config.num_labels else "ViTModel"}.get(config.family, "SiglipVisionModel")
        return {"architectures": [kind], **_write_encoder(config), "torch_dtype": dtype}
    if config.model.family != GEMMA3:
        raise UsageError(f"model.family = {config.model.family!r}: expected {GEMMA3}, the one with images that transformers has")
    if config.model.logit_softcap is not None:
        raise UsageError(f"model.logit_softcap = {config.model.logit_softcap}: {GEMMA3} with images has none; leave it out")
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": GEMMA3,
        "text_config": text.write(config.model, max_length=max_length, dtype=dtype),
        "vision_config": _write_encoder(config.vision),
        "mm_tokens_per_image": config.vision.tokens_per_image,
        "image_token_index": config.vision.image_token,
        "tie_word_embeddings": config.model.tie_embeddings,
        "torch_dtype": dtype,
    }


def _write_encoder(config: VisionConfig) -> dict[str, Any]:
    about: dict[str, Any] = {
        "model_type": "vit" if config.family == "vit" else "siglip_vision_model",
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.num_channels,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_width,
        "layer_norm_eps": float(config.norm_eps),
        "hidden_act": ACTIVATION_OF[config.family],
    }
    if config.num_labels is not None:
        about["id2label"] = {str(number): f"LABEL_{number}" for number in range(config.num_labels)}
        about["label2id"] = {name: int(number) for number, name in about["id2label"].items()}
    if config.family == "siglip":
        about["vision_use_head"] = config.attention_pooling
    return about


def meaning(config: Config) -> Meaning | dict[str, Any]:
    """Returns the settings that make a difference, with what null stands for."""
    if isinstance(config, ModelConfig):
        return of_model(config)
    if isinstance(config, VisionConfig):
        return {name: value for name, value in dataclasses.asdict(config).items() if name != "remat"}
    return {"vision": meaning(config.vision), "model": meaning(config.model)}
