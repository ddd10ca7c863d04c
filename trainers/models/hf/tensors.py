"""Which tensors of a file of Hugging Face each parameter of a model is made of, for every model that there is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from trainers.config import ModelConfig
from trainers.config.vision import VisionConfig
from trainers.models.hf import vision_weights as vision
from trainers.models.hf import weights as text
from trainers.models.hf.vision_config import Config
from trainers.models.hf.weights import Place

OLDER_HEAD = "language_model."
"""Before the table of the logits in the files of models with images on the Hub."""


class Source(NamedTuple):
    """The tensors of one parameter."""

    name: str
    """Ours, such as `layers.query`."""
    place: Place
    tensors: tuple[str, ...]
    stacked: tuple[int, ...]
    """How many are stacked in it: (), [layers], or [layers, experts]."""


def sources(config: Config, found: Collection[str] = ()) -> list[Source]:
    """Returns the tensors of all parameters. `found` are the names in a file: models have several sets of names. Without it they
    are those that a file is written with, which are the ones of the Hub's."""
    if isinstance(config, ModelConfig):
        first = text.PREFIXES[1] if config.family == "gpt2" else text.PREFIXES[0]
        return list(_decoder(config, (first, *text.PREFIXES, *vision.TEXT_PREFIXES), found))
    if isinstance(config, VisionConfig):
        return list(_encoder(config, vision.ENCODER_PREFIXES[config.family], found))
    projector = _prefix(vision.PROJECTOR_PREFIXES, vision.PROJECTOR["out"], found)
    return [
        *_renamed("vision", _encoder(config.vision, vision.TOWER_PREFIXES, found)),
        *_renamed("projector", _top(vision.PROJECTOR, projector)),
        *_renamed("decoder", _decoder(config.model, vision.TEXT_PREFIXES, found)),
    ]


def is_besides(config: Config, name: str) -> bool:
    """Whether a file may have the tensor besides: it says what the others say, or belongs to a part that is not read."""
    if isinstance(config, ModelConfig):
        return text.is_derived(config, name.removeprefix(OLDER_HEAD))
    if isinstance(config, VisionConfig):
        return name.startswith(vision.BESIDES[config.family])
    return text.is_derived(config.model, name.removeprefix(OLDER_HEAD))


def is_tied_head(config: Config, name: str) -> bool:
    """Whether it is the table of the logits of a model that has one table for both."""
    decoder = config if isinstance(config, ModelConfig) else getattr(config, "model", None)
    return decoder is not None and decoder.tie_embeddings and name.removeprefix(OLDER_HEAD) == "lm_head.weight"


def _decoder(config: ModelConfig, prefixes: Sequence[str], found: Collection[str]) -> Iterator[Source]:
    top = text.top_places(config)
    prefix = _prefix(prefixes, top["embed"], found)
    for source in _top(top, prefix):
        [tensor] = source.tensors
        is_older = tensor not in found and OLDER_HEAD + tensor in found
        yield source._replace(tensors=(OLDER_HEAD + tensor,)) if is_older else source
    of_layers = f"{prefix}{text.layers_name(config)}"
    yield from _layers(text.layer_places(config), of_layers, config.num_layers, config.num_experts)


def _encoder(config: VisionConfig, prefixes: Sequence[str], found: Collection[str]) -> Iterator[Source]:
    top = vision.top_places(config)
    prefix = _prefix(prefixes, top["patch"], found)
    yield from _top(top, prefix)
    yield from _layers(vision.layer_places(config), f"{prefix}{vision.layers_name(config)}", config.num_layers, None)
    if config.num_labels is not None:
        yield from _top(vision.VIT_HEAD, "")


def _prefix(prefixes: Sequence[str], place: Place, found: Collection[str]) -> str:
    return next((prefix for prefix in prefixes if place.full(prefix) in found), prefixes[0])


def _top(places: Mapping[str, Place], prefix: str) -> Iterator[Source]:
    for name, place in places.items():
        yield Source(name, place, (place.full(prefix),), ())


def _layers(places: Mapping[str, Place], name: str, num_layers: int, num_experts: int | None) -> Iterator[Source]:
    for ours, place in places.items():
        tensors = tuple(full for number in range(num_layers) for full in place.all_names(f"{name}.{number}.", num_experts))
        stacked = (num_layers, num_experts or 0) if place.experts else (num_layers,)
        yield Source(f"layers.{ours}", place, tensors, stacked)


def _renamed(part: str, found: Iterator[Source]) -> Iterator[Source]:
    return (source._replace(name=f"{part}.{source.name}") for source in found)
