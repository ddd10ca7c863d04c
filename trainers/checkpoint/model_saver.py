"""Saves the model alone, beside the checkpoints of a run, in a thread of its own: a checkpoint may be saved meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax

from trainers.checkpoint import layout
from trainers.checkpoint.array_io import ArrayFiles
from trainers.checkpoint.commit import Commit, CommitError, Exchange, begin
from trainers.checkpoint.fence import WriterTerm
from trainers.checkpoint.model_only import meta_of
from trainers.checkpoint.storage_check import StorageCheck
from trainers.checkpoint.validate import num_bytes_of
from trainers.runtime.multihost import one_line


class ModelSaver:
    """All hosts must call its methods alike. A save that fails on one host has failed on all; it is noted, and ends nothing."""

    def __init__(
        self,
        folder: Path,
        term: WriterTerm,
        note: Callable[[str], None],
        *,
        fenced: Callable[[], str],
        may_commit: Callable[[], str],
        on_saved: Callable[[int], None],
    ):
        """`fenced` and `may_commit` return why nothing may be written, or committed, now. `on_saved` is called on host 0. All are
        called in threads that may wait."""
        self._folder, self._term, self._note = folder, term, note
        self._fenced, self._may_commit, self._on_saved = fenced, may_commit, on_saved
        self._arrays, self._storage = ArrayFiles(), StorageCheck()
        self._thread: threading.Thread | None = None
        self._last_exchange: Exchange | None = None

    def save(self, step: int, parts: Mapping[str, Any], meta: dict[str, Any], patience_s: float | None) -> None:
        """Starts a save; returns when the arrays were copied, so that they may be donated. `parts` are those of a state, by their
        names there (`trainers.checkpoint.model_only.PART`, `STATE`), and `meta` is that of a whole checkpoint.
        Waits for the model before it, if that is still being saved."""
        self.wait()
        final, obstacle = self._folder / str(step), partial(self._obstacle, num_bytes_of(parts))
        try:
            work = begin(final, lambda: self._storage.ask(obstacle, patience_s), self._term)
        except CommitError as error:
            self._failed(step, str(error))
            return
        # Handed over, not shared: the thread must not keep arrays alive that the next step could reuse.
        copied, hand_over = threading.Event(), [dict(parts)]

        def write(folder: Path) -> None:
            try:
                self._arrays.write(folder, hand_over.pop, copied.set)
            finally:
                copied.set()  # training does not wait for what the other hosts make of a failure

        if self._last_exchange is not None:
            self._last_exchange.forget()  # all hosts have come to this save: none waits for the last one
        self._last_exchange = Exchange(work.name)
        # What has that name is of an abandoned course, or the same: a restart saves the model of its first step again.
        save = Commit(work, final, meta_of(meta), self._last_exchange, write, self._arrays.merge, self._may_commit, replace=True)
        self._thread = threading.Thread(target=self._run, args=(step, save, copied), name="model", daemon=True)
        self._thread.start()
        copied.wait()

    def wait(self) -> None:
        """Returns when no save is in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _obstacle(self, num_bytes: int) -> str:
        """Returns what prevents a save; empty if nothing does. Raises OSError."""
        if jax.process_index() > 0:
            return ""  # the folder may just be being made: what prevents this host shows when it writes
        if problem := self._fenced():
            return problem
        self._folder.mkdir(exist_ok=True)
        return layout.obstacle(self._folder, num_bytes)

    def _run(self, step: int, save: Commit, copied: threading.Event) -> None:
        try:
            save.run()
        except CommitError as error:
            self._failed(step, str(error))
        except Exception as error:  # a thread's boundary: noted, training goes on
            self._failed(step, one_line(error))
        else:
            if jax.process_index() == 0:
                self._on_saved(step)
        finally:
            copied.set()  # whatever happened: training never waits for a thread that has ended

    def _failed(self, step: int, error: str) -> None:
        if jax.process_index() == 0:
            self._note(f"the model of step {step} was not saved: {error}")
