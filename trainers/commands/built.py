"""The trainer of a configuration, for a command that does not train, and what is shown of it."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from gangway.errors import UsageError
from gangway.user_modules import load_object
from gangway.wire.events import Event
from trainers.config.arguments import TrainingArguments, dataset_function


def show(event: Event) -> None:
    # Standard output carries what the command is for alone.
    if event["ev"] == "note":
        print(event["message"], file=sys.stderr)
    elif event["ev"] == "evaluating":
        of = f" of {event['total']}" if event["total"] else ""
        print(f"{event['unit']}: {event['done']}{of} batches", file=sys.stderr)


def base_trainer(arguments: TrainingArguments, wanted: str) -> Any:
    """Returns the trainer of a configuration, with its data, for a command that does not train. Raises UsageError if it is no
    `BaseTrainer`; `wanted` says what the command needs one for."""
    from trainers import runtime
    from trainers.trainer.base_trainer import BaseTrainer

    runtime.install(runtime.Runtime(show))
    cls = load_object(arguments.trainer)
    if not (isinstance(cls, type) and issubclass(cls, BaseTrainer)):
        raise UsageError(f"trainer = {arguments.trainer!r}: expected a subclass of trainers.base.BaseTrainer, which {wanted}")
    if arguments.model.fp8 != "none":
        # About training alone: whatever else is done with the weights needs no package for it.
        arguments = dataclasses.replace(arguments, model=dataclasses.replace(arguments.model, fp8="none"))
    return cls(arguments, *dataset_function(arguments)(arguments))
