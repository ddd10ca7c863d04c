"""Checkpoints: saved in the background, committed by all hosts or none, and restored from the newest one that is whole.

A checkpoint of step S (a batch index) is a folder `checkpoints/S-...` (`trainers.checkpoint.layout`): `state` (the arrays, by
Orbax), `meta.json` (the position of the data, the seed, the fingerprint of every leaf, the arguments) and `manifest.json` (size
and digest of every file), which is written last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from gangway.errors import NonFiniteStateError
from gangway.storage.opening import place_of_run
from gangway.storage.row import NO_DRIVER, WriterTerm
from gangway.storage.store import Place
from trainers import runtime
from trainers.checkpoint import layout, manifest, model_only, trial
from trainers.checkpoint.commit import CommitError
from trainers.checkpoint.course import Course
from trainers.checkpoint.fingerprints import MeasuredState, Measurement
from trainers.checkpoint.ownership import Ownership, StorageCheck
from trainers.checkpoint.restorer import Accept, Restored, Restorer
from trainers.checkpoint.retention import Retention
from trainers.checkpoint.savers import ModelSaver, StateSaver
from trainers.checkpoint.tidier import Tidier
from trainers.checkpoint.trial import UnsavableError
from trainers.checkpoint.validate import num_bytes_of
from trainers.config import CheckpointConfig, ScoreConfig
from trainers.runtime import multihost
from trainers.runtime.executables import ProgramStore
from trainers.step.state import TrainState


class CheckpointManager:
    """Saves and restores the state of one run. All hosts must call `save`, `restore`, `wait` and `close` alike.

    on_saved(step, path) and on_failed(step, error) are called on every host when a save has ended, usually from a background
    thread. A save that fails on one host has failed on all, and does not stop training.

    Only a state that is finite is saved, and restored. What was infinite as the run began, such as a mask, may stay so.
    """

    def __init__(
        self,
        folder: str,
        retention: Retention,
        mesh: Mesh,
        store: ProgramStore,
        *,
        on_saved: Callable[[int, str], None],
        on_failed: Callable[[int, str], None],
        note: Callable[[str], None],
        ordered_step: int | None = None,
        term: WriterTerm = NO_DRIVER,
        storage_patience_s: float | None = None,
    ):
        """`ordered_step` is the highest step that the driver knows was committed. `term` is the generation of this process.
        `storage_patience_s` limits how long a save may wait for the storage before it begins; None: no limit."""
        self._storage_patience_s = storage_patience_s
        self._measured = MeasuredState(mesh, store, note)
        self._course = Course()
        run, name = os.path.split(folder)
        self._owner = Ownership(place_of_run(run) / name, term, ordered_step, note)
        self._tidier = Tidier(self._owner, self._course, retention, note)
        self._saver = StateSaver(self._owner, self._course, self._tidier, on_saved=on_saved, on_failed=on_failed)
        self._models = ModelSaver(self._owner, self._tidier, note)
        self._restorer = Restorer(self._owner, self._course, self._measured, note)
        self._room = StorageCheck()

    def save(self, step: int, state: TrainState, meta: dict[str, Any], *, patient: bool = False) -> None:
        """Starts a save; returns when the arrays were copied, so that `state` may be donated at once.

        Waits for the save before it, if that is still in progress. The hosts first agree on whether anything prevents the save
        on any of them (no room, storage gone, another driver). If so, it has failed on all of them when this returns. The same
        holds if the storage does not answer in time; with `patient` there is no such limit.

        Raises NonFiniteStateError, on all hosts, if values of the state have become infinite or NaN.
        """
        # First: only when the save before this one has ended is `last_saved_step` known.
        self.wait_for_save()
        if step == self.last_saved_step:
            return
        # Before Orbax copies anything: what is read back later is compared with the state itself.
        described = _AsSaved(step, meta, self._measured, state)
        if jax.default_backend() == "cpu":
            described.broken()  # waits: the cores that measure are those that write, and a save beside it slows it down threefold
        patience_s = None if patient else self._storage_patience_s
        if problem := self._owner.claim(patience_s):
            self._saver.failed(step, problem)
        else:
            self._saver.save(step, state, described.meta, patience_s)
        # Only now: an accelerator has measured it while the arrays were copied. The save itself has found the same.
        if described.broken():
            self._saver.refused()
            raise described.error()

    def save_model(self, step: int, state: TrainState, meta: dict[str, Any], *, patient: bool = False) -> None:
        """Starts a save of the model alone, to the folder `models`; returns when it was copied. A checkpoint may be saved
        at the same time. A failure is noted."""
        described = _AsSaved(step, meta, self._measured, state)
        patience_s = None if patient else self._storage_patience_s
        if problem := self._owner.claim(patience_s):
            self._models.failed(step, problem)
            return
        # It belongs to the course that is trained now, whatever had its name.
        self._course.abandoned_models -= {step}
        parts = {part: getattr(state, part) for part in model_only.parts_in(described.measurement.shapes)}
        self._models.save(step, parts, described.meta, patience_s)

    def wait_for_save(self) -> None:
        """Returns when no save is in progress."""
        self._saver.wait()

    def wait(self) -> None:
        """Returns when no save is in progress and old checkpoints have been deleted."""
        self.wait_for_save()
        self._models.wait()
        self._tidier.wait()

    def close(self) -> None:
        """Waits, and deletes the old checkpoints that were being read before."""
        self.wait()
        self._tidier.finish()

    def restore(self, abstract: TrainState, accept: Accept | None = None, before: int | None = None) -> Restored | None:
        """Restores the newest checkpoint that is whole and acceptable, of a step up to `before`; the same on all hosts.

        Returns None if there are no checkpoints, or none was acceptable. `abstract` gives shapes and shardings, on any mesh. One
        that has lost its manifest is a last resort.

        Raises CheckpointError if the checkpoints are of another model. Raises CheckpointUnavailableError if there are
        acceptable checkpoints and none of them is whole, or if some that were committed cannot be seen: training never starts
        again from step 0 silently.
        """
        self.wait()  # a save in progress may be about to commit a newer checkpoint
        return self._restorer.restore(abstract, accept, before)

    def go_on_from(self, step: int, make: Callable[[], TrainState], allowed: Mapping[str, int]) -> tuple[TrainState | None, str]:
        """Goes on from a state that is no checkpoint, which `make` returns. `allowed`: how many of its values may be infinite or
        NaN, by leaf. Returns None and the reason if there is a newer checkpoint, or if more are. Raises what `restore` raises if
        the checkpoints cannot be seen."""
        return self._restorer.go_on_from(step, make, allowed)

    @property
    def not_finite(self) -> Mapping[str, int]:
        """How many values of a leaf may be infinite or NaN, for they were so as the run began. Waits for the device, once."""
        return self._measured.allowed() or {}

    @property
    def folder(self) -> Place:
        """Where the checkpoints are, each in a folder of its own."""
        return self._owner.folder

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, oldest first."""
        return layout.steps(self.folder)

    def path(self, step: int) -> str:
        return str(self._owner.at(step))

    @property
    def last_saved_step(self) -> int | None:
        """The step of the newest checkpoint that was committed or restored."""
        return self._course.last_saved_step

    @property
    def failing(self) -> bool:
        """Whether the last save failed."""
        return self._saver.failing

    @property
    def problem(self) -> str:
        """Why the last save that failed did."""
        return self._saver.problem

    def no_room(self, state: TrainState) -> str:
        """Returns that the storage has no room for a checkpoint of such a state, the same on all hosts, which must all call this;
        empty if it has, or if nobody can tell, as of a bucket. `state` may be shapes."""
        num_bytes = num_bytes_of(state)
        problem = self._no_room(num_bytes)
        # What a save that was cut short has left may be what is in the way.
        if problem and not self._owner.claim(self._storage_patience_s):
            if jax.process_index() == 0:
                self._owner.clear_leftovers()
            problem = self._no_room(num_bytes)
        return problem

    def _no_room(self, num_bytes: int) -> str:
        try:
            problem = self._room.ask(lambda: layout.no_room(self.folder, num_bytes), self._storage_patience_s)
        except OSError as error:
            problem = layout.unwritable(self.folder, error)
        return multihost.first_problem(multihost.all_hosts("room", problem))

    def overtaken(self) -> str:
        """Returns that another driver has the run, the same on all hosts, which must all call this; empty if not known."""
        return multihost.from_host0("overtaken", self._owner.overtaken() if jax.process_index() == 0 else "")

    @property
    def unsavable(self) -> str:
        """Why no save can succeed, whatever becomes of the storage; empty as far as is known."""
        return self._saver.unsavable

    def follow_driver(self, driver_term: int) -> None:
        """A driver of this term has taken this generation over. What older ones would commit is refused."""
        self._owner.follow_driver(driver_term)

    def fingerprint(self, state: TrainState) -> np.ndarray:
        """Returns uint32[num_leaves, 2], the same on all hosts. All hosts must call this."""
        return self._measured.fingerprint(state)

    @property
    def infinite_parameters(self) -> bool | None:
        """Whether parameters were not finite as the run began; None: not known. Waits for the device."""
        return self._measured.infinite_parameters

    def broken(self, state: TrainState) -> list[str]:
        """Returns the names of the leaves that have more values that are not finite than as the run began. All hosts must call
        this."""
        return self._measured.broken_in(state)

    def load_ahead(self, state: TrainState) -> None:
        """Begins to load the programs that restoring and saving need. `state` may be shapes with shardings."""
        self._measured.load_ahead(state)

    def prepare(self, state: TrainState) -> None:
        """Compiles what saving needs, if restoring has not done so. `state` may be shapes with shardings."""
        self._measured.prepare(state)

    def try_save(self, state: TrainState, meta: Mapping[str, Any]) -> str:
        """Returns why no save of such a state and such a meta can succeed; empty if nothing is known against it. Needs no
        other host. `state` may be shapes with shardings."""
        try:
            trial.seal_meta(meta)
        except UnsavableError as error:
            return str(error)
        return trial.problem(state)


