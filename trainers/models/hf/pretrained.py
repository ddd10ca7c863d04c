"""`model.pretrained`: the configuration of a model, and where its weights are, from one folder."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TypeVar

from gangway.config.section import require
from gangway.errors import UsageError
from trainers.config import InitConfig, ModelConfig
from trainers.config.arguments import TrainingArguments
from trainers.config.hf_files import CONFIG_FILE, has_tokenizer
from trainers.config.model import OF_EXECUTION
from trainers.config.vision import VisionConfig
from trainers.models.hf import vision_config
from trainers.models.hf.vision_config import ImageTextConfig

Arguments = TypeVar("Arguments", bound=TrainingArguments)

OF_TEXTS, OF_IMAGES = "trainers.tasks.causal_lm:CausalLMTask", "trainers.tasks.image_text:ImageTextTask"


def resolved(arguments: Arguments) -> Arguments:
    """Returns the arguments with the numbers of the model in the folder `model.pretrained` in place of that key, and with its
    weights as `init_from` (with `lora` they are its base) and its tokenizer as `data.tokenizer`, unless these name others. Of a
    model with images, its encoder is `vision`. Others are returned as they are. Raises ValueError that names what is not
    understood, and UsageError if they are none."""
    if not isinstance(arguments, TrainingArguments):
        raise UsageError(
            f"the arguments are {type(arguments).__name__}: expected TrainingArguments, which "
            "trainers.config.arguments.from_dict(TrainingArguments, {...}) makes of a dict"
        )
    folder = arguments.model.pretrained
    if folder is None:
        return arguments
    found, data = _read(folder, "model.pretrained"), arguments.data
    if isinstance(found, ImageTextConfig):
        arguments = dataclasses.replace(arguments, vision=_encoder(found.vision, arguments, folder))
        found = found.model
    model = _computed(found, arguments.model)
    context = vision_config.context(Path(os.path.expanduser(folder)))
    require(
        # Packed rows have several documents, and the positions of each begin at 0.
        context is None or data.packing is not None or data.sequence_length <= context,
        f"data.sequence_length = {data.sequence_length}: the model in {folder} is for texts of {context} tokens: expected at "
        f"most so many; or say in its {CONFIG_FILE} (max_position_embeddings, rope_scaling) how it reads longer ones",
    )
    if data.tokenizer is None and has_tokenizer(os.path.expanduser(folder)):
        data = dataclasses.replace(data, tokenizer=folder)
    if arguments.lora is not None:
        lora = dataclasses.replace(arguments.lora, base=arguments.lora.base or folder)
        model = dataclasses.replace(model, vocab_size=model.vocab_size + lora.new_tokens)
        return dataclasses.replace(arguments, model=model, data=data, lora=lora)
    init_from = arguments.init_from or InitConfig(path=folder)
    return dataclasses.replace(arguments, model=model, data=data, init_from=init_from)


def _encoder(vision: VisionConfig, arguments: TrainingArguments, folder: str) -> VisionConfig:
    """Returns the section `vision` of a model with images. Raises ValueError if other settings say something else."""
    remat = "none" if arguments.vision is None else arguments.vision.remat
    require(
        arguments.vision in (None, VisionConfig(remat=remat)),
        f"vision: the folder of model.pretrained ({folder}) says it; leave out all of it but remat",
    )
    require(
        arguments.task != OF_TEXTS,
        f"model.pretrained = {folder!r} is a model with images, and task = {arguments.task!r} reads texts alone: set task: "
        f"{OF_IMAGES}",
    )
    return dataclasses.replace(vision, remat=remat)


def decoder_in(folder: str, like: ModelConfig, asked_by: str) -> ModelConfig:
    """Returns the configuration of the decoder in a folder, computed as the settings of `like` say. Raises ValueError, which
    names the setting `asked_by`."""
    found = _read(folder, asked_by)
    if isinstance(found, ImageTextConfig):
        raise ValueError(f"{asked_by} = {folder!r} is a model with images: expected a decoder of texts")
    return _computed(found, like)


def _computed(model: ModelConfig, like: ModelConfig) -> ModelConfig:
    return dataclasses.replace(model, **{name: getattr(like, name) for name in OF_EXECUTION})


def _read(folder: str, asked_by: str) -> ModelConfig | ImageTextConfig:
    path = os.path.join(os.path.expanduser(folder), CONFIG_FILE)
    try:
        with open(path) as file:
            found = json.load(file)
        require(isinstance(found, dict), "expected a mapping of keys and values")
        return vision_config.decoder(found)
    except (OSError, UsageError, ValueError) as error:
        raise ValueError(f"{asked_by} = {folder!r}: {path}: {_why(error)}") from error


def is_there(folder: str) -> bool:
    """Whether the path is a folder that describes a model."""
    return os.path.isfile(os.path.join(os.path.expanduser(folder), CONFIG_FILE))


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}; expected a folder that this command and all hosts see"
    return str(error)
