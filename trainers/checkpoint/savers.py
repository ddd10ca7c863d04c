"""Saves trees of arrays in the background, the whole state or the model alone: copied from the devices first, then written and
committed by all hosts or none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from gangway.storage.row import WriterTerm
from gangway.storage.store import Place
from trainers.checkpoint import layout, trial
from trainers.checkpoint.array_io import ArrayFiles
from trainers.checkpoint.commit import Commit, CommitError, Exchange, begin
from trainers.checkpoint.course import Course
from trainers.checkpoint.model_only import meta_of
from trainers.checkpoint.ownership import Ownership, StorageCheck
from trainers.checkpoint.tidier import Tidier
from trainers.checkpoint.trial import UnsavableError
from trainers.checkpoint.validate import num_bytes_of
from trainers.runtime.multihost import one_line
from trainers.step.state import TrainState


class BackgroundSave:
    """One save at a time, in a thread of its own. All hosts must call its methods alike.

    `on_committed(step)` and `on_failed(step, error)` are called on every host when a save has ended, usually from that thread.
    """

    def __init__(
        self,
        name: str,
        term: WriterTerm,
        *,
        folder: Place,
        record: Callable[[int, str, str], None],
        discard: Callable[[Place], None],
        on_committed: Callable[[int, Place], None],
        on_failed: Callable[[int, CommitError], None],
    ):
        """`record(step, name, digest)` is `Ownership.commit` for `folder`, and `discard` is `Ownership.discard`; host 0 calls
        them in the thread that saves."""
        self.arrays = ArrayFiles()
        self._name, self._term, self._folder = name, term, folder
        self._record, self._discard = record, discard
        self._on_committed, self._on_failed = on_committed, on_failed
        self._storage = StorageCheck()
        self._thread: threading.Thread | None = None
        self._last_exchange: Exchange | None = None

    def start(
        self,
        step: int,
        tree: Any,
        meta: Callable[[], dict[str, Any]],
        patience_s: float | None,
        *,
        obstacle: Callable[[], str],
    ) -> None:
        """Starts a save of `tree`; returns when the arrays were copied, so that they may be donated. `meta` is that of
        `trainers.checkpoint.commit.Commit`.

        Waits for the save before it. The hosts first agree on whether there is an `obstacle` on any of them: if so, it has failed
        on all when this returns. The same holds if the storage does not answer within `patience_s` (None: no limit).
        """
        self.wait()
        try:
            name = partial(layout.name_for, step, self._term)
            work = begin(self._folder, name, lambda: self._storage.ask(obstacle, patience_s))
        except CommitError as error:
            self._on_failed(step, error)
            return
        # Handed over, not shared: the thread must not keep arrays alive that the next step could reuse.
        copied, hand_over = threading.Event(), [tree]
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)

        def write(folder: Place) -> None:
            try:
                self.arrays.write(folder, hand_over.pop, copied.set)
            except (ValueError, TypeError, NotImplementedError) as error:
                # Of the storage, or of the arrays? If it is theirs, no storage that comes back will help.
                if why := trial.problem(like):
                    raise UnsavableError(f"the state cannot be saved: {why}") from error
                raise
            finally:
                copied.set()  # training does not wait for what the other hosts make of a failure

        if self._last_exchange is not None:
            self._last_exchange.forget()  # all hosts have come to this save: none waits for the last one
        self._last_exchange = Exchange(work.name)
        record = partial(self._record, step)
        save = Commit(work, meta, self._last_exchange, write, self.arrays.merge, record, self._discard)
        self._thread = threading.Thread(target=self._run, args=(step, save, copied), name=self._name, daemon=True)
        self._thread.start()
        copied.wait()

    def wait(self) -> None:
        """Returns when no save is in progress."""
        if self._thread is not None:
            # Without a limit: a save that hangs is noticed by the agent's watchdog (`save_s`).
            self._thread.join()
            self._thread = None

    def _run(self, step: int, save: Commit, copied: threading.Event) -> None:
        try:
            save.run()
        except CommitError as error:
            self._on_failed(step, error)
        except Exception as error:  # a thread's boundary: recorded and reported, training goes on
            self._on_failed(step, CommitError(one_line(error)))
        else:
            # Only after a commit: a save that failed may be tried again at the same step.
            self._on_committed(step, save.work)
        finally:
            copied.set()  # whatever happened: training never waits for a thread that has ended


class StateSaver:
    """All hosts must call its methods alike. `on_saved` and `on_failed` are those of `CheckpointManager`."""

    def __init__(
        self,
        owner: Ownership,
        course: Course,
        tidier: Tidier,
        *,
        on_saved: Callable[[int, str], None],
        on_failed: Callable[[int, str], None],
    ):
        self.failing = False
        """Whether the last save failed."""
        self.problem = ""
        """Why the last save that failed did."""
        self.unsavable = ""
        """Why no save can succeed, whatever becomes of the storage; empty as far as is known."""
        self._owner, self._course, self._tidier = owner, course, tidier
        self._on_saved, self._on_failed = on_saved, on_failed
        self._background = BackgroundSave(
            "checkpoint",
            owner.term,
            folder=owner.folder,
            record=partial(owner.commit, owner.folder),
            discard=owner.discard,
            on_committed=self._committed,
            on_failed=self._failed,
        )

    def save(self, step: int, state: TrainState, meta: Callable[[], dict[str, Any]], patience_s: float | None) -> None:
        """Starts a save of `state`, in the folder that is claimed; returns when its arrays may be donated. `meta` is that of
        `trainers.checkpoint.commit.Commit`."""
        num_bytes = num_bytes_of(state)
        self._background.start(step, state, meta, patience_s, obstacle=lambda: self._obstacle(step, num_bytes))

    def wait(self) -> None:
        """Returns when no save is in progress."""
        self._background.wait()

    def refused(self) -> None:
        """Waits for the end of a save whose state must not be saved. That is no failure of the storage, to be tried again."""
        self.wait()
        self.failing, self.problem = False, ""

    def failed(self, step: int, problem: str) -> None:
        """Reports a save that could not even begin."""
        self._failed(step, CommitError(problem))

    def _obstacle(self, step: int, num_bytes: int) -> str:
        """Returns what prevents this host from saving; empty if nothing does. Raises OSError."""
        if jax.process_index() == 0:
            if problem := self._owner.fenced():
                return problem
            self._owner.clear_leftovers()
            kept = layout.committed_in(self._owner.folder).get(step)
            if kept and not self._course.may_replace(step, layout.writer_of(kept.folder), self._owner.term):
                return (
                    f"{self._owner.folder / kept.folder} is there already, from another training: move it away, or give the run "
                    "another name"
                )
        return self._owner.lost() or layout.obstacle(self._owner.folder, num_bytes)

    def _committed(self, step: int, checkpoint: Place) -> None:
        self.failing = False
        self._course.committed(step)
        self._on_saved(step, str(checkpoint))
        if jax.process_index() == 0:
            self._tidier.after_save(step)

    def _failed(self, step: int, error: CommitError) -> None:
        self.failing, self.problem = True, str(error)
        self.unsavable = str(error) if error.is_final else self.unsavable
        self._on_failed(step, str(error))


class ModelSaver:
    """All hosts must call its methods alike. A save that fails on one host has failed on all; it is noted, and ends nothing."""

    def __init__(self, owner: Ownership, tidier: Tidier, note: Callable[[str], None]):
        self._folder, self._owner, self._tidier, self._note = layout.models_of(owner.folder), owner, tidier, note
        self._background = BackgroundSave(
            "model",
            owner.term,
            folder=self._folder,
            record=self._record,
            discard=owner.discard,
            on_committed=self._committed,
            on_failed=self._failed,
        )

    def save(self, step: int, parts: Mapping[str, Any], meta: Callable[[], dict[str, Any]], patience_s: float | None) -> None:
        """Starts a save; returns when the arrays were copied, so that they may be donated. `parts` are those of a state, by their
        names there (`trainers.checkpoint.model_only.PART`, `STATE`), and `meta` returns that of a whole checkpoint.
        Waits for the model before it, if that is still being saved."""
        num_bytes = num_bytes_of(parts)
        self._background.start(
            step,
            dict(parts),
            lambda: meta_of(meta()),
            patience_s,
            obstacle=lambda: self._obstacle(num_bytes),
        )

    def wait(self) -> None:
        """Returns when no save is in progress."""
        self._background.wait()

    def failed(self, step: int, problem: str) -> None:
        """Reports a save that could not even begin. All hosts must call this."""
        self._note(f"the model of step {step} was not saved: {problem}")

    def _obstacle(self, num_bytes: int) -> str:
        """Returns what prevents a save; empty if nothing does. Raises OSError."""
        if jax.process_index() > 0:
            return ""  # the folder may just be being made: what prevents this host shows when it writes
        if problem := self._owner.fenced():
            return problem
        self._owner.clear_leftovers()
        self._folder.make()
        return layout.obstacle(self._folder, num_bytes)

    def _record(self, step: int, name: str, digest: str) -> None:
        # Models of an abandoned course may be being removed: this one may be of a step of theirs.
        self._tidier.wait()
        self._owner.commit(self._folder, step, name, digest)

    def _committed(self, step: int, model: Place) -> None:
        if jax.process_index() == 0:
            self._tidier.after_model()

    def _failed(self, step: int, error: CommitError) -> None:
        if jax.process_index() == 0:
            self.failed(step, str(error))