class _AsSaved:
    """What the meta of a checkpoint says of a state, which the devices still measure."""

    def __init__(self, step: int, about: Mapping[str, Any], measured: MeasuredState, state: TrainState):
        self.measurement: Measurement = measured.begin(state)
        self._step, self._about, self._measured = step, {**about, "format": manifest.FORMAT, "step": step}, measured

    def broken(self) -> list[str]:
        """Returns the leaves that are not finite and should be. Waits for the device."""
        return self._measured.broken(self.measurement.described["not_finite"])

    def error(self) -> NonFiniteStateError:
        return NonFiniteStateError(self._step, self.broken())

    def meta(self) -> dict[str, Any]:
        """Returns the whole meta. Raises CommitError if the state is broken. Waits for the device."""
        if self.broken():
            raise CommitError(str(self.error()))
        return {**self._about, **self.measurement.described}


def manager_of(
    run_folder: str,
    config: CheckpointConfig,
    score: ScoreConfig | None,
    mesh: Mesh,
    programs: ProgramStore,
    on_saved: Callable[[int, str], None],
) -> CheckpointManager:
    """Returns the manager of the folder `checkpoints`. `score`: what decides which checkpoints are the best. `on_saved` is called
    on the thread that saves."""
    host = runtime.current()

    def saved(step: int, path: str) -> None:
        on_saved(step, path)
        host.emit({"ev": "saved", "step": step, "path": path})

    manager = CheckpointManager(
        f"{run_folder}/checkpoints",
        Retention.of(config, score),
        mesh,
        programs,
        on_saved=saved,
        on_failed=lambda step, error: host.emit({"ev": "save_failed", "step": step, "error": error}),
        note=host.note,
        ordered_step=host.committed_step,
        term=WriterTerm(host.driver_term, host.generation),
        storage_patience_s=config.storage_patience_s,
    )
    host.follow_driver(manager.follow_driver)
    return manager
