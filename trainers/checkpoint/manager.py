"""Checkpoints: saved in the background, committed by all hosts or none, and restored from the newest one that is whole.

A checkpoint of step S (a batch index) is the folder `checkpoints/S`: `state` (the arrays, by Orbax), `meta.json` (where the data
stands, the seed, the fingerprint of every leaf, what produced it) and `manifest.json` (size and digest of every file), which is
written last.
"""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from trainers.checkpoint import committed, fence, layout, manifest, model_only
from trainers.checkpoint.array_io import ArrayFiles
from trainers.checkpoint.commit import Commit, CommitError, Exchange, begin
from trainers.checkpoint.committed import Committed
from trainers.checkpoint.fence import NO_DRIVER, WriterTerm
from trainers.checkpoint.fingerprint import fingerprints, leaf_names
from trainers.checkpoint.retention import Retention
from trainers.checkpoint.storage_check import StorageCheck
from trainers.checkpoint.validate import check_files, check_same_model, num_bytes_of, shapes
from trainers.errors import CheckpointUnavailableError
from trainers.parallel.mesh import replicated
from trainers.runtime import multihost
from trainers.runtime.device import wait_for_device
from trainers.runtime.executables import Program, ProgramStore
from trainers.runtime.multihost import first_problem, of_host0, one_line
from trainers.step.state import TrainState

Accept = Callable[[dict[str, Any]], str]
"""Why a checkpoint with this meta is not to be used; empty if it may be."""


@dataclass(frozen=True)
class Restored:
    state: TrainState
    meta: dict[str, Any]
    skipped: list[dict[str, Any]] = field(default_factory=list)
    """Checkpoints that were passed over because they are not whole: `step` and `why`."""


