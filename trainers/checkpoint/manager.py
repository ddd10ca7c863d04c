"""Checkpoints: saved in the background, committed by all hosts or none, and restored from the newest one that is whole.

A checkpoint of step S (a batch index) is the folder `checkpoints/S`: `state` (the arrays, by Orbax), `meta.json` (the position
of the data, the seed, the fingerprint of every leaf, the arguments) and `manifest.json` (size and digest of every file), which
is written last.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from trainers.checkpoint import committed, fence, layout, manifest, model_only, readers, trial
from trainers.checkpoint.array_fingerprints import leaf_names, measured
from trainers.checkpoint.array_io import ArrayFiles
from trainers.checkpoint.commit import Commit, CommitError, Exchange, begin
from trainers.checkpoint.committed import Committed
from trainers.checkpoint.fence import NO_DRIVER, WriterTerm
from trainers.checkpoint.model_saver import ModelSaver
from trainers.checkpoint.retention import Retention
from trainers.checkpoint.storage_check import StorageCheck
from trainers.checkpoint.trial import UnsavableError
from trainers.checkpoint.validate import check_files, check_same_model, num_bytes_of, shapes
from trainers.errors import CheckpointError, CheckpointUnavailableError, NonFiniteStateError
from trainers.parallel.mesh import replicated
from trainers.runtime import multihost
from trainers.runtime.device import wait_for_device
from trainers.runtime.events import RefusedCheckpoint
from trainers.runtime.executables import Program, ProgramStore
from trainers.runtime.multihost import first_problem, of_host0, one_line
from trainers.step.finite import must_be_finite
from trainers.step.state import TrainState
from trainers.storage import ours

Accept = Callable[[dict[str, Any]], str]
"""Returns why a checkpoint with this meta must not be used; empty if it may be."""


@dataclass(frozen=True)
class Restored:
    state: TrainState
    meta: dict[str, Any]
    skipped: list[RefusedCheckpoint] = field(default_factory=list)
    """The checkpoints that were passed over because they are not whole: `step` and `why`."""


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
        ordered: Committed = committed.NOTHING,
        term: WriterTerm = NO_DRIVER,
        storage_patience_s: float | None = None,
    ):
        """`ordered` is what the driver knows was committed; empty without a driver. `term` is the generation of this process.
        `storage_patience_s` limits how long a save may wait for the storage before it begins; None: no limit."""
        self.folder = layout.local(folder)
        self.on_saved, self.on_failed, self.note = on_saved, on_failed, note
        self.fence: str | None = None
        """A path. Once it exists, another driver has the run, and nothing is committed any more."""
        self._own_term = term
        self._term = term
        """The term that new checkpoints carry: no lower than that of the restored one, whoever saved it."""
        self.failing = False
        """Whether the last save failed."""
        self.problem = ""
        """Why the last save that failed did."""
        self.unsavable = ""
        """Why no save can succeed, whatever becomes of the storage; empty as far as is known."""
        self.last_saved_step: int | None = None
        self._superseded: set[int] = set()
        """The steps of checkpoints that no longer count: damaged ones, and those of a course that was rolled back."""
        self._abandoned_models: frozenset[int] = frozenset()
        """The same for checkpoints of the parameters alone: they are deleted after the next save."""
        jitted = jax.jit(measured, out_shardings=replicated(mesh))
        self._fingerprints = Program("fingerprints", jitted, store, note)
        self._first: jax.Array | None = None
        """What was measured of the state that the run began with; not waited for."""
        self._first_names: list[str] = []
        self._may_be_infinite: Mapping[str, int] | None = None
        """How many words of a leaf were not finite as the run began. None: not known."""
        self._arrays = ArrayFiles()
        self._retention = retention
        self._committed = ordered
        """What must be in the folder, beside what its records say: what the driver knew, and what this process has committed."""
        self._claimed = False
        """Whether this process has created or checked the folder and its record. If they are gone later, the storage is gone:
        creating the folder anew would save to the wrong disk."""
        self._storage_patience_s = storage_patience_s
        self._storage = StorageCheck()
        self._last_exchange: Exchange | None = None
        self._cleared = False
        """Whether what a process that died has left was deleted."""
        self._models = ModelSaver(
            layout.models_of(self.folder),
            term,
            note,
            fenced=self._fenced_model,
            may_commit=self._forbidden_model,
            on_saved=lambda step: self._tidy_later(self._tidy_models),
        )
        self._thread: threading.Thread | None = None
        self._submitting = threading.Lock()
        self._tidying = ThreadPoolExecutor(1, "old checkpoints")
        self._tidied: Future[None] | None = None
        self._seen = layout.Seen()
        """Of the thread that tidies alone."""
        self._deferred = False
        """Whether an old checkpoint was not deleted, because this process was reading it."""

    def save(self, step: int, state: TrainState, meta: dict[str, Any], *, patient: bool = False) -> None:
        """Starts a save; returns when the arrays were copied, so that `state` may be donated at once.

        Waits for the save before it, if that is still in progress. The hosts first agree on whether anything prevents the save
        on any of them (no room, storage gone, the fence). If so, it has failed on all of them when this returns. The same holds
        if the storage does not answer in time; with `patient` there is no such limit.

        Raises NonFiniteStateError, on all hosts, if values of the state have become infinite or NaN.
        """
        # First: only when the save before this one has ended is `last_saved_step` known.
        self.wait_for_save()
        if step == self.last_saved_step:
            return
        # Before Orbax copies anything: what is read back later is compared with the state itself.
        described = self._described(step, state)
        if leaves := self._broken(described["not_finite"]):
            error = NonFiniteStateError(step, leaves)
            self.on_failed(step, str(error))
            raise error
        patience_s = None if patient else self._storage_patience_s
        if problem := self._claim(patience_s):
            self._failed(step, problem)
            return
        meta = {**meta, **described}
        final, size = self.folder / str(step), num_bytes_of(state)
        try:
            work = begin(final, lambda: self._storage.ask(lambda: self._obstacle(step, size), patience_s), self._own_term)
        except CommitError as error:
            self._failed(step, str(error))
            return
        # Handed over, not shared: the thread must not keep arrays alive that the next step could reuse.
        copied, hand_over = threading.Event(), [state]

        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)

        def write(folder: Path) -> None:
            try:
                self._arrays.write(folder, hand_over.pop, copied.set)
            except (ValueError, TypeError, NotImplementedError) as error:
                # Of the storage, or of the state? If it is the state's, no storage that comes back will help.
                if why := trial.problem(like):
                    raise UnsavableError(f"the state cannot be saved: {why}") from error
                raise
            finally:
                copied.set()  # training does not wait for what the other hosts make of a failure

        exchange, replace = self._exchange(work.name), step in self._superseded
        save = Commit(work, final, meta, exchange, write, self._arrays.merge, partial(self._forbidden, final), replace)
        self._thread = threading.Thread(target=self._run, args=(step, save, copied), name="checkpoint", daemon=True)
        self._thread.start()
        copied.wait()

    def save_model(self, step: int, state: TrainState, meta: dict[str, Any], *, patient: bool = False) -> None:
        """Starts a save of the model alone, to the folder `models`; returns when it was copied. A checkpoint may be saved
        at the same time. A failure is noted."""
        patience_s = None if patient else self._storage_patience_s
        if problem := self._claim(patience_s):
            self.note(f"the model of step {step} was not saved: {problem}")
            return
        # It belongs to the course that is trained now, whatever had its name.
        self._abandoned_models -= {step}
        described = self._described(step, state)
        if leaves := self._broken(described["not_finite"]):
            self.note(str(NonFiniteStateError(step, leaves)))
            return
        meta = {**meta, **described}
        parts = {part: getattr(state, part) for part in model_only.parts_in(meta["shapes"])}
        self._models.save(step, parts, meta, patience_s)

    def wait_for_save(self) -> None:
        """Returns when no save is in progress."""
        if self._thread is not None:
            # Without a limit: a save that hangs is noticed by the agent's watchdog (`save_s`).
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Returns when no save is in progress and old checkpoints have been deleted."""
        self.wait_for_save()
        self._models.wait()
        self._wait_until_tidy()

    def close(self) -> None:
        """Waits, and deletes the old checkpoints that were being read before."""
        self.wait()
        if self._deferred and self.last_saved_step is not None:
            self._tidy(self.last_saved_step, frozenset(self._superseded), frozenset())

    def restore(self, abstract: TrainState, accept: Accept | None = None, before: int | None = None) -> Restored | None:
        """Restores the newest checkpoint that is whole and acceptable, of a step up to `before`; the same on all hosts.

        Returns None if there are no checkpoints, or none was acceptable. `abstract` gives shapes and shardings, on any mesh. A
        checkpoint that was not completely committed is a last resort.

        Raises CheckpointError if the checkpoints are of another model. Raises CheckpointUnavailableError if there are
        acceptable checkpoints and none of them is whole, or if some that were committed cannot be seen: training never starts
        again from step 0 silently.
        """
        self.wait()  # a save in progress may be about to commit a newer checkpoint
        complete, unfinished = self._listed()
        # All of them, also those after `before`: going back supersedes them.
        everything = {*complete, *unfinished}
        complete, unfinished = ([s for s in steps if before is None or s <= before] for steps in (complete, unfinished))
        skipped: list[RefusedCheckpoint] = []
        for step in (*complete, *unfinished):
            try:
                restored = self._restore_step(step, abstract, accept, last_resort=step in unfinished)
            except manifest.DamagedError as error:
                skipped.append({"step": step, "why": str(error)})
                continue
            if restored is None:
                continue  # refused, which is no fault of the storage: it does not count as skipped
            state, meta = restored
            newer: list[RefusedCheckpoint] = [{"step": s, "why": manifest.NOT_COMMITTED} for s in unfinished if s > step]
            self._continue_from(step, everything)
            # A later save must not look older than the checkpoint that it continues.
            self._term = max(self._own_term, WriterTerm(*meta.get("term", NO_DRIVER)))
            return Restored(state, meta, [*skipped, *newer])
        if skipped:
            shown = "; ".join(f"step {bad['step']}: {bad['why']}" for bad in skipped)
            raise CheckpointUnavailableError(
                f"no checkpoint in {self.folder} can be restored ({shown}); bring the storage back, or to start again "
                "from step 0, give the run another name"
            )
        self._continue_from(None, everything)
        return None

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, oldest first."""
        return layout.steps(self.folder)

    def path(self, step: int) -> str:
        return str(self.folder / str(step))

    def fingerprint(self, state: TrainState) -> np.ndarray:
        """Returns uint32[num_leaves, 2], the same on all hosts. All hosts must call this."""
        return self._measured(state)[:, :2]

    @property
    def infinite_parameters(self) -> bool | None:
        """Whether parameters were not finite as the run began; None: not known. Waits for the device."""
        allowed = self._allowed()
        return None if allowed is None else any(name.startswith(f".{model_only.PART}") for name in allowed)

    def broken(self, state: TrainState) -> list[str]:
        """Returns the names of the leaves that have more values that are not finite than as the run began. All hosts must call
        this."""
        return self._broken(_not_finite(leaf_names(state), self._measured(state)))

    def load_ahead(self, state: TrainState) -> None:
        """Begins to load the programs that restoring and saving need. `state` may be shapes with shardings."""
        self._fingerprints.load_ahead(state)

    def prepare(self, state: TrainState) -> None:
        """Compiles what saving needs, if restoring has not done so. `state` may be shapes with shardings."""
        if self._fingerprints.compiled is None:
            self._fingerprints.prepare(state)
        # Not waited for: the device may still compute the first state, while the host compiles the step.
        if self._may_be_infinite is None and all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state)):
            self._first, self._first_names = self._fingerprints(state), leaf_names(state)

    def try_save(self, state: TrainState, meta: Mapping[str, Any]) -> str:
        """Returns why no save of such a state and such a meta can succeed; empty if nothing is known against it. Needs no
        other host. `state` may be shapes with shardings."""
        try:
            trial.seal_meta(meta)
        except UnsavableError as error:
            return str(error)
        return trial.problem(state)

    def _measured(self, state: TrainState) -> np.ndarray:
        """Returns uint32[num_leaves, 3]: `array_fingerprints.measured`."""
        return wait_for_device(self._fingerprints(state))

    def _described(self, step: int, state: TrainState) -> dict[str, Any]:
        """Returns what a checkpoint's meta says of the state in it."""
        names, rows = leaf_names(state), self._measured(state)
        return {
            "format": manifest.FORMAT,
            "step": step,
            "term": self._term,
            "shapes": shapes(state),
            "fingerprints": dict(zip(names, rows[:, :2].tolist(), strict=True)),
            "not_finite": _not_finite(names, rows),
        }

    def _broken(self, not_finite: Mapping[str, int]) -> list[str]:
        allowed = self._allowed() or {}
        return [name for name, number in not_finite.items() if number > allowed.get(name, 0)]

    def _allowed(self) -> Mapping[str, int] | None:
        if self._may_be_infinite is None and self._first is not None:
            self._may_be_infinite, self._first = _not_finite(self._first_names, wait_for_device(self._first)), None
        return self._may_be_infinite

    def _obstacle(self, step: int, num_bytes: int) -> str:
        """Returns what prevents this host from saving; empty if nothing does. Raises OSError."""
        if jax.process_index() == 0:
            if problem := self._fenced():
                return problem
            self._clear_leftovers()
            if (self.folder / str(step)).exists() and not self._may_replace(step):
                return f"{self.path(step)} is there already, from another training: move it away, or give the run another name"
        # The record was there when the folder was claimed. Without it, what is at this path now is another disk.
        if not committed.is_there(self.folder):
            gone = self.folder / committed.FILE if self.folder.is_dir() else self.folder
            return f"{gone} is gone: bring the storage back (is it mounted on this host?), and the next save goes there"
        return layout.obstacle(self.folder, num_bytes)

    def _may_replace(self, step: int) -> bool:
        """Whether a save may replace the checkpoint of `step`: training has gone back behind it, or an earlier generation that
        was thought dead has saved it since."""
        if step not in self._superseded and NO_DRIVER < (_term_of(self.folder / str(step)) or NO_DRIVER) < self._own_term:
            self._superseded.add(step)
        return step in self._superseded

    def _claim(self, patience_s: float | None) -> str:
        """Before this manager's first save: makes sure that the folder exists, and is this run's. Returns what prevents it, the
        same on all hosts."""
        if not self._claimed:
            local_problem = self._storage.ask(self._claim_folder, patience_s) if jax.process_index() == 0 else None
            problem = multihost.from_host0("checkpoint folder", local_problem)
            if problem:
                return of_host0(problem)
            self._claimed = True
        return ""

    def _claim_folder(self) -> str:
        """Creates the folder, on host 0, and only if nothing was ever committed. If something was, and the folder is not there,
        the storage is missing."""
        if problem := self._fenced():
            return problem
        try:
            recorded = committed.check(self.folder, self.steps(), self._committed)
            # `and_` keeps a name that is recorded already: the random one is only for a run without a name.
            self._committed = recorded.and_(Committed(run=uuid.uuid4().hex[:12]))
            self.folder.mkdir(parents=True, exist_ok=True)
            committed.ensure(self.folder, self._committed)
            fence.claim(self.folder, self._own_term)
            # After this generation's claim exists: there is never a moment without one.
            fence.drop_older_claims(self.folder, self._own_term)
        except CheckpointUnavailableError as error:
            return str(error)
        except OSError as error:
            return layout.unwritable(self.folder, error)
        return ""

    def _clear_leftovers(self) -> None:
        """Before this manager's first save: deletes what a process that died has left. No other gang works here: the fence
        would exist."""
        if not self._cleared:
            # Once: later ones may be in progress, for models are saved beside the checkpoints.
            self._cleared = True
            for folder in (self.folder, layout.models_of(self.folder)):
                for path in layout.on_the_way(folder):
                    with suppress(OSError):
                        ours.delete(path, ours.ON_THE_WAY)
            for probe in self.folder.glob(f"{layout.PROBE}*"):
                with suppress(OSError):
                    ours.delete(probe, ours.PROBE)  # another host that writes one just now needs no name for it

    def _fenced(self) -> str:
        """Returns why nothing may be committed; empty if it may. For host 0, which commits."""
        return fence.fenced(self.fence, self.folder, self._own_term)

    def _forbidden(self, final: Path | None = None) -> str:
        """Like `_fenced`, with several tries, and checks that no later generation has saved `final`. For host 0, in a thread
        that may wait."""
        if problem := fence.with_patience(self._fenced):
            return problem
        saved_by = _term_of(final) if final is not None else None
        return f"{final} was saved by a later generation ({saved_by})" if saved_by is not None and saved_by > self._term else ""

    def _exchange(self, name: str) -> Exchange:
        if self._last_exchange is not None:
            self._last_exchange.forget()  # all hosts have come to the next save: none waits for the last one
        self._last_exchange = Exchange(name)
        return self._last_exchange

    def _run(self, step: int, save: Commit, copied: threading.Event) -> None:
        try:
            save.run()
        except CommitError as error:
            self.unsavable = str(error) if error.is_final else ""
            self._failed(step, str(error))
            return
        except Exception as error:  # a thread's boundary: recorded and reported, training goes on
            self._failed(step, one_line(error))
            return
        finally:
            copied.set()  # whatever happened: training never waits for a thread that has ended
        # Only after a commit: a save that failed may be tried again at the same step.
        self.last_saved_step = step
        self.failing = False
        # The checkpoint that no longer counted has been replaced by this one.
        self._superseded.discard(step)
        self._committed = self._committed.and_(Committed(step=step))
        if jax.process_index() == 0:
            self._record()
        self.on_saved(step, self.path(step))
        if jax.process_index() == 0:
            # In a thread of its own: to copy a model takes longer than the next save may have to wait.
            abandoned, self._abandoned_models = self._abandoned_models, frozenset()
            # A copy: the set may change while old checkpoints are deleted.
            self._tidy_later(self._tidy, step, frozenset(self._superseded), abandoned)

    def _tidy_later(self, work: Callable[..., None], *arguments: Any) -> None:
        # Checkpoints and models are saved by two threads. The newest future ends last: there is one thread that tidies.
        with self._submitting:
            self._tidied = self._tidying.submit(work, *arguments)

    def _wait_until_tidy(self) -> None:
        with self._submitting:
            tidied = self._tidied
        if tidied is not None:
            tidied.result()

    def _fenced_model(self) -> str:
        """Returns why no model may be written now; empty if one may. For host 0, in a thread."""
        problem = self._fenced()
        if not problem:
            self._clear_leftovers()
        return problem

    def _forbidden_model(self) -> str:
        """Returns why no model may be committed now; empty if one may. For host 0, in a thread that may wait."""
        # Models of an abandoned course may be being deleted: this one may have the name of one of them.
        self._wait_until_tidy()
        return self._forbidden()

    def _tidy_models(self) -> None:
        """Deletes old models, on host 0."""
        if self._forbidden():
            return
        try:
            for problem in layout.delete_old_models(self.folder, frozenset(self._superseded), self._retention, self._seen):
                self.note(problem)
        except Exception as error:  # a thread's boundary: what is old may stay, training goes on
            self.note(f"old models of {self.folder.parent} could not be seen to: {one_line(error)}")

    def _record(self) -> None:
        """Writes the record of what was committed, on host 0."""
        for folder in (self.folder, self.folder.parent):
            try:
                committed.write(folder, self._committed)
            except OSError as error:  # the checkpoint itself is committed
                self.note(f"{folder / committed.FILE} could not be written: {error.strerror or error}; the next save tries again")

    def _tidy(self, newest: int, superseded: frozenset[int], abandoned_models: frozenset[int]) -> None:
        """Deletes old checkpoints, on host 0."""
        if self._forbidden():
            return  # another driver has the run: what is old is its business now
        keep = partial(model_only.keep, self._arrays, forbidden=self._forbidden)
        self._deferred = False
        try:
            for problem in layout.delete_old(
                self.folder, newest, superseded, self._retention, keep, abandoned_models, self._is_read, self._seen
            ):
                self.note(problem)
        except Exception as error:  # a thread's boundary: what is old may stay, training goes on
            self.note(f"old checkpoints in {self.folder} could not be seen to: {one_line(error)}")

    def _is_read(self, checkpoint: Path) -> bool:
        if readers.is_read(checkpoint):
            self._deferred = True
            return True
        return False

    def _failed(self, step: int, error: str) -> None:
        self.failing, self.problem = True, error
        self.on_failed(step, error)

    def _listed(self) -> tuple[list[int], list[int]]:
        """Returns (steps with a manifest, steps without), newest first, as host 0 sees them. Raises CheckpointUnavailableError
        if those cannot be all."""
        # Host 0 alone lists the folder: two hosts might see two states of it, and restore different steps.
        listing = multihost.from_host0("checkpoints to restore", self._listing() if jax.process_index() == 0 else None)
        if problem := listing.get("problem"):
            raise CheckpointUnavailableError(of_host0(problem))
        return listing["complete"], listing["unfinished"]

    def _listing(self) -> dict[str, Any]:
        """Lists the checkpoints, on host 0."""
        try:
            steps = sorted(self.steps(), reverse=True)
            committed.check(self.folder, steps, self._committed)
            complete = [step for step in steps if (self.folder / str(step) / manifest.MANIFEST_FILE).exists()]
            complete = self._newest_first(complete)
            # Before the restore: from here on an older generation that still lives cannot commit any more.
            if steps:
                with suppress(OSError):  # read-only storage: the first save claims the folder, or reports why not
                    fence.claim(self.folder, self._own_term)
        except CheckpointUnavailableError as error:
            return {"problem": str(error)}
        except OSError as error:
            return {"problem": f"{self.folder} cannot be read: {error.strerror or error}"}
        return {"complete": complete, "unfinished": [step for step in steps if step not in complete]}

    def _newest_first(self, steps: list[int]) -> list[int]:
        """Sorts the steps so that those of later generations come first. A checkpoint that an earlier generation (thought dead)
        has saved after a later one began belongs to no course that was continued. `steps` are in falling order."""
        earlier_terms = (term for term in fence.claims(self.folder) if term < self._own_term)
        latest = max(earlier_terms, default=NO_DRIVER)
        newest = _term_of(self.folder / str(steps[0])) if steps else latest
        if newest is not None and newest >= latest:
            return steps
        # One whose documents cannot be read is sorted by its step: it is tried, and reported as damaged.
        terms = {step: _term_of(self.folder / str(step)) or latest for step in steps}
        return sorted(steps, key=lambda step: (terms[step], step), reverse=True)

    def _continue_from(self, step: int | None, everything: Iterable[int]) -> None:
        self.last_saved_step = step
        self._superseded = {other for other in everything if step is None or other > step}
        if jax.process_index() > 0:
            return  # host 0 deletes what is old
        models = layout.steps(layout.models_of(self.folder))
        self._abandoned_models = frozenset(other for other in models if step is None or other > step)

    def _restore_step(
        self, step: int, abstract: TrainState, accept: Accept | None, *, last_resort: bool
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """Returns (state, meta) of checkpoint `step`, or None if a host refuses it. Raises DamagedError, on all hosts, if it is
        not whole on one of them."""
        meta = self._checked_meta(step, accept, last_resort)
        if meta is None:
            return None
        check_same_model(meta, abstract, self.path(step))
        state = self._read_arrays(self.folder / str(step) / manifest.STATE_FOLDER, abstract)
        # A collective. It is safe here: all hosts have just agreed that they could read their arrays.
        names, rows = leaf_names(state), self._measured(state)
        # No exchange: the fingerprints are the same on all hosts, so all raise or none.
        pairs = zip(names, rows[:, :2].tolist(), strict=True)
        if wrong := [name for name, value in pairs if meta["fingerprints"].get(name) != value]:
            raise manifest.DamagedError(
                f"the contents of {', '.join(wrong[:3])} are not those that were saved (fingerprints differ)"
            )
        not_finite, allowed = _not_finite(names, rows), meta.get("not_finite", {})
        if bad := [name for name, number in not_finite.items() if number > allowed.get(name, 0)]:
            raise manifest.DamagedError(f"values of {', '.join(bad[:3])} are infinite or NaN: it cannot be trained on")
        self._may_be_infinite = not_finite
        if last_resort:
            self.note(f"checkpoint {step} was not completely committed; no other can be used, and its fingerprints are right")
        return state, meta

    def _checked_meta(self, step: int, accept: Accept | None, last_resort: bool) -> dict[str, Any] | None:
        """Returns the meta of checkpoint `step`; None if a host refuses it, which is noted. Raises DamagedError if its files are
        damaged, CheckpointUnavailableError if a host does not see it, and CheckpointError if a newer program has saved it; all
        hosts raise the same."""
        path, meta = self.folder / str(step), {}
        problem = refusal = absent = newer = ""
        try:
            meta = check_files(path, step, last_resort=last_resort)
            refusal = accept(meta) if accept is not None else ""
        except manifest.NewerError as error:
            newer = str(error)
        except manifest.DamagedError as error:
            problem = str(error)
            if not path.is_dir():
                absent = f"{path} is not to be seen here, and host 0 sees it: is the storage mounted?"
        # One exchange for all: a host that raised before it would leave the others waiting.
        mine = {"problem": problem, "refusal": refusal, "absent": absent, "newer": newer}
        answers = multihost.all_hosts("checkpoint files", mine)
        if newer := first_problem([answer["newer"] for answer in answers]):
            raise CheckpointError(newer)
        if absent := first_problem([answer["absent"] for answer in answers]):
            raise CheckpointUnavailableError(absent)
        if problem := first_problem([answer["problem"] for answer in answers]):
            raise manifest.DamagedError(problem)
        if refusal := first_problem([answer["refusal"] for answer in answers]):
            self.note(f"checkpoint {step} is not used: {refusal}")
            return None
        return meta

    def _read_arrays(self, folder: Path, abstract: TrainState) -> TrainState:
        """Raises DamagedError, on all hosts, if one of them cannot read the arrays."""
        state: Any = None
        problem = ""
        try:
            state = self._arrays.read(folder, abstract)
        except Exception as error:  # Orbax raises whatever its layers raise: anything means that the checkpoint cannot be read
            problem = one_line(error)
        if problem := first_problem(multihost.all_hosts("checkpoint arrays", problem)):
            raise manifest.DamagedError(problem)
        return state


def _not_finite(names: Sequence[str], rows: np.ndarray) -> dict[str, int]:
    """Returns how many words of each leaf are of values that are not finite, without leaves that have none and those that need
    not be finite. `rows` are those of `array_fingerprints.measured`."""
    counts = zip(names, rows[:, 2].tolist(), strict=True)
    return {name: count for name, count in counts if count and must_be_finite(name)}


def _term_of(checkpoint: Path) -> WriterTerm | None:
    """Returns the term of the generation that saved it; None if there is no checkpoint, or its documents cannot be read."""
    try:
        return WriterTerm(*manifest.read_meta(checkpoint).get("term", NO_DRIVER))
    except manifest.DamagedError:
        return None
