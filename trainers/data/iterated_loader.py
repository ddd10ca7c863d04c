"""A user's own loader of batches, that can only be iterated over, as the loop needs it: addressed by step."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from gangway.errors import DataError, UsageError
from trainers.data.collate import check_numbers
from trainers.data.streams import Stream
from trainers.parallel import mesh as meshes
from trainers.protocol import Ids

KEPT_BATCHES = 8
"""How many batches are kept behind the newest: more than the loop reads ahead, so that none is read twice."""

HostBatch = dict[str, np.ndarray]


class IteratedLoader:
    """`batch(k)` and `epoch()` from batches of host arrays: dicts by name, with this host's rows of the global batch, first for
    the first micro-batch. A last batch may have fewer rows. `weight` and `sample_id` are made where they are lacking. At its
    end it is begun anew, until there were `passes` over it.

    Batches are read on the thread that trains: an iterable should read ahead by itself. If it has a state (`Stream`), a resumed
    run sets it. If not, it draws batches and drops them until it is where it was, and `note` tells so.
    """

    is_stream, is_shared = True, False
    """It may have a state, and each host reads data of its own."""

    def __init__(
        self,
        batches: Iterable[Mapping[str, Any]],
        global_batch_size: int,
        mesh: Mesh,
        *,
        accumulation_steps: int = 1,
        note: Callable[[str], None] = lambda message: None,
        passes: int = 1,
        ids: Mapping[str, Ids] = MappingProxyType({}),
    ):
        hosts, self.host = jax.process_count(), jax.process_index()
        self.shape = (accumulation_steps, meshes.padded_rows(mesh, global_batch_size // accumulation_steps))
        if self.shape[1] != global_batch_size // accumulation_steps or self.shape[1] % hosts:
            raise UsageError(
                f"a loader of batches needs micro-batches that the replicas and the {hosts} hosts divide evenly: "
                f"{global_batch_size // accumulation_steps} rows do not; change global_batch_size, or give a dataset"
            )
        self.batches, self.note, self.global_batch_size, self.ids = batches, note, global_batch_size, ids
        self.sharding, self.num_rows = meshes.micro_batches(mesh), global_batch_size // hosts
        if _rows_of_host(self.sharding, self.shape) * hosts != self.shape[1]:
            raise UsageError(
                "a loader of batches gives each host rows of its own, and hosts of this mesh share rows: mesh.tensor or "
                "mesh.context goes over several hosts; put more devices on mesh.data or mesh.fsdp, or give a dataset"
            )
        problem = (
            f"the loader of batches is an iterator ({type(batches).__name__}), which cannot go back to its beginning: "
            "configure_dataloaders must return an object whose __iter__ begins anew, or one with get_state and set_state"
        )
        self._stream = Stream(batches, every=1, num_states=KEPT_BATCHES, no_way_back=problem, note=note, passes=passes)
        self._kept: collections.deque[HostBatch] = collections.deque(maxlen=KEPT_BATCHES)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    @property
    def can_begin_anew(self) -> bool:
        return self._stream.can_go_back

    @property
    def batches_of_epoch(self) -> int | None:
        """The number of batches of a pass; None until the first has ended, and on several hosts, whose passes may have other
        lengths."""
        return self._stream.length if jax.process_count() == 1 else None

    def ends(self, k: int) -> bool:
        """Whether there is no batch k."""
        return self._read(k) is None

    def batch(self, k: int) -> dict[str, jax.Array]:
        batch = self._read(k)
        if batch is None:
            raise DataError(f"the loader of batches ended after {self._stream.position} batches: there is no batch {k}")
        return self._on_devices(batch)

    def epoch(self) -> Iterator[dict[str, jax.Array]]:
        """All batches, for an evaluation; begins anew each time."""
        self._kept.clear()  # so that batch 0 is read anew
        k = 0
        while (batch := self._read(k)) is not None:
            yield self._on_devices(batch)
            k += 1

    __iter__ = epoch

    def close(self) -> None:
        self._kept.clear()

    def state_at(self, k: int) -> str | None:
        """Returns the state of this host's iterable before batch k; None if there is none."""
        return self._stream.state_at(k)

    def remember(self, k: int, state: str) -> None:
        """Takes what `state_at(k)` has returned in another process: batch k is then read from there."""
        self._stream.remember(k, state)

    def _read(self, k: int) -> HostBatch | None:
        """Returns the host's batch k; None if there is none."""
        began_s = time.monotonic()
        num_read = self._stream.read_to(k + 1, self._kept, self._checked)
        if num_read > KEPT_BATCHES:
            self.note(
                f"the loader of batches cannot be positioned: {num_read - 1} batches were drawn and dropped to find batch "
                f"{k}, in {time.monotonic() - began_s:.1f} s"
            )
        return self._kept[k - self._stream.position] if k < self._stream.position else None

    def _checked(self, drawn: Any, k: int) -> HostBatch:
        """Returns a batch with all rows of this host, `weight` and `sample_id`. Raises DataError."""
        if not isinstance(drawn, Mapping):
            raise DataError(f"the loader of batches gave {type(drawn).__name__}: expected a dict of arrays by name")
        batch = {name: np.asarray(leaf) for name, leaf in drawn.items()}
        sizes = {name: leaf.shape[0] if leaf.ndim else 0 for name, leaf in batch.items()}
        rows = next(iter(sizes.values()), 0)
        if len(set(sizes.values())) != 1 or not 0 < rows <= self.num_rows:
            detail = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise DataError(
                f"batch {k} of the loader has rows of {detail or 'nothing'}: expected {self.num_rows} in each leaf, the "
                "rows of this host"
            )
        first_id = k * self.global_batch_size + self.host * self.num_rows
        ids = (first_id + np.arange(rows, dtype=np.int64)) % np.iinfo(np.int32).max
        batch = {"weight": np.ones(rows, np.float32), "sample_id": ids.astype(np.int32), **batch}
        check_numbers(batch, self.ids)
        if rows == self.num_rows:
            return batch
        # Filled up with the first row: its weight is 0, but its values must be ordinary ones.
        filling = np.where(np.arange(self.num_rows) < rows, np.arange(self.num_rows), 0)
        filled = {name: leaf[filling] for name, leaf in batch.items()}
        filled["weight"] = np.where(np.arange(self.num_rows) < rows, filled["weight"], 0).astype(np.float32)
        return filled

    def _on_devices(self, batch: HostBatch) -> dict[str, jax.Array]:
        def place(leaf: np.ndarray) -> jax.Array:
            local = leaf.reshape(self.shape[0], -1, *leaf.shape[1:])
            return jax.make_array_from_process_local_data(self.sharding, local, (*self.shape, *leaf.shape[1:]))

        return {name: place(leaf) for name, leaf in batch.items()}