class CheckpointManager:
    """Saves and restores the state of one run. All hosts must call `save`, `restore`, `wait` and `close` alike.

    on_saved(step, path) and on_failed(step, error) are called on every host when a save has ended: mostly from a background
    thread. A save that fails on one host has failed on all, and does not stop training.
    """

    def __init__(
        self,
        folder: str,
        retention: Retention,
        mesh: Mesh,
        store: ProgramStore,
        *,
        on_saved: Callable[[int, str], None],
        on_failed: Callable[[int, str], None],
        note: Callable[[str], None],
        ordered: Committed = committed.NOTHING,
        term: WriterTerm = NO_DRIVER,
        storage_patience_s: float | None = None,
    ):
        """`ordered`: what the driver knows of the run; nothing where there is none. `term`: the generation of this process.
        `storage_patience_s`: how long a save may wait for the storage before it begins; None: as long as it takes."""
        self.folder = layout.local(folder)
        self.on_saved, self.on_failed, self.note = on_saved, on_failed, note
        self.fence: str | None = None
        """A path: once it exists, another driver has the run, and nothing is committed any more."""
        self._own_term = term
        self._term = term
        """Of the checkpoints that are saved: no lower than that of the one that was restored, whoever saved it."""
        self.failing = False
        """The last save failed, and none has succeeded since."""
        self.last_saved_step: int | None = None
        self._superseded: set[int] = set()
        """Checkpoints that training has left behind: damaged, or of a course that it has gone back on."""
        self._abandoned_models: frozenset[int] = frozenset()
        """The same of those of which the parameters alone were kept: they go after the next save."""
        jitted = jax.jit(fingerprints, out_shardings=replicated(mesh))
        self._fingerprints = Program("fingerprints", jitted, store, note)
        self._arrays = ArrayFiles()
        self._retention = retention
        self._committed = ordered
        """What the folder must show, beside what its records say: what was ordered, and what this process has committed."""
        self._claimed = False
        """The folder is there, with the record of this run: once that is gone, the storage is, and making it anew would save to
        the wrong disk."""
        self._storage_patience_s = storage_patience_s
        self._storage = StorageCheck()
        self._last_exchange: Exchange | None = None
        self._thread: threading.Thread | None = None
        self._tidying = ThreadPoolExecutor(1, "old checkpoints")
        self._tidied: Future[None] | None = None

    def save(self, step: int, state: TrainState, meta: dict[str, Any], *, patient: bool = False) -> None:
        """Starts a save; returns when the arrays were copied, so that `state` may be donated at once.

        Waits for the save before it, if that is still under way. What prevents a save on any host (no room, storage gone, the
        fence) is agreed on first: it has then failed on all of them when this returns. So has one that the storage does not
        answer for in time; `patient` waits for it without a limit.
        """
        self.wait_for_save()
        if step == self.last_saved_step:
            return
        patience_s = None if patient else self._storage_patience_s
        if problem := self._claim(patience_s):
            self._failed(step, problem)
            return
        values = wait_for_device(self.fingerprint(state)).tolist()
        meta = {**meta, "format": manifest.FORMAT, "step": step, "term": self._term, "shapes": shapes(state)}
        meta["fingerprints"] = dict(zip(leaf_names(state), values, strict=True))
        final, size = self.folder / str(step), num_bytes_of(state)
        work, problem = begin(final, lambda: self._storage.ask(lambda: self._obstacle(step, size), patience_s), self._own_term)
        if problem:
            self._failed(step, problem)
            return
        # Handed over, not shared: the thread must not keep arrays alive that the next step could reuse.
        copied, hand_over = threading.Event(), [state]

        def write(folder: Path) -> None:
            try:
                self._arrays.write(folder, hand_over.pop, copied.set)
            finally:
                copied.set()  # training does not wait for what the other hosts make of a failure

        exchange, replace = self._exchange(work.name), step in self._superseded
        save = Commit(work, final, meta, exchange, write, self._arrays.merge, partial(self._forbidden, final), replace)
        self._thread = threading.Thread(target=self._run, args=(step, save, copied), name="checkpoint", daemon=True)
        self._thread.start()
        copied.wait()

    def wait_for_save(self) -> None:
        """Returns when no save is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Returns when no save is under way, and what is old has been seen to."""
        self.wait_for_save()
        if self._tidied is not None:
            self._tidied.result()
            self._tidied = None

    def close(self) -> None:
        self.wait()

    def restore(self, abstract: TrainState, accept: Accept | None = None, before: int | None = None) -> Restored | None:
        """The newest checkpoint that is whole and acceptable, of a step up to `before`; on all hosts the same.

        None if there is none, or if none was acceptable. `abstract` gives shapes and shardings: any mesh will do. Raises
        CheckpointError if the checkpoints are of another model, and CheckpointUnavailableError if there are acceptable ones and
        none of them is whole, or if some that were committed are not to be seen: starting again from nothing is never done
        silently. One that was not completely committed is a last resort.
        """
        self.wait()
        complete, unfinished = self._listed()
        everything = {*complete, *unfinished}
        complete, unfinished = ([s for s in steps if before is None or s <= before] for steps in (complete, unfinished))
        skipped: list[dict[str, Any]] = []
        for step in (*complete, *unfinished):
            state, meta, problem = self._try(step, abstract, accept, last_resort=step in unfinished)
            if state is not None:
                newer = [{"step": s, "why": manifest.NOT_COMMITTED} for s in unfinished if s > step]
                self._take_up(step, everything)
                self._term = max(self._own_term, WriterTerm(*meta.get("term", NO_DRIVER)))
                return Restored(state, meta, [*skipped, *newer])
            if problem:
                skipped.append({"step": step, "why": problem})
        if skipped:
            shown = "; ".join(f"step {bad['step']}: {bad['why']}" for bad in skipped)
            raise CheckpointUnavailableError(
                f"no checkpoint in {self.folder} can be restored ({shown}); bring the storage back, or to start again "
                "from step 0, give the run another name"
            )
        self._take_up(None, everything)
        return None

    def steps(self) -> list[int]:
        """Steps with a checkpoint, oldest first."""
        return layout.steps(self.folder)

    def path(self, step: int) -> str:
        return str(self.folder / str(step))

    def fingerprint(self, state: TrainState) -> jax.Array:
        """uint32[num_leaves, 2], on the device, the same on all hosts. All hosts must call this."""
        return self._fingerprints(state)

    def load_ahead(self, state: TrainState) -> None:
        """Begins to load what restoring and saving need. `state` may be shapes with shardings."""
        self._fingerprints.load_ahead(state)

    def prepare(self, state: TrainState) -> None:
        """Compiles what saving needs, if restoring has not done it. `state` may be shapes with shardings."""
        if self._fingerprints.compiled is None:
            self._fingerprints.prepare(state)

    def _obstacle(self, step: int, num_bytes: int) -> str:
        """What prevents this host from saving; empty if nothing. Raises OSError."""
        if jax.process_index() == 0:
            if problem := self._fenced():
                return problem
            self._clear_leftovers()
            if (self.folder / str(step)).exists() and not self._may_replace(step):
                return f"{self.path(step)} is there already, from another training: move it away, or give the run another name"
        if not committed.is_there(self.folder):
            gone = self.folder / committed.FILE if self.folder.is_dir() else self.folder
            return f"{gone} is gone: bring the storage back (is it mounted on this host?), and the next save goes there"
        return layout.obstacle(self.folder, num_bytes)

    def _may_replace(self, step: int) -> bool:
        """Whether training has left that checkpoint behind; or an earlier generation, thought dead, has saved it since."""
        if step not in self._superseded and NO_DRIVER < (_term_of(self.folder / str(step)) or NO_DRIVER) < self._own_term:
            self._superseded.add(step)
        return step in self._superseded

    def _claim(self, patience_s: float | None) -> str:
        """Before this manager's first save: makes sure that the folder is there, and this run's. Returns what prevents it, on all
        hosts the same."""
        if not self._claimed:
            own = self._storage.ask(self._claim_folder, patience_s) if jax.process_index() == 0 else None
            problem = multihost.from_host0("checkpoint folder", own)
            if problem:
                return of_host0(problem)
            self._claimed = True
        return ""

    def _claim_folder(self) -> str:
        """On host 0. The folder is made only if nothing was ever committed: else it is there, or its storage is not."""
        if problem := self._fenced():
            return problem
        try:
            known = committed.check(self.folder, self.steps(), self._committed)
            self._committed = known.and_(Committed(run=uuid.uuid4().hex[:12]))
            self.folder.mkdir(parents=True, exist_ok=True)
            committed.ensure(self.folder, self._committed)
            fence.claim(self.folder, self._own_term)
            fence.drop_older_claims(self.folder, self._own_term)
        except CheckpointUnavailableError as error:
            return str(error)
        except OSError as error:
            return layout.unwritable(self.folder, error)
        return ""

    def _clear_leftovers(self) -> None:
        """Before this manager's first save: what a process that died has left. No other gang is at work here: the fence would be
        there."""
        if self._last_exchange is None:
            for folder in (self.folder, layout.models_of(self.folder)):
                for path in layout.on_the_way(folder):
                    shutil.rmtree(path, ignore_errors=True)
            for probe in self.folder.glob(f"{layout.PROBE}*"):
                probe.unlink(missing_ok=True)  # another host that writes one just now needs no name for it

    def _fenced(self) -> str:
        """On host 0, which commits."""
        return fence.fenced(self.fence, self.folder, self._own_term)

    def _forbidden(self, final: Path | None = None) -> str:
        """On host 0, in a thread that may wait."""
        if problem := fence.with_patience(self._fenced):
            return problem
        there = _term_of(final) if final is not None else None
        return f"{final} was saved by a later generation ({there})" if there is not None and there > self._term else ""

    def _exchange(self, name: str) -> Exchange:
        if self._last_exchange is not None:
            self._last_exchange.forget()  # all hosts have come to the next save: nobody listens to the last one any more
        self._last_exchange = Exchange(name)
        return self._last_exchange

    def _run(self, step: int, save: Commit, copied: threading.Event) -> None:
        try:
            save.run()
        except CommitError as error:
            self._failed(step, str(error))
            return
        except Exception as error:  # a thread's boundary: recorded and reported, training goes on
            self._failed(step, one_line(error))
            return
        finally:
            copied.set()  # whatever happened: training never waits for a thread that has ended
        self.last_saved_step = step
        self.failing = False
        self._superseded.discard(step)
        self._committed = self._committed.and_(Committed(step=step))
        if jax.process_index() == 0:
            self._record()
        self.on_saved(step, self.path(step))
        if jax.process_index() == 0:
            # In a thread of its own: to copy a model takes longer than the next save may have to wait.
            abandoned, self._abandoned_models = self._abandoned_models, frozenset()
            self._tidied = self._tidying.submit(self._tidy, step, frozenset(self._superseded), abandoned)

    def _record(self) -> None:
        """On host 0, after a commit."""
        for folder in (self.folder, self.folder.parent):
            try:
                committed.write(folder, self._committed)
            except OSError as error:  # the checkpoint is there all the same
                self.note(f"{folder / committed.FILE} could not be written: {error.strerror or error}; the next save tries again")

    def _tidy(self, newest: int, superseded: frozenset[int], abandoned_models: frozenset[int]) -> None:
        """On host 0."""
        if self._forbidden():
            return
        keep = partial(model_only.keep, self._arrays, forbidden=self._forbidden)
        try:
            for problem in layout.delete_old(self.folder, newest, superseded, self._retention, keep, abandoned_models):
                self.note(problem)
        except Exception as error:  # a thread's boundary: what is old may stay, training goes on
            self.note(f"old checkpoints in {self.folder} could not be seen to: {one_line(error)}")

    def _failed(self, step: int, error: str) -> None:
        self.failing = True
        self.on_failed(step, error)

    def _listed(self) -> tuple[list[int], list[int]]:
        """(steps with a manifest, steps without), newest first, as host 0 sees them. Raises CheckpointUnavailableError if those
        cannot be all."""
        seen = multihost.from_host0("checkpoints to restore", self._listing() if jax.process_index() == 0 else None)
        if problem := seen.get("problem"):
            raise CheckpointUnavailableError(of_host0(problem))
        return seen["complete"], seen["unfinished"]

    def _listing(self) -> dict[str, Any]:
        """On host 0."""
        try:
            steps = sorted(self.steps(), reverse=True)
            committed.check(self.folder, steps, self._committed)
            complete = [step for step in steps if (self.folder / str(step) / manifest.MANIFEST_FILE).exists()]
            complete = self._newest_first(complete)
            if steps:
                with suppress(OSError):  # storage that cannot be written to: the first save claims it, or tells
                    fence.claim(self.folder, self._own_term)
        except CheckpointUnavailableError as error:
            return {"problem": str(error)}
        except OSError as error:
            return {"problem": f"{self.folder} cannot be read: {error.strerror or error}"}
        return {"complete": complete, "unfinished": [step for step in steps if step not in complete]}

    def _newest_first(self, steps: list[int]) -> list[int]:
        """Those of later generations first: what an earlier one, thought dead, has saved after a later one began was trained on
        by nobody. `steps` are in falling order."""
        others = (term for term in fence.claims(self.folder) if term < self._own_term)
        latest = max(others, default=NO_DRIVER)
        newest = _term_of(self.folder / str(steps[0])) if steps else latest
        if newest is not None and newest >= latest:
            return steps
        # One whose documents cannot be read comes in its place by its step: it is tried, and told to be damaged.
        terms = {step: _term_of(self.folder / str(step)) or latest for step in steps}
        return sorted(steps, key=lambda step: (terms[step], step), reverse=True)

    def _take_up(self, step: int | None, everything: Iterable[int]) -> None:
        self.last_saved_step = step
        self._superseded = {other for other in everything if step is None or other > step}
        if jax.process_index() > 0:
            return  # host 0 sees to what is old
        models = layout.steps(layout.models_of(self.folder))
        self._abandoned_models = frozenset(other for other in models if step is None or other > step)

    def _try(
        self, step: int, abstract: TrainState, accept: Accept | None, *, last_resort: bool
    ) -> tuple[TrainState | None, dict[str, Any], str]:
        """(state, meta, "") if checkpoint `step` is whole on all hosts and acceptable, (None, {}, why not) if it is not whole,
        (None, {}, "") if it is refused, which is noted."""
        path = self.folder / str(step)
        meta, problem = check_files(path, step, last_resort=last_resort)
        refusal = accept(meta) if accept is not None and not problem else ""
        absent = (
            "" if not problem or path.is_dir() else f"{path} is not to be seen here, and host 0 sees it: is the storage mounted?"
        )
        answers = multihost.all_hosts("checkpoint files", {"problem": problem, "refusal": refusal, "absent": absent})
        if absent := first_problem([answer["absent"] for answer in answers]):
            raise CheckpointUnavailableError(absent)
        if problem := first_problem([answer["problem"] for answer in answers]):
            return None, {}, problem
        if refusal := first_problem([answer["refusal"] for answer in answers]):
            self.note(f"checkpoint {step} is not used: {refusal}")
            return None, {}, ""
        check_same_model(meta, abstract, self.path(step))
        state: Any = None
        try:
            state = self._arrays.read(path / manifest.STATE_FOLDER, abstract)
        except Exception as error:  # Orbax raises whatever its layers raise: anything means that the checkpoint cannot be read
            problem = one_line(error)
        if problem := first_problem(multihost.all_hosts("checkpoint arrays", problem)):
            return None, {}, problem
        values = wait_for_device(self.fingerprint(state)).tolist()
        names = leaf_names(state)
        wrong = [n for n, value in zip(names, values, strict=True) if meta["fingerprints"].get(n) != value]
        if wrong:
            return None, {}, f"the contents of {', '.join(wrong[:3])} are not those that were saved (fingerprints differ)"
        if last_resort:
            self.note(f"checkpoint {step} was not completely committed; no other can be used, and its fingerprints are right")
        return state, meta, ""


def _term_of(checkpoint: Path) -> WriterTerm | None:
    """Of the generation that saved it; None if there is none, or its documents cannot be read."""
    try:
        return WriterTerm(*manifest.read_meta(checkpoint).get("term", NO_DRIVER))
    except manifest.DamagedError:
        return None
