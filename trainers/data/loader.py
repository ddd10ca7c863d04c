"""Global batches by their index: batch k is a pure function of (dataset, k), on any number of hosts. Single examples are read
again after an error that may pass, and past those that cannot be read, if the settings say so.

The position of the data is therefore one integer. Resuming seeks, any number of hosts gets the same samples in the same order,
and there is no iterator state that could be lost.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from gangway.errors import DataError, DataUnavailableError, TransientError, UsageError, may_pass
from trainers.config import DataConfig
from trainers.data.collate import Collator, Preprocess, check_numbers, preprocessed, stack
from trainers.data.epoch_order import where_is
from trainers.parallel import mesh as meshes
from trainers.protocol import SKIPPED, Ids


class RandomAccess(Protocol):
    """Examples by index: `dataset[i]` is a dict of arrays of fixed shapes with an int32 `sample_id`, and always the same."""

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]: ...

    def __len__(self) -> int:
        """Returns the number of examples in one epoch. A training dataset takes any index, and repeats (reshuffled) after
        these."""


@runtime_checkable
class HasNotes(Protocol):
    """Data of which a person should know something, such as packed rows."""

    def notes(self) -> list[str]:
        """Returns a line for each thing to know."""


@runtime_checkable
class TellsNumbers(Protocol):
    """Data that has metrics of its own."""

    def numbers(self) -> dict[str, float]:
        """Returns metrics that stay the same while the run goes on."""

    def numbers_at(self, num_rows: int) -> dict[str, float]:
        """Returns the metrics of the first `num_rows` rows."""


class StepAddressedLoader:
    """Loads `batch(k)`. For k, k + 1, ... it reads ahead on threads; any other k seeks.

    Leaves are [accumulation_steps, rows, ...]. Row r of the global batch is at [r // micro_batch, r % micro_batch], and each
    host fills the rows of its own devices. `weight` (float32) is 1 for a real example and 0 for padding. Padded are the rows
    from micro_batch on, where the replicas cannot divide a micro-batch evenly, and what lies past `num_examples`, if given (a
    held-out set is read once, and its ragged end counts once).
    """

    def __init__(
        self,
        dataset: RandomAccess,
        global_batch_size: int,
        mesh: Mesh,
        *,
        accumulation_steps: int = 1,
        num_examples: int | None = None,
        preprocess: Preprocess | None = None,
        read_ahead: int = 2,
        read: Callable[[int], Mapping[str, np.ndarray]] | None = None,
        collator: Collator | None = None,
        ids: Mapping[str, Ids] = MappingProxyType({}),
    ):
        self.dataset, self.global_batch_size, self.num_examples = dataset, global_batch_size, num_examples
        self.micro_batch_size = global_batch_size // accumulation_steps
        # Only the padding depends on the mesh: the real rows of batch k are the same on any.
        self.shape = (accumulation_steps, meshes.padded_rows(mesh, self.micro_batch_size))
        self.sharding = meshes.micro_batches(mesh)
        self.read = dataset.__getitem__ if read is None else read
        self.preprocess, self.read_ahead, self.collator, self.ids = preprocess, read_ahead, collator, ids
        # Few: with 16 threads Grain read no faster than with one (measured on two CPU cores).
        self._threads = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="loader")
        self._ahead: collections.deque[concurrent.futures.Future] = collections.deque()
        self._next: int | None = None
        self._shapes: Mapping[str, tuple[np.dtype, tuple[int, ...] | None]] | None = None
        slices = self.sharding.addressable_devices_indices_map(self.shape)
        self._rows: dict[Any, tuple[tuple[int | None, ...], ...]] = {}
        """The row numbers in the global batch that devices hold, by `_key`; None: padding. They are the same in every batch."""
        for index in filter(None, slices.values()):
            micro, rows = (range(*part.indices(size)) for part, size in zip(index, self.shape, strict=True))
            size = self.micro_batch_size
            self._rows[_key(index)] = tuple(tuple(m * size + r if r < size else None for r in rows) for m in micro)

    def __len__(self) -> int:
        """Returns the number of batches in `num_examples` (or one epoch), including the ragged last one."""
        return math.ceil((self.num_examples or len(self.dataset)) / self.global_batch_size)

    @property
    def ends(self) -> Callable[[int], bool] | None:
        """Returns a function that says whether there is no data for a batch. None: the data never ends, or its end is not
        known."""
        available = getattr(self.dataset, "available", None)
        size = self.global_batch_size
        # One example is enough for a batch: the rest of it is padding.
        return None if available is None else lambda k: available(k * size + 1) <= k * size

    is_shared = True
    """Every host reads the same data."""

    @property
    def is_stream(self) -> bool:
        """Whether the data is read in order, and may have a state: then `state_at` and `remember` may be called."""
        return hasattr(self.dataset, "state_at")

    def state_at(self, k: int) -> str | None:
        """Returns the state of the data before batch k; None if there is none."""
        return self.dataset.state_at(k * self.global_batch_size)  # type: ignore[attr-defined]

    def remember(self, k: int, state: str) -> None:
        """Takes what `state_at(k)` has returned in another process: batch k is then read from there."""
        self.dataset.remember(k * self.global_batch_size, state)  # type: ignore[attr-defined]

    def begin(self, k: int) -> None:
        """Reads batch k and those after it ahead. Not of a stream, which may be at its end."""
        if self.is_stream:
            return
        self._next = k
        self._ahead = collections.deque(self._threads.submit(self._load, k + ahead) for ahead in range(self.read_ahead + 1))

    def batch(self, k: int) -> dict[str, jax.Array]:
        if self._next != k:
            self._ahead.clear()  # a seek: what was read ahead belongs to other batches
            self._next = k
        # Batch k itself, and `read_ahead` more: hence `<=`.
        while len(self._ahead) <= self.read_ahead:
            self._ahead.append(self._threads.submit(self._load, self._next + len(self._ahead)))
        self._next += 1
        # An error in a reading thread is raised here, on the thread that trains.
        return self._ahead.popleft().result()

    def epoch(self) -> Iterator[dict[str, jax.Array]]:
        return (self.batch(k) for k in range(len(self)))

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        """The batches of one epoch, or of the whole stream, from the first on."""
        if (ends := self.ends) is None:
            return self.epoch()
        return (self.batch(k) for k in itertools.takewhile(lambda k: not ends(k), itertools.count()))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _load(self, k: int) -> dict[str, jax.Array]:
        # Devices that differ only along the tensor axis hold the same rows: they are read once.
        parts = {part: self._read(k, rows) for part, rows in self._rows.items()}

        def placed(name: str, first: np.ndarray) -> jax.Array:
            # To each of this host's own devices: no collective, and no wait for the other hosts. With a `device_put` for each
            # device it takes three times as long.
            shape = (*self.shape, *first.shape[2:])
            return jax.make_array_from_callback(shape, self.sharding, lambda index: parts[_key(index)][name])

        return {name: placed(name, first) for name, first in next(iter(parts.values())).items()}

    def _read(self, k: int, rows: tuple[tuple[int | None, ...], ...]) -> dict[str, np.ndarray]:
        start = k * self.global_batch_size
        last = self._end(start) - 1
        indices = [None if row is None or start + row > last else start + row for micro in rows for row in micro]
        # Padding repeats an example: its weight is 0, but its values must be ordinary ones (0 * NaN would be NaN).
        filler = min(start, last)
        examples = [self.read(filler if index is None else index) for index in indices]
        batch = stack(examples, [index is not None for index in indices], self.collator)
        self._check_shapes(batch, indices[0] if indices[0] is not None else filler)
        if SKIPPED in batch:
            batch[SKIPPED] *= np.array([index is not None for index in indices])  # padding is no example that was left out
        if self.preprocess is not None:
            batch = preprocessed(batch, k, self.preprocess)
        check_numbers(batch, self.ids)
        return {name: leaf.reshape(len(rows), len(rows[0]), *leaf.shape[1:]) for name, leaf in batch.items()}

    def _check_shapes(self, batch: Mapping[str, np.ndarray], first_row: int) -> None:
        """Raises DataError if the rows have other columns or types than earlier ones, or, of a collator, other shapes: the step
        is compiled for one. Examples of another length, all of a batch alike, are trained on: the step is compiled again."""
        own = self.collator is not None
        shapes = {name: (leaf.dtype, leaf.shape[1:] if own else None) for name, leaf in batch.items()}
        if self._shapes is None:
            self._shapes = shapes
        wrong = sorted(name for name in shapes.keys() | self._shapes.keys() if shapes.get(name) != self._shapes.get(name))
        if not wrong:
            return
        found = ", ".join(f"{name} {_kind(shapes.get(name))}, before {_kind(self._shapes.get(name))}" for name in wrong)
        if own:
            raise DataError(f"the collator returned leaves of other shapes or types than before: {found}; pad to a fixed length")
        raise DataError(
            f"the examples from index {first_row} on have other columns or types than those before: {found}; give all of them "
            "the same ones, such as np.float32(value)"
        )

    def _end(self, start: int) -> int:
        """Returns the index after the last example that counts."""
        available = getattr(self.dataset, "available", None)
        end = start + self.global_batch_size
        return self.num_examples or (end if available is None else available(end))


def _key(index: Any) -> tuple[tuple[int | None, int | None], ...]:
    """Returns what the part of a device is found by, given its slices of the micro-batches, the rows and more."""
    return tuple((part.start, part.stop) for part in index[:2])


def _kind(leaf: tuple[np.dtype, tuple[int, ...] | None] | None) -> str:
    if leaf is None:
        return "absent"
    dtype, shape = leaf
    return str(dtype) if shape is None else f"{dtype}{list(shape)}"


NOTED = 5
"""How many examples that were left out are named in notes."""
LONGEST_GAP = 1000
"""How many examples are searched for one that can be read in place of another."""


class Reader:
    """Reads examples of `dataset`. Called in the loader's threads. Streams are not read again: an iterator that has raised is
    at its end."""

    def __init__(
        self,
        dataset: Any,
        config: DataConfig,
        note: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.dataset, self.config, self.note, self.sleep = dataset, config, note, sleep
        self.is_stream = hasattr(dataset, "available")
        self._num_noted = 0

    def __call__(self, index: int) -> Mapping[str, Any]:
        """Returns the example. Raises DataUnavailableError after too many errors that might have passed."""
        if self.config.on_error == "raise" or self.is_stream:
            return self._read(index)
        try:
            return {**self._read(index), SKIPPED: np.zeros((), np.float32)}
        except UsageError:  # it is wrong in the same way for all examples
            raise
        except Exception as error:
            if self._num_noted < NOTED:
                self._num_noted += 1
                cause = error.__cause__ or error
                self.note(f"{where_is(self.dataset, index)} is left out: {type(cause).__name__}: {cause}")
            return self._filling(index, error)

    def _read(self, index: int) -> Mapping[str, Any]:
        tries = 1 if self.is_stream else 1 + self.config.retries
        for attempt in range(1, tries + 1):
            try:
                return self._columns(self.dataset[index])
            except Exception as error:
                if not may_pass(error) or self.is_stream:
                    error.add_note(f"while {where_is(self.dataset, index)} was read")
                    raise
                if attempt == tries:
                    message = (
                        f"{where_is(self.dataset, index)} could not be read, tried {tries} times: {type(error).__name__}: {error}"
                    )
                    raise DataUnavailableError(message) from error
                self.sleep(self.config.retry_backoff_s * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    def _filling(self, index: int, error: Exception) -> dict[str, Any]:
        """Returns another example in place of one that cannot be read; its weight is 0."""
        for other in range(index + 1, index + LONGEST_GAP):
            try:
                example = self._columns(self.dataset[other])
            except (UsageError, TransientError, OSError, ValueError, KeyError, RuntimeError):
                continue
            return {**example, "weight": np.zeros((), np.float32), SKIPPED: np.ones((), np.float32)}
        raise error

    def _columns(self, example: Mapping[str, Any]) -> Mapping[str, Any]:
        ignored = self.config.ignore_columns
        return {name: value for name, value in example.items() if name not in ignored} if ignored else example