def _rows_of_host(sharding: Any, shape: tuple[int, int]) -> int:
    """Returns how many rows of each micro-batch the devices of this host hold."""
    rows = {index[1].indices(shape[1])[:2] for index in sharding.addressable_devices_indices_map(shape).values()}
    return sum(last - first for first, last in rows)


def as_loader(given: Any, make: Callable[[Iterable[Any]], IteratedLoader], needed: tuple[str, ...]) -> Any:
    """Returns `given` if it has the methods `needed`, else an IteratedLoader made of it. Raises UsageError."""
    if all(callable(getattr(given, name, None)) for name in needed):
        return given
    if not hasattr(given, "__iter__"):
        raise UsageError(
            f"configure_dataloaders returned {type(given).__name__}: expected an iterable of batches (dicts of arrays with this "
            f"host's rows), or an object with {' and '.join(needed)}"
        )
    return make(given)


def first_rows(loader: Any) -> dict[str, np.ndarray]:
    """Returns the first batch of a loader without `batch(k)`, with `weight` and `sample_id`, as rows. The loader is read again
    from its beginning. Raises UsageError if it cannot be."""
    if not hasattr(loader, "__iter__"):
        raise UsageError(
            f"configure_dataloaders returned {type(loader).__name__}, and there is no dataset_train, whose first example shows "
            "the shapes of a batch: give it, or return an iterable of batches"
        )
    problem = (
        f"configure_dataloaders returned an iterator ({type(loader).__name__}), and there is no dataset_train: reading the "
        "shapes of a batch would use it up; return an object whose __iter__ begins anew, or give dataset_train"
    )
    stream = Stream(loader, every=1, num_states=1, no_way_back=problem, note=lambda message: None)
    if not stream.can_go_back:
        raise UsageError(problem)
    try:
        drawn = stream.read()
    except StopIteration:
        raise DataError(f"the loader of batches ({type(loader).__name__}) has none") from None
    stream.go_to(0, 1)
    if not isinstance(drawn, Mapping):
        raise DataError(f"the loader of batches gave {type(drawn).__name__}: expected a dict of arrays by name")
    batch = {name: np.asarray(leaf) for name, leaf in drawn.items()}
    rows = len(next(iter(batch.values())))
    return {"weight": np.ones(rows, np.float32), "sample_id": np.zeros(rows, np.int32), **batch}
