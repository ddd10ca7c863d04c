"""The folder of a run's checkpoints, as far as this generation of the gang may write there."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import jax

from gangway.errors import CheckpointUnavailableError
from gangway.storage import ours
from gangway.storage.documents import StorageError
from gangway.storage.row import NO_DRIVER, Kept, OvertakenError, Record, WriterTerm
from gangway.storage.store import Place
from trainers.checkpoint import layout
from trainers.checkpoint.commit import CommitError
from trainers.runtime import multihost
from trainers.runtime.multihost import of_host0

RETRIES = 3
RETRY_S = 0.5
FRESH_S = 60.0
"""A late answer counts for the next question if it is no older than this."""


class StorageCheck:
    """Asks what prevents a save. There is one thread and one question at a time.

    A call into a file system that hangs cannot be ended from outside: its thread waits in the kernel. So an unanswered question
    stays pending, and no save begins before the storage has answered it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._pending: _Question | None = None

    def ask(self, question: Callable[[], str], patience_s: float | None) -> str:
        """Returns what `question` returns (empty if nothing prevents a save). If the storage does not answer within
        `patience_s` (None: no limit), returns that as the problem. Raises what `question` raises."""
        late = self._pending is not None
        pending = self._pending = self._pending or _Question(question, self._clock)
        if not pending.done.wait(patience_s):
            return f"the storage has not answered for {self._clock() - pending.asked_s:.0f} s; the next save waits until it does"
        # Only after an answer: a new question to a storage that hangs would only add a thread that hangs.
        self._pending = None
        if late and self._clock() - pending.answered_s > FRESH_S:
            return self.ask(question, patience_s)
        if pending.error is not None:
            raise pending.error
        return pending.answer


class _Question:
    def __init__(self, question: Callable[[], str], clock: Callable[[], float]):
        self.asked_s = self.answered_s = clock()
        self.done = threading.Event()
        self.answer = ""
        self.error: BaseException | None = None
        self._question, self._clock = question, clock
        # A daemon: a thread that hangs in the kernel must not keep the process from ending.
        threading.Thread(target=self._run, name="storage check", daemon=True).start()

    def _run(self) -> None:
        try:
            self.answer = self._question()
        except BaseException as error:  # a thread's boundary: raised where it was asked
            self.error = error
        # Before `done` is set: whoever waits for it reads the time next.
        self.answered_s = self._clock()
        self.done.set()


