"""How the examples of the data become the batches of the steps: the part of a trainer that builds them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from trainers import runtime
from trainers.config.arguments import TrainingArguments, load_object
from trainers.data.collate import Collated, CollateInfo, Collator, Preprocess, Transform, preprocessed, stack
from trainers.data.iterated_loader import IteratedLoader, as_loader
from trainers.data.loader import RandomAccess, StepAddressedLoader
from trainers.data.reading import Reader
from trainers.loop.hooks import Hooks
from trainers.loop.prepared_batch import PreparedBatches, Shapes, traced_shapes
from trainers.parallel import mesh as meshes
from trainers.protocol import Batch, TrainerConfigureDataloaderOutput, TrainerConfigureModelOutput
from trainers.step.state import TrainState


class BatchBuilder(Hooks):
    """Builds batches from examples. A subclass may replace every `build_*` by itself."""

    arguments: TrainingArguments
    dataset_train: RandomAccess | None

    # ------------------------------------------------------------------ what a subclass may replace

    def build_data_transform(self) -> Transform | None:
        """Returns the transform of each example, before it becomes a row; None: no transform. For training and held-out data."""
        return None

    def build_data_collate_info(self) -> Mapping[str, CollateInfo | Mapping[str, Any] | tuple[Any, ...]]:
        """Returns how leaves whose length varies between examples are truncated and padded, by the name of the leaf. A dict with
        the fields of `CollateInfo`, or a tuple in their order, will do."""
        return {}

    def build_collator(self) -> Collator | None:
        """Returns a function from a list of examples to a batch, a dict of arrays [examples, ...]; None: they are stacked.

        The examples are dicts without `weight` and `sample_id`. The function is pure, and gets some rows of a global batch: the
        shapes of its leaves must not depend on the examples. Default: `data.collator`."""
        path = self.arguments.data.collator
        return None if path is None else load_object(path)

    # ------------------------------------------------------------------ inside

    def _batch_shapes(self, rows: tuple[int, int], model: TrainerConfigureModelOutput, sharding: Any = None) -> Shapes:
        """Returns the shapes of a batch as the step gets it."""
        # One row is enough: all rows have the same shapes and types.
        row = self._rows_of_loader() if self.dataset_train is None else self.rows_of(self.dataset_train, [0])
        shapes = {name: jax.ShapeDtypeStruct((*rows, *leaf.shape[1:]), leaf.dtype) for name, leaf in row.items()}
        shapes = self._prepared_shapes(shapes, model)
        return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for name, leaf in shapes.items()}

    def _rows_of_loader(self) -> dict[str, np.ndarray]:
        """Returns the first rows of a user's own loader."""
        raise NotImplementedError

    def rows_of(self, dataset: RandomAccess, indices: Sequence[int], num_padded: int = 0) -> dict[str, np.ndarray]:
        """Returns the examples at these indices as the rows of a batch [rows, ...], before `prepare_batch`; the last `num_padded`
        of them only fill it up (weight 0). Raises what reading and collating raise."""
        read, counts = self._reader(dataset), [True] * (len(indices) - num_padded) + [False] * num_padded
        rows = stack([read(index) for index in indices], counts, self._collator)
        return rows if self._preprocess is None else preprocessed(rows, 0, self._preprocess)

    def _prepared_shapes(self, shapes: Shapes, model: TrainerConfigureModelOutput) -> Shapes:
        if not self.overrides("prepare_batch"):
            return shapes
        return self.prepared_shapes(shapes) if self.overrides("prepared_shapes") else traced_shapes(self, model, shapes)

    def collated(self, dataset: Any) -> RandomAccess:
        """Returns `dataset` with `build_data_transform` and `build_data_collate_info` applied to each example."""
        transform = self.build_data_transform()
        info = {name: CollateInfo.of(name, value) for name, value in self.build_data_collate_info().items()}
        if transform is None and not info:
            return dataset
        return Collated(dataset, transform, info, self.arguments.data.truncation)

    def _held_out_loader(self, dataset: RandomAccess, batch_size: int | None = None) -> StepAddressedLoader:
        # By default as many rows as a micro-batch of the training, so that whatever fits in memory there fits here.
        rows = batch_size or self.arguments.evaluation.batch_size or self.arguments.micro_batch_size
        size, read = len(dataset), self._reader(dataset)
        return StepAddressedLoader(
            dataset, rows, self._mesh, num_examples=size, preprocess=self._preprocess, read=read, collator=self._collator
        )

    def _reader(self, dataset: RandomAccess) -> Reader:
        return Reader(dataset, self.arguments.data, runtime.current().note)

    @cached_property
    def _collator(self) -> Collator | None:
        return self.build_collator()

    @property
    def _preprocess(self) -> Preprocess | None:
        return self.preprocess_batch if self.overrides("preprocess_batch") else None

    @cached_property
    def _prepare_batch(self) -> PreparedBatches | None:
        return PreparedBatches(self, self._mesh) if self.overrides("prepare_batch") else None

    @property
    def _prepare_held_out(self) -> Callable[[TrainState, Batch], Batch] | None:
        return None if self._prepare_batch is None else functools.partial(self._prepare_batch, training=False)

    @cached_property
    def _mesh(self) -> Mesh:
        self.arguments.check_devices(jax.device_count())
        return meshes.make_mesh(self.arguments.mesh)

    def _as_loaders(self, loaders: TrainerConfigureDataloaderOutput) -> TrainerConfigureDataloaderOutput:
        def iterated(rows: int, steps: int, passes: int) -> Callable[[Any], IteratedLoader]:
            return functools.partial(
                IteratedLoader,
                global_batch_size=rows,
                mesh=self._mesh,
                accumulation_steps=steps,
                note=self._note_from_host0,
                passes=passes,
            )

        arguments, held_out = self.arguments, loaders.dataloader_eval
        make = iterated(arguments.global_batch_size, arguments.accumulation_steps, arguments.max_num_data_epochs or 1)
        train = as_loader(loaders.dataloader_train, make, ("batch",))
        if held_out is not None:
            rows = arguments.evaluation.batch_size or arguments.micro_batch_size
            held_out = as_loader(held_out, iterated(rows, 1, 1), ("epoch",))
        return TrainerConfigureDataloaderOutput(train, held_out)

    def _note_from_host0(self, message: str) -> None:
        if jax.process_index() == 0:
            runtime.current().note(message)
