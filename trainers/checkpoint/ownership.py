"""The folder of a run's checkpoints, as far as this generation of the gang may write there."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import jax

from trainers.checkpoint import committed, fence, layout
from trainers.checkpoint.committed import Committed
from trainers.checkpoint.fence import WriterTerm
from trainers.checkpoint.storage_check import StorageCheck
from trainers.errors import CheckpointUnavailableError
from trainers.runtime import multihost
from trainers.runtime.multihost import of_host0
from trainers.storage import ours


class Ownership:
    """Claims the folder for one generation, and tells whether it still has it.

    `ordered` is what the driver knows was committed; empty without a driver.
    """

    def __init__(self, folder: Path, term: WriterTerm, ordered: Committed, note: Callable[[str], None]):
        self.folder, self.term = folder, term
        self.fence: str | None = None
        """A path. Once it exists, another driver has the run, and nothing is committed any more."""
        self._note = note
        self._committed = ordered
        """What must be in the folder, beside what its records say: what the driver knew, and what this process has committed."""
        self._claimed = False
        """Whether this process has created or checked the folder and its record. If they are gone later, the storage is gone:
        creating the folder anew would save to the wrong disk."""
        self._cleared = False
        """Whether what a process that died has left was deleted."""
        self._storage = StorageCheck()

    def claim(self, patience_s: float | None) -> str:
        """Before the first save: makes sure that the folder exists, and is this run's. Returns what prevents it, the same on all
        hosts, which must all call this. `patience_s` limits the wait for the storage; None: no limit."""
        if not self._claimed:
            local_problem = self._storage.ask(self._claim_folder, patience_s) if jax.process_index() == 0 else None
            if problem := multihost.from_host0("checkpoint folder", local_problem):
                return of_host0(problem)
            self._claimed = True
        return ""

    def fenced(self) -> str:
        """Returns why nothing may be committed; empty if it may. For host 0, which commits."""
        return fence.fenced(self.fence, self.folder, self.term)

    def forbidden(self) -> str:
        """Like `fenced`, with several tries. For host 0, in a thread that may wait."""
        return fence.with_patience(self.fenced)

    def lost(self) -> str:
        """Returns that the storage is gone; empty if it is there. Raises OSError."""
        # The record was there when the folder was claimed. Without it, what is at this path now is another disk.
        if committed.is_there(self.folder):
            return ""
        gone = self.folder / committed.FILE if self.folder.is_dir() else self.folder
        return f"{gone} is gone: bring the storage back (is it mounted on this host?), and the next save goes there"

    def clear_leftovers(self) -> None:
        """Before the first save: deletes what a process that died has left. No other gang works here: the fence would exist. For
        host 0."""
        if self._cleared:
            return
        # Once: later ones may be in progress, for models are saved beside the checkpoints.
        self._cleared = True
        for folder in (self.folder, layout.models_of(self.folder)):
            for path in layout.on_the_way(folder):
                with suppress(OSError):
                    ours.delete(path, ours.ON_THE_WAY)
        for probe in self.folder.glob(f"{layout.PROBE}*"):
            with suppress(OSError):
                ours.delete(probe, ours.PROBE)  # another host that writes one just now needs no name for it

    def record(self, step: int) -> None:
        """Remembers that `step` was committed; host 0 writes it into the records."""
        self._committed = self._committed.and_(Committed(step=step))
        if jax.process_index() > 0:
            return
        for folder in (self.folder, self.folder.parent):
            try:
                committed.write(folder, self._committed)
            except OSError as error:  # the checkpoint itself is committed
                reason = error.strerror or error
                self._note(f"{folder / committed.FILE} could not be written: {reason}; the next save tries again")

    def check(self, steps: Iterable[int]) -> Committed:
        """Returns what is recorded of the run. Raises CheckpointUnavailableError if `steps` cannot be all that were committed."""
        return committed.check(self.folder, steps, self._committed)

    def claim_again(self) -> None:
        """Before a restore: from here on an older generation that still lives cannot commit any more. For host 0."""
        with suppress(OSError):  # read-only storage: the first save claims the folder, or reports why not
            fence.claim(self.folder, self.term)

    def _claim_folder(self) -> str:
        """Creates the folder, on host 0, and only if nothing was ever committed. If something was, and the folder is not there,
        the storage is missing."""
        if problem := self.fenced():
            return problem
        try:
            recorded = self.check(layout.steps(self.folder))
            # `and_` keeps a name that is recorded already: the random one is only for a run without a name.
            self._committed = recorded.and_(Committed(run=uuid.uuid4().hex[:12]))
            self.folder.mkdir(parents=True, exist_ok=True)
            committed.ensure(self.folder, self._committed)
            fence.claim(self.folder, self.term)
            # After this generation's claim exists: there is never a moment without one.
            fence.drop_older_claims(self.folder, self.term)
        except CheckpointUnavailableError as error:
            return str(error)
        except OSError as error:
            return layout.unwritable(self.folder, error)
        return ""
