"""A small state on a mesh of this process's devices, and a manager of its checkpoints that keeps what it was told."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gangway.storage.opening import place_of
from gangway.storage.row import NO_DRIVER, WriterTerm
from trainers.checkpoint import layout
from trainers.checkpoint.manager import CheckpointManager
from trainers.checkpoint.retention import Retention
from trainers.runtime.executables import ProgramStore
from trainers.step.state import TrainState


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), ("data",))


def everywhere() -> NamedSharding:
    return NamedSharding(mesh(), PartitionSpec())


def state(step: int, rows: int = 64) -> TrainState:
    """Another one for each `step`: matrices shared out among devices, vectors and counters on all of them."""
    make = np.random.default_rng(step)
    params = {
        "embed": make.standard_normal((rows, 16), np.float32),
        "layer": {"kernel": make.standard_normal((16, 32), np.float32), "bias": np.zeros(32, np.float32)},
        "half": make.standard_normal((8, 8), np.float32).astype(jnp.bfloat16),
    }
    moments = jax.tree.map(lambda leaf: make.standard_normal(leaf.shape).astype(leaf.dtype), params)
    host = TrainState(
        step=np.int32(step),
        batch_index=np.int32(step),
        params=params,
        opt_state=(moments, np.int32(step)),
        totals={"tokens": np.array([0, step * 100], np.uint32)},
        sums={},
        loss_stats={"mean": np.float32(step / 7)},
    )
    return jax.tree.map(_place, host)


def abstract(like: TrainState) -> TrainState:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like)


def manager(
    folder,
    *,
    keep: int = 3,
    retention: Retention | None = None,
    ordered_step: int | None = None,
    term: WriterTerm = NO_DRIVER,
    storage_patience_s: float | None = None,
) -> Recording:
    """With a term, its driver takes the run over first, if it has not done so."""
    row = layout.row_of(place_of(folder))
    if row.newest().term.driver_term < term.driver_term:
        row.take_over({}, term.driver_term - 1, found=lambda: layout.without_row(place_of(folder).parent))
    return Recording(str(folder), keep, retention, ordered_step, term, storage_patience_s)


def names(folder) -> list[str]:
    """What lies in the folder: of a checkpoint that is committed the step, and of all else the name."""
    place = place_of(folder)
    committed = {kept.folder: str(step) for step, kept in layout.committed_in(place_of(place)).items()}
    return sorted(committed.get(name, name) for name in os.listdir(place.path))


def at(folder, step: int) -> Path:
    """The folder of the checkpoint of a step on this machine."""
    return layout.at(place_of(folder), step).path


def take_over(folder) -> int:
    """Another driver takes the run over; returns its term."""
    return layout.row_of(place_of(folder)).take_over({"hostname": "elsewhere"}).term.driver_term


class Recording(CheckpointManager):
    """Its `saved`, `failed` and `notes` are what it has told so far."""

    def __init__(
        self,
        folder: str,
        keep: int,
        retention: Retention | None,
        ordered_step: int | None,
        term: WriterTerm,
        storage_patience_s: float | None,
    ):
        self.saved: list[int] = []
        self.failed: list[tuple[int, str]] = []
        self.notes: list[str] = []
        super().__init__(
            folder,
            retention or Retention(keep),
            mesh(),
            ProgramStore(None, "test", self.notes.append),
            on_saved=lambda step, path: self.saved.append(step),
            on_failed=lambda step, error: self.failed.append((step, error)),
            note=self.notes.append,
            ordered_step=ordered_step,
            term=term,
            storage_patience_s=storage_patience_s,
        )

    def save_now(self, step: int, rows: int = 64, **meta) -> TrainState:
        """Saves the state of `step` and waits; returns the state."""
        made = state(step, rows)
        self.save(step, made, {"batch_index": step, "metrics": {}, "skipped_batches": [], **meta})
        self.wait()
        return made


def same(one: TrainState, other: TrainState) -> bool:
    """Bit for bit, also where a value is no number."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() and a.dtype == b.dtype for a, b in pairs)


def _place(leaf) -> jax.Array:
    leaf = np.asarray(leaf)
    return jax.device_put(leaf, NamedSharding(mesh(), PartitionSpec("data")) if leaf.ndim > 1 else everywhere())
