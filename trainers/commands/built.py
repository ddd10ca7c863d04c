"""The trainer of a configuration, for a command that does not train."""

from __future__ import annotations

from typing import Any

from trainers.config.arguments import TrainingArguments, dataset_function, load_object
from trainers.errors import UsageError


def base_trainer(arguments: TrainingArguments, wanted: str) -> Any:
    """Returns the trainer of a configuration, with its data, for a command that does not train. Raises UsageError if it is no
    `BaseTrainer`; `wanted` says what the command needs one for."""
    from trainers.trainer.base_trainer import BaseTrainer

    cls = load_object(arguments.trainer)
    if not (isinstance(cls, type) and issubclass(cls, BaseTrainer)):
        raise UsageError(f"trainer = {arguments.trainer!r}: expected a subclass of trainers.base.BaseTrainer, which {wanted}")
    return cls(arguments, *dataset_function(arguments)(arguments))
