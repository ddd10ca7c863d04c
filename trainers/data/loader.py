"""Global batches by their index: batch k is a pure function of (dataset, k), on any number of hosts.

So the position of the data is one integer: resuming seeks, any number of hosts sees the same samples in the same order, and
there is no iterator state to lose.
"""

from __future__ import annotations

import collections
import concurrent.futures
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from trainers.data.collate import Preprocess, preprocessed, stack
from trainers.parallel import mesh as meshes


class RandomAccess(Protocol):
    """Examples by index: `dataset[i]` is a dict of arrays of fixed shapes with an int32 `sample_id`, and always the same."""

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]: ...

    def __len__(self) -> int:
        """Examples in one epoch. A training dataset takes any index and repeats (reshuffled) after these."""


class StepAddressedLoader:
    """`batch(k)` for k, k + 1, ...: read ahead on threads; any other k seeks.

    Leaves are [accumulation_steps, rows, ...], row r of the global batch at [r // micro_batch, r % micro_batch], each host
    filling the rows of its own devices. `weight` (float32) is 1 for a real example and 0 for padding: the rows from micro_batch
    on, where replicas cannot share a micro-batch evenly; and what lies past `num_examples`, if given (a held-out set is read
    once, its ragged end counted once).
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
    ):
        self.dataset, self.global_batch_size, self.num_examples = dataset, global_batch_size, num_examples
        self.micro_batch_size = global_batch_size // accumulation_steps
        self.shape = (accumulation_steps, meshes.padded_rows(mesh, self.micro_batch_size))
        self.sharding = meshes.micro_batches(mesh)
        self.preprocess, self.read_ahead = preprocess, read_ahead
        self._threads = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="loader")
        self._ahead: collections.deque[concurrent.futures.Future] = collections.deque()
        self._next: int | None = None
        slices = self.sharding.addressable_devices_indices_map(self.shape)
        self._rows = {device: self._row_numbers(index) for device, index in slices.items() if index}

    def __len__(self) -> int:
        """Batches that `num_examples` (or one epoch) fills, the ragged last one included."""
        return math.ceil((self.num_examples or len(self.dataset)) / self.global_batch_size)

    @property
    def ends(self) -> Callable[[int], bool] | None:
        """Whether there is no data for a batch. None: it never ends, or nobody knows."""
        available = getattr(self.dataset, "available", None)
        size = self.global_batch_size
        return None if available is None else lambda k: available(k * size + 1) <= k * size

    def batch(self, k: int) -> dict[str, jax.Array]:
        if self._next != k:
            self._ahead.clear()
            self._next = k
        while len(self._ahead) <= self.read_ahead:
            self._ahead.append(self._threads.submit(self._load, self._next + len(self._ahead)))
        self._next += 1
        return self._ahead.popleft().result()

    def epoch(self) -> Iterator[dict[str, jax.Array]]:
        return (self.batch(k) for k in range(len(self)))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _row_numbers(self, index: tuple[slice, ...]) -> tuple[tuple[int | None, ...], ...]:
        """Of the global batch; None for padding."""
        micro, rows = (range(*part.indices(size)) for part, size in zip(index, self.shape, strict=True))
        size = self.micro_batch_size
        return tuple(tuple(m * size + r if r < size else None for r in rows) for m in micro)

    def _load(self, k: int) -> dict[str, jax.Array]:
        # Devices that differ only along the tensor axis hold the same rows: read those once.
        parts = {rows: self._read(k, rows) for rows in set(self._rows.values())}
        out: dict[str, jax.Array] = {}
        for name, first in next(iter(parts.values())).items():
            shape = (*self.shape, *first.shape[2:])
            shards = [jax.device_put(parts[rows][name], device) for device, rows in self._rows.items()]
            out[name] = jax.make_array_from_single_device_arrays(shape, self.sharding, shards)
        return out

    def _read(self, k: int, rows: tuple[tuple[int | None, ...], ...]) -> dict[str, np.ndarray]:
        start = k * self.global_batch_size
        last = self._end(start) - 1
        numbers = [None if row is None or start + row > last else start + row for micro in rows for row in micro]
        # Padding repeats an example, so that its values are ordinary ones.
        filler = min(start, last)
        examples = [self.dataset[filler if number is None else number] for number in numbers]
        out = stack(examples, [number is not None for number in numbers])
        if self.preprocess is not None:
            out = preprocessed(out, k, self.preprocess)
        return {name: value.reshape(len(rows), len(rows[0]), *value.shape[1:]) for name, value in out.items()}

    def _end(self, start: int) -> int:
        """The number of the last example that counts, and one."""
        available = getattr(self.dataset, "available", None)
        end = start + self.global_batch_size
        return self.num_examples or (end if available is None else available(end))
