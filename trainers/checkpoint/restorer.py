"""Restores the newest checkpoint that is whole; the same on all hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from gangway.errors import CheckpointError, CheckpointUnavailableError
from gangway.storage.documents import StorageError
from gangway.storage.store import Place, StorageProblem
from gangway.wire.events import RefusedCheckpoint
from trainers.checkpoint import layout, manifest
from trainers.checkpoint.array_io import ArrayFiles, is_outage
from trainers.checkpoint.course import Course
from trainers.checkpoint.fingerprints import MeasuredState
from trainers.checkpoint.ownership import Ownership
from trainers.checkpoint.validate import check_files, check_same_model
from trainers.runtime import multihost
from trainers.runtime.multihost import first_problem, of_host0, one_line
from trainers.step.state import TrainState

Accept = Callable[[dict[str, Any]], str]
"""Returns why a checkpoint with this meta must not be used; empty if it may be."""


@dataclass(frozen=True)
class Restored:
    state: TrainState
    meta: dict[str, Any]
    skipped: list[RefusedCheckpoint] = field(default_factory=list)
    """The checkpoints that were passed over because they are not whole: `step` and `why`."""
    generation: int | None = None
    """Of a snapshot: the generation that has taken it. None: it was a checkpoint."""


class Restorer:
    """All hosts must call `restore` alike."""

    def __init__(self, owner: Ownership, course: Course, measured: MeasuredState, note: Callable[[str], None]):
        self._owner, self._course, self._measured, self._note = owner, course, measured, note
        self._arrays = ArrayFiles()

    def restore(self, abstract: TrainState, accept: Accept | None, before: int | None) -> Restored | None:
        """See `trainers.checkpoint.manager.CheckpointManager.restore`."""
        # All of them, also those after `before`: going back supersedes them.
        everything = self._listed()
        skipped: list[RefusedCheckpoint] = []
        # Those that have lost their manifest are a last resort: these steps come once more.
        tried = deque((step, False) for step in everything if before is None or step <= before)
        while tried:
            step, last_resort = tried.popleft()
            try:
                restored = self._restore_step(step, abstract, accept, last_resort=last_resort)
            except manifest.DamagedError as error:
                if manifest.NOT_COMMITTED in str(error) and not last_resort:
                    tried.append((step, True))
                skipped = [*(bad for bad in skipped if bad["step"] != step), {"step": step, "why": str(error)}]
                continue
            if restored is None:
                continue  # refused, which is no fault of the storage: it does not count as skipped
            state, meta = restored
            self._continue_from(step, everything)
            return Restored(state, meta, [bad for bad in skipped if bad["step"] != step])
        if skipped:
            shown = "; ".join(f"step {bad['step']}: {bad['why']}" for bad in skipped)
            raise CheckpointUnavailableError(
                f"no checkpoint in {self._owner.folder} can be restored ({shown}); bring the storage back, or to start again "
                "from step 0, give the run another name"
            )
        self._continue_from(None, everything)
        return None

    def go_on_from(self, step: int, make: Callable[[], TrainState], allowed: Mapping[str, int]) -> tuple[TrainState | None, str]:
        """See `trainers.checkpoint.manager.CheckpointManager.go_on_from`."""
        everything = self._listed()
        newest = max(everything, default=None)
        if newest is not None and newest > step:
            return None, f"the checkpoint of step {newest} is newer"
        state = make()
        found = self._measured.begin(state).described["not_finite"]
        if more := [name for name in found if found[name] > allowed.get(name, 0)]:
            return None, f"values of {', '.join(more[:3])} are infinite or NaN"
        self._measured.allow(found)
        self._course.continue_from(newest, everything, ())
        return state, ""

    def _listed(self) -> list[int]:
        """Returns the steps of the checkpoints, newest first, as host 0 sees them. Raises CheckpointUnavailableError if those
        cannot be all."""
        # Host 0 alone lists the folder: two hosts might see two states of it, and restore different steps.
        listing = multihost.from_host0("checkpoints to restore", self._listing() if jax.process_index() == 0 else None)
        if problem := listing.get("problem"):
            raise CheckpointUnavailableError(of_host0(problem))
        return listing["steps"]

    def _listing(self) -> dict[str, Any]:
        """Lists the checkpoints, on host 0."""
        try:
            self._owner.listed()
            # Nothing of an earlier generation is recorded from here on.
            kept = layout.committed_in(self._owner.folder)
            there = {*self._owner.folder.folders()}
        except CheckpointUnavailableError as error:
            return {"problem": str(error)}
        except (OSError, StorageError) as error:
            reason = (isinstance(error, OSError) and error.strerror) or error
            return {"problem": f"{self._owner.folder} cannot be read: {reason}"}
        return {"steps": sorted((step for step in kept if kept[step].folder in there), reverse=True)}

    def _continue_from(self, step: int | None, everything: list[int]) -> None:
        # Host 0 alone deletes what is old.
        models = layout.steps(layout.models_of(self._owner.folder)) if jax.process_index() == 0 else []
        self._course.continue_from(step, everything, models)

    def _restore_step(
        self, step: int, abstract: TrainState, accept: Accept | None, *, last_resort: bool
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """Returns (state, meta) of checkpoint `step`, or None if a host refuses it. Raises DamagedError, on all hosts, if it is
        not whole on one of them."""
        meta = self._checked_meta(step, accept, last_resort)
        if meta is None:
            return None
        check_same_model(meta, abstract, str(self._owner.at(step)))
        state = self._read_arrays(self._owner.at(step) / manifest.STATE_FOLDER, abstract)
        # A collective. It is safe here: all hosts have just agreed that they could read their arrays.
        found = self._measured.begin(state).described
        # No exchange: the fingerprints are the same on all hosts, so all raise or none.
        if wrong := [name for name, value in found["fingerprints"].items() if meta["fingerprints"].get(name) != value]:
            raise manifest.DamagedError(
                f"the contents of {', '.join(wrong[:3])} are not those that were saved (fingerprints differ)"
            )
        not_finite, allowed = found["not_finite"], meta.get("not_finite", {})
        if bad := [name for name, number in not_finite.items() if number > allowed.get(name, 0)]:
            raise manifest.DamagedError(f"values of {', '.join(bad[:3])} are infinite or NaN: it cannot be trained on")
        self._measured.allow(not_finite)
        if last_resort:
            self._note(f"checkpoint {step} has no manifest any more; no other can be used, and its fingerprints are right")
        return state, meta

    def _checked_meta(self, step: int, accept: Accept | None, last_resort: bool) -> dict[str, Any] | None:
        """Returns the meta of checkpoint `step`; None if a host refuses it, which is noted. Raises DamagedError if its files are
        damaged, CheckpointUnavailableError if a host does not see it, and CheckpointError if a newer program has saved it; all
        hosts raise the same."""
        path, meta = self._owner.folder / str(step), {}
        problem = refusal = absent = newer = ""
        try:
            path = self._owner.at(step)
            meta = check_files(path, step, last_resort=last_resort)
            refusal = accept(meta) if accept is not None else ""
        except manifest.NewerError as error:
            newer = str(error)
        except manifest.DamagedError as error:
            problem = str(error)
            if not path.is_dir():
                absent = f"{path} is not visible on this host, but host 0 sees it: is the storage mounted?"
        except (StorageProblem, StorageError) as error:
            absent = f"{path} cannot be read: {error}"
        # One exchange for all: a host that raised before it would leave the others waiting.
        mine = {"problem": problem, "refusal": refusal, "absent": absent, "newer": newer}
        answers = multihost.all_hosts("checkpoint files", mine)
        if newer := first_problem([answer["newer"] for answer in answers]):
            raise CheckpointError(newer)
        if absent := first_problem([answer["absent"] for answer in answers]):
            raise CheckpointUnavailableError(absent)
        if problem := first_problem([answer["problem"] for answer in answers]):
            raise manifest.DamagedError(problem)
        if refusal := first_problem([answer["refusal"] for answer in answers]):
            self._note(f"checkpoint {step} is not used: {refusal}")
            return None
        return meta

    def _read_arrays(self, folder: Place, abstract: TrainState) -> TrainState:
        """Raises DamagedError, on all hosts, if one of them cannot read the arrays, and CheckpointUnavailableError if that is
        because the storage does not answer."""
        state: Any = None
        problem = absent = ""
        try:
            state = self._arrays.read(folder, abstract)
        except Exception as error:  # Orbax raises whatever its layers raise: anything means that the checkpoint cannot be read
            problem = one_line(error)
            absent = f"{folder} cannot be read: {problem}" if is_outage(folder, error) else ""
        answers = multihost.all_hosts("checkpoint arrays", {"problem": problem, "absent": absent})
        if absent := first_problem([answer["absent"] for answer in answers]):
            raise CheckpointUnavailableError(absent)
        if problem := first_problem([answer["problem"] for answer in answers]):
            raise manifest.DamagedError(problem)
        return state
