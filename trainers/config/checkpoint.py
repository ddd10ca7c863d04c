"""The sections `checkpoint` and `snapshot`: when a state is saved, and when copied in memory. Free of JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gangway.config.conversion import CheckedSection
from gangway.config.section import not_positive, too_small


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(CheckedSection):
    """When a state is saved, and which checkpoints are kept: all that any of the settings asks for, and always the newest."""

    start_from: str | None = None
    """The whole state that a run without a checkpoint of its own begins with, the position in the data included: the folder of
    another run (its newest whole checkpoint), RUN/STEP, RUN/best, or a checkpoint. For the parameters alone: `init_from`."""
    save_steps: int | None = None
    """A save is due at each step that is a multiple of this. null: not by steps."""
    save_epochs: int | None = None
    """A save is due at the end of every so many epochs. null: not by epochs."""
    save_after_step: int = 0
    """The first step at which `save_steps` and `save_epochs` may save."""
    save_after_epochs: int = 0
    """How many epochs must be complete before they may save."""
    save_minutes: float | None = None
    """A save is due this many minutes after the last one. null: not by time."""
    save_at_end: bool = True
    """Whether the state is saved at the end of the run."""
    storage_patience_s: float = 5.0
    """How long training waits before a save for a storage that does not answer. It then continues, and tries again later."""
    save_total_limit: int | None = 3
    """How many of the newest checkpoints are kept. null: all checkpoints are kept."""
    keep_best: int | None = None
    """How many of the checkpoints with the best scores (`evaluation.score`) are kept."""
    keep_every_steps: int | None = None
    """Checkpoints of a step that is a multiple of this are kept."""
    keep_model_only: Literal["none", "best", "every", "all"] = "none"
    """Which older checkpoints keep the parameters alone, in the run's folder `models`: those that `keep_best` keeps, those that
    `keep_every_steps` keeps, or both. A checkpoint that is also kept for another reason stays whole."""
    model_every_steps: int | None = None
    """Save the parameters alone, too, in the folder `models`, at each step that is a multiple of this."""
    model_limit: int | None = None
    """How many of the newest of these are kept. null: all. No other setting deletes them."""

    @property
    def saves(self) -> bool:
        """Whether a run saves that nobody stops."""
        return self.save_at_end or any((self.save_steps, self.save_epochs, self.save_minutes))

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "save_steps", "save_epochs", "save_total_limit", "keep_best", "keep_every_steps")
        if self.start_from is not None and (not self.start_from or "://" in self.start_from):
            yield f"start_from = {self.start_from!r}: expected a local or mounted folder"
        yield from too_small(self, 1, "model_every_steps", "model_limit")
        if self.model_limit is not None and self.model_every_steps is None:
            yield f"model_limit = {self.model_limit}: nothing saves models at a cadence of its own; set model_every_steps"
        yield from too_small(self, 0, "save_after_step", "save_after_epochs")
        if not self.storage_patience_s > 0:
            yield f"storage_patience_s = {self.storage_patience_s}: expected a positive number of seconds"
        yield from not_positive(self, "save_minutes")
        needs = {"best": ("keep_best",), "every": ("keep_every_steps",), "all": ("keep_best", "keep_every_steps")}
        for name in needs.get(self.keep_model_only, ()):
            if getattr(self, name) is None:
                yield f"keep_model_only = {self.keep_model_only!r}: nothing is kept by {name}; set it, or keep_model_only=none"


KNOWN_AFTER_STEPS = 7
"""After so many steps all hosts know that a snapshot is whole on all of them: it is described when its step is complete, and then
travels with the flags of a step."""


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig(CheckedSection):
    """Copies of the state in the memory of each host, outside the process that trains: a process that dies costs at most the
    steps since the last one. They are lost with their machine."""

    every_steps: int | None = None
    """A snapshot is due at each step that is a multiple of this. null: there are none. They need the memory of two copies of a
    host's part of the state (four for a while after a restart), and for a step that of one more state on the devices."""

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "every_steps")

    @property
    def num_slots(self) -> int:
        """For how many snapshots an agent gives a process memory: as many as may be under way, and one. 0: there are none."""
        return 0 if self.every_steps is None else 1 + -(-KNOWN_AFTER_STEPS // self.every_steps)
