"""The course that training has taken: which checkpoints and models belong to it, and which were abandoned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gangway.storage.row import NO_DRIVER, WriterTerm


@dataclass
class Course:
    """The present course. The thread that trains changes it, and the thread that saves, one after the other."""

    last_saved_step: int | None = None
    """The step of the newest checkpoint that was committed or restored."""
    superseded: set[int] = field(default_factory=set)
    """The steps of checkpoints that no longer count: damaged ones, and those of a course that was rolled back."""
    abandoned_models: frozenset[int] = frozenset()
    """The same for models that were saved alone. They are deleted after the next save."""

    def continue_from(self, step: int | None, checkpoints: Iterable[int], models: Iterable[int]) -> None:
        """Training goes on from the checkpoint of `step` (None: from the beginning): whatever is newer is abandoned."""
        self.last_saved_step = step
        self.superseded = {other for other in checkpoints if step is None or other > step}
        self.abandoned_models = frozenset(other for other in models if step is None or other > step)

    def committed(self, step: int) -> None:
        """A checkpoint of this step was committed. If one of that name was abandoned, the new one has replaced it."""
        self.last_saved_step = step
        self.superseded.discard(step)

    def may_replace(self, step: int, saved_by: WriterTerm, writer: WriterTerm) -> bool:
        """Whether `writer` may replace the checkpoint of `step`: training has gone back behind it, or an earlier generation that
        was thought dead has saved it since."""
        if step not in self.superseded and NO_DRIVER < saved_by < writer:
            self.superseded.add(step)
        return step in self.superseded

    def take_abandoned_models(self) -> frozenset[int]:
        """Returns them, for the one who deletes them now."""
        taken, self.abandoned_models = self.abandoned_models, frozenset()
        return taken
