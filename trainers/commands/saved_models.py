"""Reads a model that was saved, whichever way: a run, a checkpoint, a file of weights, or a folder of Hugging Face.

`look` finds what is there, without its weights. `arguments_of` tells which model and tokenizer it is. `state_of` reads the
weights into the state of a trainer.
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
from trainers.config.arguments import TrainingArguments
from trainers.config.model import OF_EXECUTION
from trainers.settings import recorded

if TYPE_CHECKING:  # they import JAX: the first line is there before that
    from gangway.storage.store import Place
    from trainers.checkpoint.weights import Weights


def look(source: str, step: int | None = None) -> Weights:
    """Returns what is at `source`, or in the checkpoint of a step of this run."""
    from trainers.checkpoint import weights

    return weights.look(weights.find(source if step is None else join(source, CHECKPOINTS, str(step))))


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
    from trainers.config.hf_files import BYTES, has_tokenizer
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
    from trainers.checkpoint import manifest
    from trainers.config.arguments import from_dict
    from trainers.config.hf_files import has_tokenizer

    known = {item.name for item in dataclasses.fields(TrainingArguments)}
    recorded = manifest.read_meta(found.path)["arguments"]
    arguments = from_dict(TrainingArguments, {name: value for name, value in recorded.items() if name in known})
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
    from trainers.checkpoint import manifest, weights

    path = weights.find(source)
    if not (path / manifest.META_FILE).exists():
        raise UsageError(f"{path} has recorded no configuration: name one after it, which has the held-out data")
    try:
        meta = manifest.read_meta(path)
    except manifest.DamagedError as error:
        raise UsageError(f"{path} cannot be evaluated: {error}") from error
    named = {"arguments": meta["arguments_class"]} if "arguments_class" in meta else {}
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
    if arguments.lora is not None and lora is not None and not _is_there(str(lora.base)):
        lora = dataclasses.replace(lora, base=arguments.lora.base)  # it has moved; the digest is compared
    return dataclasses.replace(arguments, model=model, vision=vision, data=data, lora=lora)


def _is_there(base: str) -> bool:
    # Whether a bucket still has it, its reader finds out.
    return is_url(base) or Path(os.path.expanduser(base)).exists()


def without_adapters(source: str, arguments: TrainingArguments) -> TrainingArguments:
    """Returns the arguments to measure a model that has no adapters with, where they have the section `lora`: it is the base, and
    new adapters change nothing of it. Others are returned as they are."""
    from trainers.checkpoint import weights

    if arguments.lora is None or has_adapters(weights.look(weights.find(source))):
        return arguments
    print(f"{source} has no adapters: it is measured as it is", file=sys.stderr)
    return dataclasses.replace(arguments, lora=dataclasses.replace(arguments.lora, base=source))


def has_adapters(found: Any) -> bool:
    """Whether there are adapters among the weights that `trainers.checkpoint.weights.look` has found."""
    from trainers.models import lora

    return any(name.endswith(lora.A) for name in found.parameters)


def state_of(trainer: Any, source: str) -> tuple[str, Any, int | None]:
    """Returns the path, the state and the step of a checkpoint. A model alone becomes a state with a new optimizer state."""
    import jax.numpy as jnp

    from trainers.checkpoint import hugging_face, manifest, model_only, weights
    from trainers.checkpoint.export import from_safetensors
    from trainers.checkpoint.standalone import load_model
    from trainers.trainer.beginnings import beginning

    path = weights.find(source)
    trainer.prepare()
    if trainer.arguments.lora is not None and not has_adapters(weights.look(path)):
        state, step = beginning(trainer, None, None).make(), step_of(path)
        return str(path), state if step is None else dataclasses.replace(state, batch_index=jnp.int32(step)), step
    if hugging_face.is_folder(path):
        return str(path), beginning(trainer, _arrays_of_folder(trainer, path), None).make(), None
    if path.name.endswith(weights.FILE_SUFFIX):
        return str(path), beginning(trainer, from_safetensors(path), None).make(), None
    try:
        meta = manifest.read_meta(path)
    except manifest.DamagedError as error:
        raise UsageError(f"{path} cannot be evaluated: {error}") from error
    step = int(meta["batch_index"])
    if not all(map(model_only.part_of, meta["shapes"])):
        # With the state of the optimizer: it may hold the averages that are evaluated, and a hook may want it.
        return str(path), trainer.load_pretrained(str(path)), step
    arrays, _ = load_model(str(path), trainer.assembly.model_arrays)
    if trainer.assembly.frozen is not None:
        trainer.assembly.frozen.check(meta)
    state = beginning(trainer, arrays, None).make()
    updates = step - len(meta.get("skipped_batches") or ())
    counters = {"batch_index": jnp.int32(step), "step": jnp.int32(updates)}
    return str(path), dataclasses.replace(state, **counters), step


def step_of(path: Place) -> int | None:
    """Returns the number of batches that a checkpoint has drawn; None for a file or a folder that does not say it."""
    from trainers.checkpoint import manifest

    return int(manifest.read_meta(path)["batch_index"]) if (path / manifest.META_FILE).exists() else None


def _arrays_of_folder(trainer: Any, path: Place) -> dict[str, Any]:
    """Returns the parameters in a folder of Hugging Face, in nested dicts. Raises CheckpointError if they do not fit."""
    import jax

    from trainers.checkpoint import weights
    from trainers.config import InitConfig
    from trainers.optim.param_groups import parameter_path

    wanted = {parameter_path(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(trainer.assembly.model_arrays)}
    found = weights.look(path)
    pairs = weights.match(found, {name: leaf.shape for name, leaf in wanted.items()}, InitConfig(path=str(path)))
    arrays = weights.read(found, pairs, {name: leaf.sharding for name, leaf in wanted.items()})
    return jax.tree_util.tree_map_with_path(lambda key, _: arrays[parameter_path(key)], trainer.assembly.model_arrays)