class Ownership:
    """Claims the folder for one generation, and tells whether it still has it.

    `ordered_step` is the highest step that the driver knows was committed; None without a driver.
    """

    def __init__(self, folder: Place, term: WriterTerm, ordered_step: int | None, note: Callable[[str], None]):
        self.folder, self.term = folder, term
        self._row = layout.row_of(folder)
        self._writer = term
        """The term of what this process records. Without a driver it takes the run over for itself, as a driver would."""
        self._note = note
        self._expected = ordered_step
        """The step up to which checkpoints must be in the folder: what the driver knew, and what this process has committed."""
        self._claimed = False
        """Whether this process has created or checked the folder. If it is gone later, the storage is gone: creating the folder
        anew would save to the wrong disk."""
        self._seen: tuple[int, int] | None = None
        """Which folder of this machine was there at the first save: another one in its place is the mount point of storage that
        has gone."""
        self._cleared = False
        """Whether what a process that died has left was deleted."""
        self._discarded: set[Place] = set()
        """The folders that do not count, and may still be there."""
        self._storage = StorageCheck()

    def follow_driver(self, driver_term: int) -> None:
        """A driver of this term has the run. It has taken this generation over: from now on that is one of its own."""
        if self.term != NO_DRIVER:
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
        try:
            newest = self._row.newest()
        except (OSError, StorageError) as error:
            return f"it is not known whether another driver has this run ({error}): nothing is committed"
        if newest.damaged and self._writer > NO_DRIVER:
            return f"it is not known whose the run is ({newest.damaged}): nothing is committed until a driver takes it over"
        return self._overtaken(newest)

    def overtaken(self) -> str:
        """Returns that another driver has the run: no later try can commit either. Empty if that is not known. For host 0."""
        with suppress(OSError, StorageError):
            return self._overtaken(self._row.newest())
        return ""

    def _overtaken(self, newest: Record) -> str:
        return str(OvertakenError(self._writer, newest)) if newest.term > self._writer > NO_DRIVER else ""

    def at(self, step: int) -> Place:
        """Returns the folder of the checkpoint of a step. Raises OSError, or StorageError."""
        return layout.at(self.folder, step)

    def commit(self, folder: Place, step: int, name: str, digest: str) -> None:
        """Records that `name` in `folder`, which is that of the checkpoints or of the models, is committed; in a thread that may
        wait: storage that fails for a moment costs no checkpoint. Raises CommitError if another driver has the run, and OSError
        if nobody can tell."""
        kept, unclear = Kept(name, digest), None
        for pause_s in (*[RETRY_S] * RETRIES, 0.0):
            try:
                replaced = self._row.commit(self._writer, step, kept, folder.name)
                break
            except OvertakenError as error:
                # A try before this one may have recorded it, and got no answer.
                if error.newest.of(folder.name).get(step) != kept:
                    raise CommitError(f"{error}: no checkpoint is committed from here") from error
                replaced = None
                break
            except StorageError as error:
                if unclear is not None:
                    raise unclear from error
                raise CommitError(str(error)) from error
            except OSError as error:
                unclear = error
                time.sleep(pause_s)
        else:
            assert unclear is not None
            raise unclear
        if replaced is not None and replaced.folder != name:
            self._discarded.add(folder / replaced.folder)
        if folder == self.folder:
            self._expected = max(step, self._expected or 0)

    def remove(self, folder: Place, step: int) -> None:
        """Removes what is saved of a step in one of these folders: first it no longer counts. Raises CommitError or OSError."""
        try:
            if (kept := self._row.newest().of(folder.name).get(step)) is None:
                return
            self._row.remove(self._writer, [step], folder.name)
        except (OvertakenError, StorageError) as error:
            raise CommitError(f"{folder / str(step)} stays: {error}") from error
        self.discard(folder / kept.folder)

    def discard(self, work: Place) -> None:
        """Deletes a folder that was not committed, or does not count any more. Raises OSError: `delete_discarded` tries it
        again."""
        self._discarded.add(work)
        ours.delete_folder(work, layout.UNCOMMITTED)
        self._discarded.discard(work)

    def delete_discarded(self, is_read: Callable[[Place], bool]) -> list[str]:
        """Deletes what a save has replaced, and what could not be deleted before; but not what `is_read` now. Returns what went
        wrong: that is tried again at the next call. For host 0."""
        problems = []
        for folder in [folder for folder in self._discarded.copy() if not is_read(folder)]:
            try:
                self.discard(folder)
            except OSError as error:
                problems.append(f"{folder}, which does not count, could not be deleted: {error.strerror or error}")
        return problems

    def lost(self) -> str:
        """Returns that the storage is gone; empty if it is there. Raises OSError."""
        if not self.folder.store.is_local:
            return ""  # nothing else can be at this URL
        newest = self._row.newest()
        if absent := self._absent(newest):
            return absent
        kept, there, here = newest.of(self.folder.name).values(), {*self.folder.folders()}, self._folder_here()
        self._seen = self._seen or here
        if not kept or any(one.folder in there for one in kept) or (here and here == self._seen):
            return ""  # whoever deletes checkpoints deletes no folder
        return f"{self.folder} is gone: bring the storage back (is it mounted on this host?), and the next save goes there"

    def _folder_here(self) -> tuple[int, int] | None:
        """Returns what identifies the folder on this machine; None if it is not there, or in a bucket."""
        with suppress(OSError, TypeError):
            found = os.stat(self.folder.path)
            return found.st_dev, found.st_ino
        return None

    def _absent(self, newest: Record) -> str:
        """Returns that the storage of this run is not there, if the row lacks the record with which its driver took it over."""
        if newest.term.driver_term >= self._writer.driver_term or newest.damaged:
            return ""
        return (
            f"{self.folder} is not there, or another run's: its row does not have driver term {self._writer.driver_term}; bring "
            "the storage back (is it mounted on this host?), and the next save goes there"
        )

    def clear_leftovers(self) -> None:
        """Before the first save: deletes what a process that died has left. No other gang works here: it would have a later term.
        For host 0."""
        if self._cleared:
            return
        # Once: later ones may be in progress, for models are saved beside the checkpoints.
        self._cleared = True
        for folder in (self.folder, layout.models_of(self.folder)):
            with suppress(OSError, StorageError):
                layout.delete_left(folder, self._writer)

    def listed(self) -> Record:
        """Returns what the row says, before a restore: from here on an older generation that still lives cannot commit any more.
        For host 0. Raises CheckpointUnavailableError if there must be more checkpoints, OSError, or StorageError."""
        newest = self._row.newest()
        if self._writer != NO_DRIVER or layout.steps(self.folder):
            # Read-only storage, or a later generation: the first save claims the run, or says why not.
            with suppress(OSError, OvertakenError, StorageError):
                newest = self._claim_row()
        layout.check(self.folder, newest, self._expected)
        return newest

    def _claim_folder(self) -> str:
        """Creates the folder, on host 0, and only if nothing was ever committed. If something was, and the folder is not there,
        the storage is missing."""
        if problem := self.fenced():
            return problem
        try:
            layout.check(self.folder, self._row.newest(), self._expected)
            self._claim_row()
            self.folder.make(around=True)
        except (CheckpointUnavailableError, OvertakenError) as error:
            return str(error)
        except (OSError, StorageError) as error:
            return layout.unwritable(self.folder, error)
        return ""

    def _claim_row(self) -> Record:
        """Raises OvertakenError, CheckpointUnavailableError, OSError or StorageError."""
        if self._writer == NO_DRIVER:
            holder = {"hostname": socket.gethostname(), "pid": os.getpid()}
            self._writer = self._row.take_over(holder, found=partial(layout.without_row, self.folder.parent)).term
        if absent := self._absent(self._row.newest()):
            raise CheckpointUnavailableError(absent)
        return self._row.claim(self._writer)
