"""Saves the checkpoints of a run: the state, and the JSON that a later process needs to continue from it."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax

from gangway.errors import CheckpointError, SaveFailedError
from trainers import runtime
from trainers.callbacks import CallbackList, RunInfo
from trainers.checkpoint import going_on
from trainers.checkpoint.whole import META
from trainers.config.arguments import TrainingArguments, recorded_arguments
from trainers.loop.data_state import DataState
from trainers.loop.evaluator import Evaluator
from trainers.loop.lineage import Lineage
from trainers.loop.metrics_reporter import MetricsReporter
from trainers.loop.time_used import TimeUsed
from trainers.protocol import CheckpointManagerProtocol
from trainers.runtime import multihost
from trainers.step.state import TrainState

LAST_SAVE_PAUSES_S = (1.0, 5.0)
"""Before each further try to save the last step."""


@dataclass
class Saver:
    """All hosts must call its methods alike."""

    manager: CheckpointManagerProtocol
    arguments: TrainingArguments
    info: RunInfo
    lineage: Lineage
    reporter: MetricsReporter
    evaluator: Evaluator
    callbacks: CallbackList
    complete: collections.deque[tuple[int, str]]
    """(step, path) of each complete checkpoint. The thread that saves appends; `report_saved` empties it."""
    time_used: TimeUsed
    data_state: DataState
    frozen: Callable[[], Mapping[str, Any]] = dict
    """Returns which weights the state was trained with that it does not have (`trainers.checkpoint.whole.META`)."""

    def save(self, state: TrainState, *, patient: bool = False) -> None:
        """Starts a checkpoint of this state; training may continue at once. With `patient` it waits for a storage that hangs."""
        step = self.info.batch_index
        # First: only after the save in progress has ended is it known whether this step is saved already.
        self.manager.wait_for_save()
        if step == self.manager.last_saved_step:
            return  # a `saving` event here would never be followed by `saved`
        runtime.current().emit({"ev": "saving", "step": step})
        self.manager.save(step, state, {**self.meta(step), **self.data_state.meta(step)}, patient=patient)

    def save_model(self, state: TrainState, *, patient: bool = False) -> None:
        """Starts to save the parameters alone; training may continue at once."""
        step = self.info.batch_index
        manager: Any = self.manager  # not each one can save models: `model_every_steps` asks for it
        manager.save_model(step, state, self.meta(step), patient=patient)

    def begin_trial(self, state: TrainState) -> Callable[[], None]:
        """Begins to try, on host 0, whether such a state can be saved at all. Returns a function that waits for the answer, and
        raises CheckpointError if it cannot; all hosts must call both. `state` may be shapes with shardings."""
        found: Future[str] = Future()
        # A user's own manager need not know.
        try_save = getattr(self.manager, "try_save", None)

        def run(meta: dict[str, Any]) -> None:
            try:
                found.set_result(try_save(state, meta) if try_save is not None else "")
            except BaseException as error:  # a thread's boundary: raised where it is waited for
                found.set_exception(error)

        if jax.process_index() == 0:
            threading.Thread(target=run, args=(self.meta(0),), name="trial save", daemon=True).start()

        def finish() -> None:
            problem = multihost.from_host0("trial save", found.result() if jax.process_index() == 0 else None)
            if problem:
                raise CheckpointError(_unsavable(problem))

        return finish

    def report_saved(self) -> None:
        """Calls `on_save` for each checkpoint that has become complete. Raises CheckpointError if no save can succeed, now or
        later."""
        if problem := getattr(self.manager, "unsavable", ""):
            raise CheckpointError(_unsavable(problem))
        self.callbacks.report_saved(self.info, self.complete)

    def finish(self, last: TrainState | None = None) -> int | None:
        """Waits for the save in progress, and returns the step of the last checkpoint. `last` is the state of the last step, if
        its checkpoint must be there: a save of it that has failed is tried again after each of LAST_SAVE_PAUSES_S, since a
        restart would have to train those steps anew. Raises SaveFailedError if it fails each time."""
        manager, step = self.manager, self.info.batch_index
        # All hosts raise or none: a host that raised alone would leave the others in the next exchange.
        pauses_s = iter(LAST_SAVE_PAUSES_S)
        while not self._ended(last):
            if (pause_s := next(pauses_s, None)) is None:
                why = getattr(manager, "problem", "")
                raise SaveFailedError(
                    f"training is over, but the checkpoint of its last step, {step}, could not be saved{why and f': {why}'}"
                )
            time.sleep(pause_s)
            assert last is not None
            self.save(last, patient=True)
        return multihost.from_host0("last checkpoint", manager.last_saved_step)

    def _ended(self, last: TrainState | None) -> bool:
        """Waits for the save in progress. Returns whether nothing is left to be saved."""
        # Old checkpoints too: the process ends soon, and would leave them half deleted.
        self.manager.wait()
        self.report_saved()
        saved = self.manager.last_saved_step == self.info.batch_index
        return last is None or multihost.every_host("saved at the end", saved)

    def meta(self, batch_index: int) -> dict[str, Any]:
        """Returns the JSON that a checkpoint carries beside the state; `restore` reads it back."""
        return {
            "batch_index": batch_index,
            "seed": self.arguments.seed,
            **self.lineage.meta(batch_index),
            "metrics": self.reporter.latest,
            **self.evaluator.meta(),
            **self.time_used.meta(),
            **({META: frozen} if (frozen := self.frozen()) else {}),
            "rules": going_on.rules_of(self.arguments),
            **recorded_arguments(self.arguments),
        }

    def restore(self, meta: dict[str, Any]) -> None:
        """Restores what `meta` recorded. At the beginning of a run `meta` is empty, and everything is reset. Raises UsageError if
        the run would go on by other rules than it began with."""
        if meta:
            going_on.check_rules(meta, self.arguments)
        self.reporter.latest = meta.get("metrics", {})
        self.evaluator.restore(meta)
        self.data_state.restore(meta)


def _unsavable(problem: str) -> str:
    return f"no checkpoint of this run can be saved, on any storage: {problem}; change the model, or what it records"
