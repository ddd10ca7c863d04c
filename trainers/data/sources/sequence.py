"""A user's own data: a sequence of examples, which is repeated, shuffled and numbered here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gangway.errors import DataError, UsageError
from trainers.data.epoch_order import EpochOrder, where_is

ENDLESS = 1 << 62
"""Data that claims more examples than this is repeated already, as by `grain.MapDataset.repeat()`."""


class Numbered:
    """The examples of `data`, each a dict with a `sample_id`: its index, counted from `first_sample_id`, unless the data has
    one."""

    def __init__(self, data: Any, first_sample_id: int = 0):
        self.data = Columns(data) if isinstance(data, Mapping) else data
        self.first_sample_id = first_sample_id

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        # The remainder: the position in endless data may be too large for an int32.
        number = (self.first_sample_id + index) % np.iinfo(np.int32).max
        return {"sample_id": np.asarray(number, np.int32), **as_example(self.data[index])}

    def where_is(self, index: int) -> str:
        return where_is(self.data, index)


class Columns:
    """The rows of a dict of arrays [N, ...]. Raises UsageError if their lengths differ."""

    def __init__(self, columns: Mapping[str, Any]):
        # On the host: a row of a device array would be copied by itself.
        self.columns = {name: np.asarray(column) for name, column in columns.items()}
        lengths = {name: len(column) if column.ndim else 0 for name, column in self.columns.items()}
        if len(set(lengths.values())) != 1:
            detail = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise UsageError(f"the data is a dict of columns of different lengths ({detail or 'no column'}): expected equal ones")
        self._num_rows = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: column[index] for name, column in self.columns.items()}


def as_example(value: Any) -> Mapping[str, Any]:
    """Returns an example as a dict: `x` and `y` of a pair, `x` of one array or number. Raises DataError."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple | list) and len(value) == 2:
        return {"x": value[0], "y": value[1]}
    if hasattr(value, "__array__") or isinstance(value, int | float):
        return {"x": value}
    kind = type(value).__name__ + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
    raise DataError(f"an example of the data is a {kind}: expected a dict of arrays by name, or a pair (x, y)")


def training_examples(data: Any, seed: int, *, shuffle: bool) -> Any:
    """Returns the examples of any index from 0 on: those of `data`, epoch after epoch, in an order that depends on `seed` and
    the epoch.

    Data whose class has a true `takes_any_index` decides itself which example has an index, and is returned as it is. Raises
    UsageError if there are no examples.
    """
    if getattr(data, "takes_any_index", False):
        return data
    examples = Numbered(data)
    if len(examples) == 0:
        raise UsageError(f"the training data ({type(data).__name__}) has no examples: give it some")
    return examples if len(examples) >= ENDLESS else EpochOrder(examples, seed, shuffle=shuffle)


def held_out_examples(data: Any, num_training_examples: int) -> Any:
    """Returns the examples to evaluate on. Their ids come after those of the training: in a digest of samples they cannot be
    taken for training samples. Raises UsageError for what has no examples by index."""
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UsageError(
            f"dataset_eval is {type(data).__name__}, without a length or examples by index: expected a sequence of examples, "
            "such as list(...) of an iterable; configure_dataloaders may return an iterable of batches in its place"
        )
    return data if getattr(data, "takes_any_index", False) else Numbered(data, num_training_examples)
