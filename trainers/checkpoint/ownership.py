"""The folder of a run's checkpoints, as far as this generation of the gang may write there."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import jax

from gangway.errors import CheckpointUnavailableError
from gangway.storage import ours
from gangway.storage.documents import StorageError
from gangway.storage.row import NO_DRIVER, Kept, OvertakenError, WriterTerm
from gangway.storage.store import Place
from trainers.checkpoint import committed, fence, layout, manifest, standing
from trainers.checkpoint.commit import CommitError, delete
from trainers.checkpoint.committed import Committed
from trainers.checkpoint.standing import Folder
from trainers.checkpoint.storage_check import StorageCheck
from trainers.runtime import multihost
from trainers.runtime.multihost import of_host0


class Ownership:
    """Claims the folder for one generation, and tells whether it still has it.

    `ordered` is what the driver knows was committed; empty without a driver.
    """

    def __init__(self, folder: Folder, term: WriterTerm, ordered: Committed, note: Callable[[str], None]):
        self.folder, self.term = folder, term
        self._row = standing.row_of(folder)
        self._writer = term
        """The term of what this process records. Without a driver it takes the run over for itself, as a driver would."""
        self.fence: str | None = None
        """The path of the document that the next driver will create; None without a driver."""
        self._note = note
        self._committed = ordered
        """What must be in the folder, beside what its records say: what the driver knew, and what this process has committed."""
        self._claimed = False
        """Whether this process has created or checked the folder and its record. If they are gone later, the storage is gone:
        creating the folder anew would save to the wrong disk."""
        self._cleared = False
        """Whether what a process that died has left was deleted."""
        self._discarded: set[Folder] = set()
        """The folders that do not count, and may still be there."""
        self._storage = StorageCheck()

    def follow_fence(self, path: str | None) -> None:
        """Once there is something at `path`, another driver has the run, and nothing is committed any more. A driver that takes
        this generation over sends another path, and with it the generation is of that driver's term."""
        self.fence = path
        if path is not None and (driver_term := fence.driver_term_of(path)) is not None and self.term != NO_DRIVER:
            self._writer = max(self._writer, WriterTerm(driver_term, self.term.generation))

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
        if isinstance(self.folder, Path) and (problem := fence.fenced(self.fence, self.folder, self.term)):
            return problem
        try:
            newest = self._row.newest()
        except (OSError, StorageError) as error:
            return f"it is not known whether another driver has this run ({error}): nothing is committed"
        if newest.damaged and self._writer > NO_DRIVER:
            return f"it is not known whose the run is ({newest.damaged}): nothing is committed until a driver takes it over"
        return str(OvertakenError(self._writer, newest)) if newest.term > self._writer > NO_DRIVER else ""

    def at(self, step: int) -> Folder:
        """Returns the folder of the checkpoint of a step. Raises OSError, or StorageError."""
        return standing.at(self.folder, step)

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of this step, or something else in its place. Raises OSError, or StorageError."""
        return self.at(step).exists() if isinstance(self.folder, Path) else step in layout.steps(self.folder)

    def commit(self, folder: Folder, step: int, name: str, digest: str) -> None:
        """Records that `name` in `folder`, which is that of the checkpoints or of the models, is committed. Raises CommitError if
        another driver has the run, and OSError if nobody can tell."""
        try:
            replaced = self._row.commit(self._writer, step, Kept(name, digest), folder.name)
        except OvertakenError as error:
            raise CommitError(f"{error}: no checkpoint is committed from here") from error
        except StorageError as error:
            raise CommitError(str(error)) from error
        if isinstance(folder, Place) and replaced is not None and replaced.folder != name:
            self._discarded.add(folder / replaced.folder)

    def remove(self, folder: Folder, step: int) -> None:
        """Removes what is saved of a step in one of these folders: first it no longer counts. Raises CommitError or OSError."""
        path = standing.at(folder, step)
        try:
            if step in self._row.newest().of(folder.name):
                self._row.remove(self._writer, [step], folder.name)
        except (OvertakenError, StorageError) as error:
            raise CommitError(f"{path} stays: {error}") from error
        if isinstance(path, Place):
            self.discard(path)
        else:
            layout.delete(path)

    def discard(self, work: Folder) -> None:
        """Deletes a folder that was not committed, or does not count any more. Raises OSError: `delete_discarded` tries it
        again."""
        self._discarded.add(work)
        delete(work)
        self._discarded.discard(work)

    def delete_discarded(self, is_read: Callable[[Folder], bool]) -> list[str]:
        """Deletes what a save has replaced in a bucket, and what could not be deleted before; but not what `is_read` now. Returns
        what went wrong: that is tried again at the next call. For host 0."""
        problems = []
        for folder in [folder for folder in self._discarded.copy() if not is_read(folder)]:
            try:
                self.discard(folder)
            except OSError as error:
                problems.append(f"{folder}, which does not count, could not be deleted: {error.strerror or error}")
        return problems

    def forbidden(self) -> str:
        """Like `fenced`, with several tries. For host 0, in a thread that may wait."""
        return fence.with_patience(self.fenced)

    def lost(self) -> str:
        """Returns that the storage is gone; empty if it is there. Raises OSError."""
        if isinstance(self.folder, Place):
            return ""  # nothing else can be at this URL
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
                    delete(path)
            if isinstance(folder, Place):
                with suppress(OSError, StorageError):
                    for left in standing.left_by_others(folder, self._writer):
                        delete(left)
        if isinstance(self.folder, Place):
            return
        for probe in self.folder.glob(f"{layout.PROBE}*"):
            with suppress(OSError):
                ours.delete(probe, ours.PROBE)  # another host that writes one just now needs no name for it

    def record(self, step: int) -> None:
        """Remembers that `step` was committed; host 0 writes it into the records."""
        self._committed = self._committed.and_(Committed(step=step))
        if jax.process_index() > 0 or isinstance(self.folder, Place):
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
            if isinstance(self.folder, Path):
                fence.claim(self.folder, self.term)
            with suppress(OvertakenError, StorageError):
                self._claim_row()

    def finish_recorded(self) -> bool:
        """Gives its name to what was recorded as committed on a disk by a process that died, or sleeps, before it could do so;
        returns whether there was something. After `claim_again`: nothing of an older generation is recorded any more. For host
        0. Raises OSError."""
        found = False
        for work in layout.on_the_way(self.folder):
            step = layout.step_on_the_way(work)
            kept = self._row.newest().of(self.folder.name).get(step)
            if kept is None or ".saving-" not in work.name or kept.digest != manifest.digest_of(work):
                continue
            with suppress(OSError):  # that process may be doing it just now
                layout.put_in_place(work, work.with_name(kept.folder), replace=layout.CHECKPOINT)
            found = True
        return found

    def _claim_folder(self) -> str:
        """Creates the folder, on host 0, and only if nothing was ever committed. If something was, and the folder is not there,
        the storage is missing."""
        if problem := self.fenced():
            return problem
        try:
            recorded = self.check(layout.steps(self.folder))
            # `and_` keeps a name that is recorded already: the random one is only for a run without a name.
            self._committed = recorded.and_(Committed(run=uuid.uuid4().hex[:12]))
            if isinstance(self.folder, Path):
                self.folder.mkdir(parents=True, exist_ok=True)
                committed.ensure(self.folder, self._committed)
                fence.claim(self.folder, self.term)
                # After this generation's claim exists: there is never a moment without one.
                fence.drop_older_claims(self.folder, self.term)
            self._claim_row()
        except (CheckpointUnavailableError, OvertakenError) as error:
            return str(error)
        except (OSError, StorageError) as error:
            return layout.unwritable(self.folder, error)
        return ""

    def _claim_row(self) -> None:
        """Raises OvertakenError, OSError or StorageError."""
        if self._writer == NO_DRIVER:
            self._writer = self._row.take_over({"hostname": socket.gethostname(), "pid": os.getpid()}).term
        self._row.claim(self._writer)
