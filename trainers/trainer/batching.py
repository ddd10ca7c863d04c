"""How the examples of a trainer's data become the batches of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from gangway.errors import UsageError
from trainers import runtime
from trainers.config.arguments import load_object
from trainers.data.collate import Collated, CollateInfo, Collator, Preprocess, preprocessed, stack
from trainers.data.epoch_order import EpochOrder
from trainers.data.identity import Identity
from trainers.data.iterated_loader import IteratedLoader, as_loader, first_rows
from trainers.data.loader import RandomAccess, Reader, StepAddressedLoader
from trainers.data.sources.iterable import held_out_examples
from trainers.evaluation.exact_match import questions
from trainers.loop.hooks import overrides
from trainers.loop.prepared_batch import PreparedBatches, Shapes, traced_shapes
from trainers.loop.triggers import Epochs
from trainers.overrides import check_hooks
from trainers.protocol import Batch, Ids, TrainerConfigureDataloaderOutput, TrainerConfigureModelOutput
from trainers.runtime.multihost import note_from_host0
from trainers.step.state import TrainState

if TYPE_CHECKING:  # it imports this module
    from trainers.trainer.base_trainer import BaseTrainer


class Batching:
    """Makes batches of examples, with the hooks and the `build_*` of a trainer. Only what makes a loader touches the devices."""

    def __init__(self, trainer: BaseTrainer):
        self._trainer = trainer
        self.kept_loaders: TrainerConfigureDataloaderOutput | None = None
        """The loaders, as far as they are made."""
        self._given_loaders: TrainerConfigureDataloaderOutput | None = None
        """What the trainer's `configure_dataloaders` has returned before the loaders were needed."""
        self._loaders_are_asked = False
        """Whether `kept_loaders` are made of what `configure_dataloaders` has returned."""
        self._calls_hooks = False
        """Whether a loader was made that calls the trainer's hooks."""

    @cached_property
    def identity(self) -> Identity:
        """What the run learns from, as it is when the trainer is made."""
        trainer = self._trainer
        datasets, units = (trainer.dataset_train, trainer.dataset_eval), self.datasets_of_units
        kinds = {"reads_files": trainer.reads_files, "reads_records": trainer.reads_records}
        return Identity(trainer.arguments, datasets, units=units, **kinds)

    @cached_property
    def datasets_of_units(self) -> dict[str, RandomAccess]:
        """The datasets of the validation units that have their own."""
        arguments = self._trainer.arguments
        units = arguments.evaluation.units
        with_dataset = {name: unit.dataset for name, unit in units.items() if unit.dataset is not None}
        # The ids of their samples are their own: no training sample is among them.
        made = {name: load_object(path)(arguments) for name, path in with_dataset.items()}
        asking = {name: unit.exact_match for name, unit in units.items() if unit.exact_match is not None}
        made |= {name: questions(config, arguments) for name, config in asking.items()}
        return {name: self.collated(held_out_examples(examples, 0)) for name, examples in made.items()}

    # ------------------------------------------------------------------ examples

    def collated(self, dataset: Any) -> RandomAccess:
        """Returns `dataset` with `build_data_transform` and `build_data_collate_info` applied to each example."""
        transform = self._trainer.build_data_transform()
        info = {name: CollateInfo.of(name, value) for name, value in self._trainer.build_data_collate_info().items()}
        if transform is None and not info:
            return dataset
        return Collated(dataset, transform, info, self._trainer.arguments.data.truncation)

    def rows_of(self, dataset: RandomAccess, indices: Sequence[int], num_padded: int = 0) -> dict[str, np.ndarray]:
        """Returns the examples at these indices as the rows of a batch [rows, ...], before `prepare_batch`; the last `num_padded`
        of them only fill it up (weight 0). Raises what reading and collating raise."""
        read, counts = self.reader(dataset), [True] * (len(indices) - num_padded) + [False] * num_padded
        rows = stack([read(index) for index in indices], counts, self._collator)
        return rows if self._preprocess is None else preprocessed(rows, 0, self._preprocess)

    # ------------------------------------------------------------------ shapes

    def shapes(self, rows: tuple[int, int], model: TrainerConfigureModelOutput, sharding: Any = None) -> Shapes:
        """Returns the shapes of a batch as the step gets it."""
        dataset = self._trainer.dataset_train
        # One row is enough: all rows have the same shapes and types. Which comes first is asked when the loader reads it.
        some = dataset.examples if isinstance(dataset, EpochOrder) else dataset
        row = self._rows_of_loader() if some is None else self.rows_of(some, [0])
        shapes = {name: jax.ShapeDtypeStruct((*rows, *leaf.shape[1:]), leaf.dtype) for name, leaf in row.items()}
        shapes = self.prepared_shapes(shapes, model)
        check_rows = getattr(self._trainer.task, "check_rows", None)
        if check_rows is not None and not overrides(self._trainer, "configure_dataloaders"):
            check_rows(shapes)
        return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for name, leaf in shapes.items()}

    def prepared_shapes(self, shapes: Shapes, model: TrainerConfigureModelOutput) -> Shapes:
        """Returns the shapes of what `prepare_batch` makes of a batch of these shapes."""
        if not overrides(self._trainer, "prepare_batch"):
            return shapes
        if overrides(self._trainer, "prepared_shapes"):
            return self._trainer.prepared_shapes(shapes)
        trial = self._trainer.copy_for_tracing(model)
        return traced_shapes(partial(trial.prepare_batch, training=True), model.state, shapes)

    # ------------------------------------------------------------------ loaders

    def train_loader(self) -> StepAddressedLoader:
        """Returns the loader of the training data. Raises UsageError if there is none."""
        dataset, arguments = self._trainer.dataset_train, self._trainer.arguments
        if dataset is None:
            raise UsageError("there is no training data: give dataset_train, or override configure_dataloaders")
        self._calls_hooks = True
        return StepAddressedLoader(
            dataset,
            arguments.global_batch_size,
            self._trainer.mesh,
            accumulation_steps=arguments.accumulation_steps,
            preprocess=self._preprocess,
            read=self.reader(dataset),
            collator=self._collator,
            ids=self._ids,
        )

    def held_out_loader(self, dataset: RandomAccess, batch_size: int | None = None) -> StepAddressedLoader:
        """Returns the loader of held-out data, which reads each example once."""
        arguments = self._trainer.arguments
        # By default as many rows as a micro-batch of the training, so that whatever fits in memory there fits here.
        rows = batch_size or arguments.evaluation.batch_size or arguments.micro_batch_size
        size, read = len(dataset), self.reader(dataset)
        return StepAddressedLoader(
            dataset,
            rows,
            self._trainer.mesh,
            num_examples=size,
            preprocess=self._preprocess,
            read=read,
            collator=self._collator,
            ids=self._ids,
        )

    def configure_loaders(self) -> TrainerConfigureDataloaderOutput:
        """Does what `BaseTrainer.configure_dataloaders` does."""
        held_out = self._trainer.dataset_eval
        loader = self.held_out_loader(held_out) if held_out is not None and len(held_out) else None
        self.kept_loaders = TrainerConfigureDataloaderOutput(self.train_loader(), loader)
        return self.kept_loaders

    def loaders(self) -> TrainerConfigureDataloaderOutput:
        """Returns what the loop and the evaluations read. Calls `configure_dataloaders` if that was not done; one of a subclass
        also if it was called by hand, for it keeps nothing itself."""
        by_hand = not self._loaders_are_asked and overrides(self._trainer, "configure_dataloaders")
        if self.kept_loaders is None or by_hand:
            given = self._given_loaders or self._trainer.configure_dataloaders()
            self.kept_loaders, self._loaders_are_asked = self._usable(given), True
        return self.kept_loaders

    def forget_loaders(self) -> None:
        """Lets the next training ask `configure_dataloaders` again."""
        self.kept_loaders = self._given_loaders = None
        self._loaders_are_asked = False

    def _usable(self, given: TrainerConfigureDataloaderOutput) -> TrainerConfigureDataloaderOutput:
        """Returns the loaders, those of a user's own as what the loop and the evaluations read."""
        arguments, held_out = self._trainer.arguments, given.dataloader_eval
        iterated = partial(IteratedLoader, mesh=self._trainer.mesh, note=note_from_host0, ids=self._ids)
        make = partial(
            iterated,
            global_batch_size=arguments.global_batch_size,
            accumulation_steps=arguments.accumulation_steps,
            passes=arguments.max_num_data_epochs or 1,
        )
        train = as_loader(given.dataloader_train, make, ("batch",))
        # It may have asked for the built-in loader, and wrapped it.
        of_own = self._calls_hooks, "configure_dataloaders returns a loader of your own: call it there"
        check_hooks(self._trainer, dict.fromkeys(("preprocess_batch", "build_collator"), of_own))
        if held_out is not None:
            rows = arguments.evaluation.batch_size or arguments.micro_batch_size
            make = partial(iterated, global_batch_size=rows, accumulation_steps=1, passes=1)
            held_out = as_loader(held_out, make, ("epoch",))
        return TrainerConfigureDataloaderOutput(train, held_out)

    @property
    def epochs(self) -> Epochs:
        """Where epochs begin and end, as far as the data are known."""
        size, loader = self._trainer.arguments.global_batch_size, self.kept_loaders and self.kept_loaders.dataloader_train
        if isinstance(loader, IteratedLoader):  # it need not read what `dataset_train` is
            return Epochs(0, size, lambda: loader.batches_of_epoch)
        return Epochs(len(self._trainer.dataset_train or ()), size)

    # ------------------------------------------------------------------ hooks

    @cached_property
    def prepare(self) -> PreparedBatches | None:
        """The hook on batches that are on the devices; None: batches stay as they are."""
        trainer = self._trainer
        return PreparedBatches(trainer.prepare_batch, trainer.mesh) if overrides(trainer, "prepare_batch") else None

    @property
    def prepare_trained(self) -> Callable[[TrainState, Batch], Batch] | None:
        return None if self.prepare is None else partial(self.prepare, training=True)

    @property
    def _ids(self) -> Mapping[str, Ids]:
        """The ids that the task looks up, by leaf; a task need not say them."""
        return getattr(self._trainer.task, "ids", {})

    @cached_property
    def _collator(self) -> Collator | None:
        return self._trainer.build_collator()

    @property
    def _preprocess(self) -> Preprocess | None:
        return self._trainer.preprocess_batch if overrides(self._trainer, "preprocess_batch") else None

    def reader(self, dataset: RandomAccess) -> Reader:
        """Returns what reads the examples of a dataset."""
        return Reader(dataset, self._trainer.arguments.data, runtime.current().note)

    def _rows_of_loader(self) -> dict[str, np.ndarray]:
        """Returns the first rows of a user's own loader."""
        # Kept for the loop: a second one might go on where this one is.
        self._given_loaders = self._given_loaders or self._trainer.configure_dataloaders()
        return first_rows(self._given_loaders.dataloader_train)
