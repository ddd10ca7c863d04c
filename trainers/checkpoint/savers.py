"""Saves trees of arrays in the background, the whole state or the model alone: copied from the devices first, then written and
committed by all hosts or none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax

from trainers.checkpoint import layout, trial
from trainers.checkpoint.array_io import ArrayFiles
from trainers.checkpoint.commit import Commit, CommitError, Exchange, begin
from trainers.checkpoint.course import Course, term_of
from trainers.checkpoint.fence import WriterTerm
from trainers.checkpoint.model_only import meta_of
from trainers.checkpoint.ownership import Ownership
from trainers.checkpoint.standing import Folder
from trainers.checkpoint.storage_check import StorageCheck
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
        forbidden: Callable[[Folder], str],
        record: Callable[[int, str, str], None],
        discard: Callable[[Folder], None],
        on_committed: Callable[[int], None],
        on_failed: Callable[[int, CommitError], None],
    ):
        """`forbidden(final)` returns why nothing may be committed there now, `record(step, folder, digest)` is `Ownership.commit`
        for one folder, and `discard` is `Ownership.discard`; host 0 calls them in the thread that saves."""
        self.arrays = ArrayFiles()
        self._name, self._term = name, term
        self._record, self._discard = record, discard
        self._forbidden, self._on_committed, self._on_failed = forbidden, on_committed, on_failed
        self._storage = StorageCheck()
        self._thread: threading.Thread | None = None
        self._last_exchange: Exchange | None = None

    def start(
        self,
        step: int,
        tree: Any,
        final: Folder,
        meta: Callable[[], dict[str, Any]],
        patience_s: float | None,
        *,
        obstacle: Callable[[], str],
        may_replace: Callable[[], bool],
    ) -> None:
        """Starts a save of `tree` as `final`; returns when the arrays were copied, so that they may be donated. `meta` is that of
        `trainers.checkpoint.commit.Commit`.

        Waits for the save before it. The hosts first agree on whether there is an `obstacle` on any of them: if so, it has failed
        on all when this returns. The same holds if the storage does not answer within `patience_s` (None: no limit).
        """
        self.wait()
        try:
            work = begin(final, lambda: self._storage.ask(obstacle, patience_s), self._term)
        except CommitError as error:
            self._on_failed(step, error)
            return
        # Handed over, not shared: the thread must not keep arrays alive that the next step could reuse.
        copied, hand_over = threading.Event(), [tree]
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)

        def write(folder: Folder) -> None:
            try:
                self.arrays.write(folder, hand_over.pop, copied.set)
            except (ValueError, TypeError, NotImplementedError) as error:
                # Of the storage, or of the arrays? If it is theirs, no storage that comes back will help.
                if why := trial.problem(like):
                    raise UnsavableError(f"the state cannot be saved: {why}") from error
                raise
            finally:
                copied.set()  # training does not wait for what the other hosts make of a failure

        forbidden, record = partial(self._forbidden, final), partial(self._record, step)
        exchange, merge = self._exchange(work.name), self.arrays.merge
        save = Commit(work, final, meta, exchange, write, merge, forbidden, may_replace(), record, self._discard)
        self._thread = threading.Thread(target=self._run, args=(step, save, copied), name=self._name, daemon=True)
        self._thread.start()
        copied.wait()

    def wait(self) -> None:
        """Returns when no save is in progress."""
        if self._thread is not None:
            # Without a limit: a save that hangs is noticed by the agent's watchdog (`save_s`).
            self._thread.join()
            self._thread = None

    def _exchange(self, name: str) -> Exchange:
        if self._last_exchange is not None:
            self._last_exchange.forget()  # all hosts have come to the next save: none waits for the last one
        self._last_exchange = Exchange(name)
        return self._last_exchange

    def _run(self, step: int, save: Commit, copied: threading.Event) -> None:
        try:
            save.run()
        except CommitError as error:
            self._on_failed(step, error)
        except Exception as error:  # a thread's boundary: recorded and reported, training goes on
            self._on_failed(step, CommitError(one_line(error)))
        else:
            # Only after a commit: a save that failed may be tried again at the same step.
            self._on_committed(step)
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
            forbidden=self._forbidden,
            record=partial(owner.commit, owner.folder),
            discard=owner.discard,
            on_committed=self._committed,
            on_failed=self._failed,
        )

    def save(self, step: int, state: TrainState, meta: Callable[[], dict[str, Any]], patience_s: float | None) -> None:
        """Starts a save of `state`, in the folder that is claimed; returns when its arrays may be donated. `meta` is that of
        `trainers.checkpoint.commit.Commit`."""
        final, num_bytes = self._owner.folder / str(step), num_bytes_of(state)
        self._background.start(
            step,
            state,
            final,
            meta,
            patience_s,
            obstacle=lambda: self._obstacle(step, num_bytes),
            may_replace=lambda: step in self._course.superseded,
        )

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
            final = self._owner.at(step)
            if self._owner.has(step) and not self._course.may_replace(step, final, self._owner.term):
                return f"{final} is there already, from another training: move it away, or give the run another name"
        return self._owner.lost() or layout.obstacle(self._owner.folder, num_bytes)

    def _forbidden(self, final: Folder) -> str:
        """Returns why `final` may not be committed now. For host 0, in a thread that may wait."""
        if problem := self._owner.forbidden():
            return problem
        saved_by = term_of(self._owner.at(int(final.name)))
        is_later = saved_by is not None and saved_by > self._course.term
        return f"{final} was saved by a later generation ({saved_by})" if is_later else ""

    def _committed(self, step: int) -> None:
        self.failing = False
        self._course.committed(step)
        self._owner.record(step)
        self._on_saved(step, str(self._owner.at(step)))
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
            forbidden=self._forbidden,
            record=partial(owner.commit, self._folder),
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
            self._folder / str(step),
            lambda: meta_of(meta()),
            patience_s,
            obstacle=lambda: self._obstacle(num_bytes),
            # What has that name is of an abandoned course, or the same: a restart saves the model of its first step again.
            may_replace=lambda: True,
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
        if isinstance(self._folder, Path):
            self._folder.mkdir(exist_ok=True)
        return layout.obstacle(self._folder, num_bytes)

    def _forbidden(self, final: Folder) -> str:
        """Returns why no model may be committed now. For host 0, in a thread that may wait."""
        # Models of an abandoned course may be being deleted: this one may have the name of one of them.
        self._tidier.wait()
        return self._owner.forbidden()

    def _committed(self, step: int) -> None:
        if jax.process_index() == 0:
            self._tidier.after_model()

    def _failed(self, step: int, error: CommitError) -> None:
        if jax.process_index() == 0:
            self.failed(step, str(error))
