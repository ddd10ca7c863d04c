"""Deletes the checkpoints and models that are no longer needed, on host 0, in a thread of its own."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gangway.storage.store import Place
from trainers.checkpoint import layout, model_only
from trainers.checkpoint.array_io import ArrayFiles
from trainers.checkpoint.course import Course
from trainers.checkpoint.ownership import Ownership
from trainers.checkpoint.retention import Retention
from trainers.runtime.multihost import one_line


class Tidier:
    """To copy a model takes longer than the next save may have to wait: so the thread that saves does not tidy."""

    def __init__(self, owner: Ownership, course: Course, retention: Retention, note: Callable[[str], None]):
        self._owner, self._course, self._retention, self._note = owner, course, retention, note
        self._arrays = ArrayFiles()
        self._submitting = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "old checkpoints")
        self._newest: Future[None] | None = None
        self._seen = layout.Seen()
        """Of the thread that tidies alone."""
        self._deferred = False
        """Whether an old checkpoint was not deleted, because this process was reading it."""

    def after_save(self, step: int) -> None:
        """Deletes what the checkpoint of `step`, which was just committed, makes superfluous."""
        # A copy: the set may change while old checkpoints are deleted.
        self._later(self._tidy, step, frozenset(self._course.superseded), self._course.take_abandoned_models())

    def after_model(self) -> None:
        """Deletes the models that a newer one makes superfluous."""
        self._later(self._tidy, None, frozenset(self._course.superseded), frozenset())

    def wait(self) -> None:
        """Returns when nothing is being deleted."""
        with self._submitting:
            newest = self._newest
        if newest is not None:
            newest.result()

    def finish(self) -> None:
        """Deletes what stayed because this process was reading it."""
        self.wait()
        if self._deferred and self._course.last_saved_step is not None:
            self._tidy(self._course.last_saved_step, frozenset(self._course.superseded), frozenset())

    def _later(self, work: Callable[..., None], *arguments: Any) -> None:
        # Checkpoints and models are saved by two threads. The newest future ends last: there is one thread that tidies.
        with self._submitting:
            self._newest = self._thread.submit(work, *arguments)

    def _tidy(self, newest: int | None, superseded: frozenset[int], abandoned_models: frozenset[int]) -> None:
        if self._owner.fenced():
            return  # another driver has the run: what is old is its business now
        folder = self._owner.folder
        self._deferred = self._deferred and newest is None
        try:
            problems = layout.delete_old(
                *(folder, newest, superseded, self._retention, self._keep_model, abandoned_models),
                *(self._is_read, self._seen),
                remove=self._owner.remove,
            )
            for problem in problems + self._owner.delete_discarded(self._is_read):
                self._note(problem)
        except Exception as error:  # a thread's boundary: what is old may stay, training goes on
            what = "models" if newest is None else "checkpoints"
            self._note(f"old {what} of {folder.parent} were not deleted: {one_line(error)}")

    def _keep_model(self, checkpoint: Place, step: int) -> None:
        """Keeps the model of a checkpoint that will be deleted."""
        models = layout.models_of(self._owner.folder)
        name = layout.name_for(step, self._owner.term, uuid.uuid4().hex[:8])
        model_only.keep(self._arrays, checkpoint, models, step, self._owner, name)

    def _is_read(self, checkpoint: Place) -> bool:
        if layout.readers(checkpoint):
            self._deferred = True
            return True
        return False
