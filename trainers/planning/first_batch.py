"""The first rows of the data, read and collated before a machine is taken: what the first steps would raise is raised here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gangway.errors import DataError
from trainers.data.loader import RandomAccess
from trainers.loop.hooks import overrides
from trainers.trainer.base_trainer import BaseTrainer

MAX_ROWS = 32
"""How many examples are read of each dataset, of those of the first micro-batch."""


def checks(trainer: BaseTrainer) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields a name and a check for each dataset of the run. A check raises what reading or collating its first rows raises."""
    # Loaders of a trainer's own need not read its datasets, nor collate them alike.
    if trainer.dataset_train is None or overrides(trainer, "configure_dataloaders"):
        return
    train = trainer.dataset_train
    yield "data", lambda: collated(trainer, train)
    if trainer.dataset_eval is not None and len(trainer.dataset_eval):
        held_out = trainer.dataset_eval
        yield "held-out data", lambda: collated(trainer, held_out, len(held_out))
    for name in trainer.arguments.evaluation.units:
        yield f"evaluation.units.{name}.dataset", lambda name=name: unit_collated(trainer, name)  # type: ignore[misc]


def unit_collated(trainer: BaseTrainer, name: str) -> Any:
    """Collates the first rows of a validation unit that has data of its own."""
    dataset = trainer.assembly.validation.datasets.get(name)
    return None if dataset is None else collated(trainer, dataset, len(dataset))


def collated(trainer: BaseTrainer, dataset: RandomAccess, num_examples: int | None = None) -> dict[str, np.ndarray]:
    """Returns the first rows of a dataset as a batch [rows, ...]. Raises DataError if a row alone has another form."""
    indices = range(min(MAX_ROWS, trainer.arguments.micro_batch_size, num_examples or MAX_ROWS))
    if (available := getattr(dataset, "available", None)) is not None:
        indices = range(available(len(indices)))
    if not indices:
        raise DataError(f"the data ({type(dataset).__name__}) has no examples: give it some")
    batch = trainer.assembly.batching.rows_of(dataset, indices)
    rows, alone = forms(batch), forms(trainer.assembly.batching.rows_of(dataset, indices[:1]))
    if wrong := [name for name in {**rows, **alone} if alone.get(name) != rows.get(name)]:
        detail = "; ".join(f"{name} {alone.get(name)} for one, {rows.get(name)} for {len(indices)}" for name in wrong)
        raise DataError(
            f"the shapes or types of a batch depend on its examples ({detail}): each host collates some rows of a batch alone, "
            "so pad to a fixed length in data.collator"
        )
    return batch


def forms(batch: dict[str, np.ndarray]) -> dict[str, str]:
    """Returns the type and the shape of a row of each column."""
    return {name: f"{leaf.dtype}{list(leaf.shape[1:])}" for name, leaf in batch.items()}
