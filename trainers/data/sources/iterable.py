"""A user's own data: a sequence of examples, which is repeated, shuffled and numbered here; or what can only be read in order. A
position in that is found again by its state, or by counting from the beginning."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from gangway.errors import DataError, UsageError
from trainers.config.arguments import TrainingArguments
from trainers.data.epoch_order import EpochOrder, where_is
from trainers.data.streams import Stream

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


KEPT_BATCHES = 8
"""The number of batches to keep: more than the loader reads at once, ahead of and behind the step."""


class IterableSource:
    """Gives the examples of an iterable by index, for reading forward. An index more than `num_kept` examples back is found from
    the nearest state of the data (`Stream`), or from its beginning.

    Each host reads all of the data, and keeps its own rows. Every `iter()` must begin anew and give the same examples in the
    same order. `note` gets a line on what the counting cost. Several threads may use one source.
    """

    def __init__(self, dataset: Iterable[Mapping[str, Any]], num_kept: int, note: Callable[[str], None]):
        problem = (
            f"the training data is an iterator ({type(dataset).__name__}), which can be read only once: give an object whose "
            "__iter__ begins anew, or one with get_state and set_state, so that a run can go on after a restart"
        )
        self.dataset, self.num_kept, self.note = dataset, num_kept, note
        self._lock = threading.Lock()
        # A state for each batch: a checkpoint has the state before one.
        every = max(1, num_kept // KEPT_BATCHES)
        self._stream = Stream(dataset, every=every, num_states=KEPT_BATCHES, no_way_back=problem, note=note)
        if not self._stream.can_go_back:
            raise UsageError(problem)
        self._kept: collections.deque[Mapping[str, Any]] = collections.deque(maxlen=num_kept)
        """The last examples before the position of the stream."""

    def __len__(self) -> int:
        """Returns the number of all examples; 0 if the data has no length."""
        return num_examples(self.dataset) or 0

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Returns the example. Raises IndexError past the end."""
        with self._lock:
            if self._read_to(index + 1) <= index:
                raise IndexError(f"the data ends after {self._stream.position} examples")
            # Negative, so it counts from the right end: the newest example kept is the one before the position.
            return self._kept[index - self._stream.position]

    def available(self, stop: int) -> int:
        """Returns how many examples there are, up to `stop`. Reads that far."""
        with self._lock:
            return stop if stop <= self._stream.position else min(self._read_to(stop), stop)

    def state_at(self, position: int) -> str | None:
        """Returns the state of the data before the example `position`, the first of a batch; None if there is none."""
        with self._lock:
            # The rows of this host may be the first ones of the batch before: then the others were not read yet.
            if 0 < position - self._stream.position <= self._stream.every and self._stream.has_state:
                self._read_to(position)
            return self._stream.state_at(position)

    def remember(self, position: int, state: str) -> None:
        """Takes what `state_at(position)` has returned in another process."""
        with self._lock:
            self._stream.remember(position, state)

    def _read_to(self, stop: int) -> int:
        """Reads until `stop` examples were read, or there are no more; returns the position. Goes back if `stop` is no longer
        kept."""
        began_s = time.monotonic()
        skipped = self._stream.read_to(stop, self._kept, _numbered) - self.num_kept
        if skipped > 0:
            self.note(
                f"the training data cannot be positioned: {skipped} examples were read and thrown away to find the position, in "
                f"{time.monotonic() - began_s:.1f} s; data with __getitem__ would cost nothing"
            )
        return self._stream.position


def _numbered(example: Any, index: int) -> Mapping[str, Any]:
    if not isinstance(example, Mapping):
        raise DataError(f"the training data gave {type(example).__name__}: expected a dict of arrays by name")
    # A `sample_id` of the data itself takes the place of the count.
    return {"sample_id": np.asarray(index, np.int32), **example}


def random_access(dataset: Any, arguments: TrainingArguments, note: Callable[[str], None]) -> Any:
    """Returns training data by any index: the examples of a sequence, or, if it can only be iterated over, an IterableSource of
    it. Raises UsageError."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return training_examples(dataset, arguments.seed, shuffle=arguments.data.shuffle)
    if not hasattr(dataset, "__iter__"):
        raise UsageError(
            f"data.dataset gave {type(dataset).__name__}: expected examples by index (__getitem__ and __len__), or an iterable "
            "of them"
        )
    epochs = arguments.max_num_data_epochs
    if epochs is not None and (epochs > 1 or num_examples(dataset) is None):
        raise UsageError(
            f"max_num_data_epochs = {epochs}: the training data is iterable ({type(dataset).__name__}): it is read once, to its "
            "end, and need not have a length; set max_num_steps"
        )
    return IterableSource(dataset, KEPT_BATCHES * arguments.global_batch_size, note)


def num_examples(dataset: Any) -> int | None:
    """Returns the number of examples in one epoch; None if it is not known."""
    if isinstance(dataset, Mapping):  # of columns: each has as many, or the trainer refuses them
        return min((len(column) for column in dataset.values() if getattr(column, "ndim", 1)), default=0) or None
    return (len(dataset) or None) if dataset is not None and hasattr(dataset, "__len__") else None
