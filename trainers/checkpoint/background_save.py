"""Saves a tree of arrays in the background: copied from the devices first, then written and committed by all hosts or none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from trainers.checkpoint import trial
from trainers.checkpoint.array_io import ArrayFiles
from trainers.checkpoint.commit import Commit, CommitError, Exchange, begin
from trainers.checkpoint.fence import WriterTerm
from trainers.checkpoint.standing import Folder
from trainers.checkpoint.storage_check import StorageCheck
from trainers.checkpoint.trial import UnsavableError
from trainers.runtime.multihost import one_line


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
