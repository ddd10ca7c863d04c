"""Reads a model that was saved, whichever way: a run, a checkpoint, a file of weights, or a folder of Hugging Face.

`look` finds what is there, without its weights. `arguments_of` tells which model and tokenizer it is. `saved_state` of
`trainers/trainer/beginnings.py` reads the weights into the state of a trainer.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangway.errors import UsageError
from gangway.storage.documents import is_url, join
from gangway.storage.row import CHECKPOINTS
from gangway.user_modules import note_names
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.config.hf_files import BYTES, has_tokenizer
from trainers.config.model import OF_EXECUTION
from trainers.settings import recorded

if TYPE_CHECKING:  # they import JAX: the first line is there before that
    from trainers.checkpoint.weights import Weights


def look(source: str, step: int | None = None) -> Weights:
    """Returns what is at `source`, or in the checkpoint of a step of this run."""
    from trainers.checkpoint import weights

    return weights.open_model(weights.find(source if step is None else join(source, CHECKPOINTS, str(step))))


def arguments_of(found: Weights) -> TrainingArguments:
    """Returns the arguments that say the model and the tokenizer of a run or a folder. Raises UsageError for a file."""
    if found.is_file:
        raise UsageError(
            f"{found.path} is a file of weights alone: give the run, or what `python -m trainers.export RUN OUT --format "
            "huggingface` writes"
        )
    return _arguments_of_folder(found) if found.folder is not None else _arguments_of_run(found)


def _arguments_of_folder(found: Weights) -> TrainingArguments:
    from trainers.config import DataConfig, ModelConfig
    from trainers.models.hf.pretrained import OF_IMAGES
    from trainers.models.hf.vision_config import ImageTextConfig

    assert found.folder is not None
    config = found.folder.config
    with_images: dict[str, Any] = {}
    if isinstance(config, ImageTextConfig):
        with_images = {"task": OF_IMAGES, "vision": config.vision}
        config = config.model
    if not isinstance(config, ModelConfig):
        raise UsageError(f"{found.path} is a model of the family {config.family}: expected a decoder of texts")
    folder = str(files_of(found))
    tokenizer = folder if has_tokenizer(folder) else BYTES
    if tokenizer == BYTES:
        print(f"{found.path} has no tokenizer: a token is a byte", file=sys.stderr)
    return TrainingArguments(name="generate", max_num_steps=1, model=config, data=DataConfig(tokenizer=tokenizer), **with_images)


def _arguments_of_run(found: Weights) -> TrainingArguments:
    """Returns the arguments of a checkpoint, with the tokenizer that the run has kept."""

    note_names(found.meta["arguments"])
    known = {item.name for item in dataclasses.fields(TrainingArguments)}
    arguments = from_dict(TrainingArguments, {name: value for name, value in found.meta["arguments"].items() if name in known})
    folder = files_of(found)
    if folder is not None and has_tokenizer(folder):
        return dataclasses.replace(arguments, data=dataclasses.replace(arguments.data, tokenizer=str(folder)))
    return arguments


def files_of(found: Weights) -> Path | None:
    """Returns the folder with the files of Hugging Face that belong to a model; None if it has none. Of a bucket it is a copy."""
    from trainers.checkpoint import carried, model_files

    return model_files.model_here(found.path) if found.folder is not None else carried.folder_of(found.path)


def recorded_with(source: str, overrides: Sequence[str]) -> TrainingArguments:
    """Returns the arguments that the checkpoint of `source` was trained with, changed by `key=value`. Raises UsageError if it has
    recorded none, or if a value is masked there."""
    found = look(source)
    path, meta = found.path, found.meta
    if not meta:
        raise UsageError(f"{path} has recorded no configuration: name one after it, which has the held-out data")
    named = {"arguments": meta["arguments_class"]} if "arguments_class" in meta else {}
    note_names([named, meta["arguments"]])
    return recorded(str(path), {**meta["arguments"], **named}, overrides)


def with_model_of(source: str, arguments: TrainingArguments) -> TrainingArguments:
    """Returns the arguments with the model, its adapters and the tokenizer that `source` has, in place of those of the
    configuration."""
    theirs = arguments_of(look(source))
    data = dataclasses.replace(arguments.data, tokenizer=theirs.data.tokenizer)
    execution = {name: getattr(arguments.model, name) for name in OF_EXECUTION}
    model, vision = dataclasses.replace(theirs.model, **execution), theirs.vision or arguments.vision
    lora = theirs.lora or arguments.lora  # for a model without adapters see `without_adapters`
    if lora is not None and theirs.lora is None:
        lora = dataclasses.replace(lora, new_tokens=0)  # it has the vocabulary of its folder
    if arguments.lora is not None and lora is not None:
        base = str(lora.base)
        # Whether a bucket still has it, its reader finds out.
        if not is_url(base) and not Path(os.path.expanduser(base)).exists():
            lora = dataclasses.replace(lora, base=arguments.lora.base)  # it has moved; the digest is compared
    return dataclasses.replace(arguments, model=model, vision=vision, data=data, lora=lora)


def without_adapters(source: str, arguments: TrainingArguments) -> TrainingArguments:
    """Returns the arguments to measure a model that has no adapters with, where they have the section `lora`: it is the base, and
    new adapters change nothing of it. Others are returned as they are."""
    if arguments.lora is None or look(source).has_adapters:
        return arguments
    print(f"{source} has no adapters: it is measured as it is", file=sys.stderr)
    return dataclasses.replace(arguments, lora=dataclasses.replace(arguments.lora, base=source))
