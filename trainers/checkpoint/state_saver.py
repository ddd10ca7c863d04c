"""Saves the whole state of a run as a checkpoint, in the background."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from trainers.checkpoint import layout
from trainers.checkpoint.background_save import BackgroundSave
from trainers.checkpoint.commit import CommitError
from trainers.checkpoint.course import Course, term_of
from trainers.checkpoint.ownership import Ownership
from trainers.checkpoint.standing import Folder
from trainers.checkpoint.tidier import Tidier
from trainers.checkpoint.validate import num_bytes_of
from trainers.step.state import TrainState


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
