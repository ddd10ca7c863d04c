"""Saves the model alone, beside the checkpoints of a run, in a thread of its own: a checkpoint may be saved meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax

from trainers.checkpoint import layout
from trainers.checkpoint.background_save import BackgroundSave
from trainers.checkpoint.commit import CommitError
from trainers.checkpoint.model_only import meta_of
from trainers.checkpoint.ownership import Ownership
from trainers.checkpoint.standing import Folder
from trainers.checkpoint.tidier import Tidier
from trainers.checkpoint.validate import num_bytes_of


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
