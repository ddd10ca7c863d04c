"""Saves the checkpoints of a run: the state, and the JSON that a later process needs to continue from it."""

from __future__ import annotations

import collections
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from gangway.errors import CheckpointError, SaveFailedError
from gangway.stop_reason import StopReason
from trainers import runtime
from trainers.callbacks import CallbackList, RunInfo
from trainers.checkpoint.weights import META
from trainers.loop.evaluator import Evaluator
from trainers.loop.lineage import Lineage
from trainers.loop.metrics_reporter import MetricsReporter
from trainers.protocol import CheckpointManagerProtocol
from trainers.runtime import multihost
from trainers.step.state import TrainState

TIME_USED = "time_used_s"
"""The key in a checkpoint's meta."""


@dataclass
class TimeUsed:
    """Counts on from what the driver knows, or from what the checkpoint of an earlier process recorded, if that is more."""

    before_s: float = 0.0
    """The seconds that earlier processes have used."""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self):
        self._began_s = self.clock()

    def resume(self, meta: Mapping[str, Any]) -> None:
        """Takes what the checkpoint that this process starts with has recorded. Not for a rollback: it gives no time back."""
        # The greater one: a run that trained alone may go on under a driver, which then knows less.
        self.before_s = max(self.before_s, meta.get(TIME_USED, 0.0))

    def meta(self) -> dict[str, float]:
        return {TIME_USED: self.before_s + self.clock() - self._began_s}

    def deadline_s(self, limit_s: float) -> float:
        """Returns when the limit will have passed, on `clock`."""
        return self._began_s + limit_s - self.before_s


KEY = "data_state"
"""The key in the meta of a checkpoint."""


@dataclass
class DataState:
    """The states of the streams of all hosts. `loader` is that of the training. All hosts must call its methods alike."""

    loader: Any
    global_batch_size: int
    note: Callable[[str], None]
    """Tells something, on host 0 alone."""

    def meta(self, batch_index: int) -> dict[str, Any]:
        """Returns what a checkpoint at `batch_index` has of the data, on host 0; empty if the data has no state."""
        if not getattr(self.loader, "is_stream", False):
            return {}
        # Asked of every stream, with a state or without one: a host that did not take part would leave the others waiting.
        states = multihost.to_host0("data state", self.loader.state_at(batch_index))
        if states is None or None in states:
            return {}
        same = all(state == states[0] for state in states)
        about = {"num_hosts": len(states), "global_batch_size": self.global_batch_size}
        return {KEY: {**about, "states": states[:1] if same else states}}

    def of_this_host(self, batch_index: int) -> dict[str, Any]:
        """Returns what a snapshot has of the data: that of this host alone."""
        state = self.loader.state_at(batch_index) if getattr(self.loader, "is_stream", False) else None
        about = {"num_hosts": jax.process_count(), "global_batch_size": self.global_batch_size}
        return {} if state is None else {KEY: {**about, "states": [state]}}

    def restore(self, meta: Mapping[str, Any]) -> None:
        """Sets the streams as `meta` has recorded them. If the gang or the batches are others now, they are not set: then the
        data is read again up to its position, which a note tells."""
        recorded = meta.get(KEY)
        if recorded is None or not getattr(self.loader, "is_stream", False):
            return
        if problem := self._problem(recorded):
            self.note(f"the state of the data was not used: {problem}; the data is read again up to its position")
            return
        states = recorded["states"]
        self.loader.remember(meta["batch_index"], states[0] if len(states) == 1 else states[jax.process_index()])

    def _problem(self, recorded: Mapping[str, Any]) -> str:
        """Returns why the recorded states do not fit; empty if they do. The same on all hosts."""
        saved_by, hosts = recorded["num_hosts"], jax.process_count()
        # Of a stream that every host reads as a whole, one state is that of any number of hosts.
        one_for_all = self.loader.is_shared and len(recorded["states"]) == 1
        if saved_by != hosts and not one_for_all:
            return f"it was saved by {saved_by} host{'s' if saved_by > 1 else ''}, and the run has {hosts} now"
        if recorded["global_batch_size"] != self.global_batch_size:
            return f"it is of batches of {recorded['global_batch_size']}, and global_batch_size is {self.global_batch_size} now"
        return ""


FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a further try to save a state that is held; it doubles each time. What had no room is tried as soon as it has."""
LOOK_EVERY_S, TELL_EVERY_S = 2.0, 60.0
BY_A_PERSON = (StopReason.INTERRUPTED, StopReason.TERMINATED, StopReason.REQUESTED, StopReason.HEAD_LOST)
"""Stop requests that end a wait. If its machine is to be taken away, the state is held as long as it is there."""
LIMIT = "driver.restart.retry_for_s"


class Held:
    """A state that is held until the storage takes it. All hosts must call its methods alike.

    `what` and `at_stake` are for people: what waits, and what is lost if it never succeeds. `no_room` is that of the manager.
    `stopped`: for this reason it is to be saved, and so does not end the wait."""

    def __init__(self, what: str, at_stake: str, no_room: Callable[[], str], stopped: str | None = None):
        self._what, self._at_stake, self._no_room, self._stopped = what, at_stake, no_room, stopped
        self._host, self._clock = runtime.current(), time.monotonic
        self._end_s, self._pause_s, self._told_s = self._clock() + self._host.retry_for_s, FIRST_PAUSE_S, -math.inf

    def wait(self, problem: str) -> None:
        """Returns when the next try may succeed. `problem` is why the last one failed. Raises SaveFailedError, on all hosts, at
        the end of the limit, and when a person asks for a stop."""
        self._host.phase("hold")
        due_s, was_full = self._clock() + self._pause_s, False
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        while True:
            full, now_s = self._no_room(), self._clock()
            # Each host has a clock of its own, and a signal may reach one alone.
            answers = multihost.all_hosts("held state", [self._stop(), now_s >= self._end_s, now_s >= due_s])
            stop = max(answer[0] for answer in answers)
            is_over, is_due = any(answer[1] for answer in answers), all(answer[2] for answer in answers)
            if not full and (was_full or (is_due and not is_over and not stop)):
                return
            if stop or is_over:
                how = f"stopped on request ({stop})" if stop else f"tried for {self._host.retry_for_s:g} s ({LIMIT})"
                raise SaveFailedError(f"{self._what}: {full or problem}; {how}; {self._at_stake}")
            if now_s - self._told_s >= TELL_EVERY_S:
                self._told_s = now_s
                left = f"tried again for {max(0.0, self._end_s - now_s):.0f} s ({LIMIT}), and goes on by itself"
                multihost.note_from_host0(f"{self._what} yet: {full or problem}; {left}")
            was_full = bool(full)
            time.sleep(LOOK_EVERY_S if full else min(LOOK_EVERY_S, max(0.05, due_s - now_s)))

    def _stop(self) -> str:
        reason = self._host.stop_reason
        return str(reason) if reason in BY_A_PERSON and reason != self._stopped else ""


@dataclass
class Saver:
    """All hosts must call its methods alike."""

    manager: CheckpointManagerProtocol
    seed: int
    recorded: Mapping[str, Any]
    """The settings, as a checkpoint records them (`trainers.config.arguments.recorded_arguments`)."""
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
    """Returns which weights the state was trained with that it does not have (`trainers.checkpoint.weights.META`)."""
    learned: Callable[[], Mapping[str, Any]] = dict
    """Returns what the run learns from (`trainers.data.identity.KEY`)."""

    def save(self, state: TrainState, *, patient: bool = False) -> None:
        """Starts a checkpoint of this state; training may continue at once. With `patient` it waits for a storage that hangs."""
        step = self.info.batch_index
        # First: only after the save in progress has ended is it known whether this step is saved already.
        self.manager.wait_for_save()
        if step == self.manager.last_saved_step:
            return  # a `saving` event here would never be followed by `saved`
        runtime.current().emit({"ev": "saving", "step": step})
        self.manager.save(step, state, {**self.meta(step), **self.learned(), **self.data_state.meta(step)}, patient=patient)

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
        its checkpoint must be there: it is held, and a save of it that has failed is tried again, since a restart would have to
        train those steps anew. Raises SaveFailedError if the storage does not take it in time."""
        manager, held, stopped = self.manager, None, runtime.current().stop_reason
        # All hosts raise or none: a host that raised alone would leave the others in the next exchange.
        while not self._ended(last):
            assert last is not None
            what = f"training is over, but the checkpoint of its last step, {self.info.batch_index}, could not be saved"
            if gone := _asked(manager, "overtaken"):
                raise SaveFailedError(f"{what}: {gone}; {self._at_stake()}")
            held = held or Held(what, self._at_stake(), partial(_asked, manager, "no_room", last), stopped)
            held.wait(getattr(manager, "problem", "") or "the save failed")
            runtime.current().phase("save")
            self.save(last, patient=True)
        return multihost.from_host0("last checkpoint", manager.last_saved_step)

    def wait_for_room(self, state: TrainState) -> None:
        """Before the first step: returns when the storage has room for a checkpoint. `state` may be shapes. Raises
        SaveFailedError if it has none in time."""
        no_room = partial(_asked, self.manager, "no_room", state)
        if problem := no_room():
            what = f"step {self.info.batch_index + 1} is not trained, for no checkpoint could be saved"
            Held(what, "nothing is lost; make room, and run the same command again", no_room).wait(problem)

    def _at_stake(self) -> str:
        step, saved = self.info.batch_index, self.manager.last_saved_step
        kept, lost = "nothing is saved" if saved is None else f"saved is step {saved}", step - (saved or 0)
        return f"{kept}, and {lost} step{'' if lost == 1 else 's'} are lost; make room, and run the same command again"

    def _ended(self, last: TrainState | None) -> bool:
        """Waits for the save in progress. Returns whether nothing is left to be saved."""
        # Old checkpoints too: the process ends soon, and would leave them half deleted.
        self.manager.wait()
        self.report_saved()
        saved = self.manager.last_saved_step == self.info.batch_index
        return last is None or multihost.every_host("saved at the end", saved)

    def meta(self, batch_index: int) -> dict[str, Any]:
        """Returns the JSON that a checkpoint carries beside the state; `restore` reads it back."""
        return {**self.so_far(batch_index), **self.recorded}

    def of_snapshot(self, batch_index: int) -> dict[str, Any]:
        """Returns what a snapshot carries beside the state, but for the data and what never changes."""
        return {**self.so_far(batch_index), **self.learned(), "not_finite": dict(getattr(self.manager, "not_finite", {}))}

    def so_far(self, batch_index: int) -> dict[str, Any]:
        """Returns the part of it that changes in the course of a run."""
        return {
            "batch_index": batch_index,
            "seed": self.seed,
            **self.lineage.meta(batch_index),
            "metrics": self.reporter.latest,
            **self.evaluator.meta(),
            **self.time_used.meta(),
            **({META: frozen} if (frozen := self.frozen()) else {}),
        }

    def restore(self, meta: dict[str, Any]) -> None:
        """Restores what `meta` recorded. At the beginning of a run `meta` is empty, and everything is reset."""
        self.reporter.latest = meta.get("metrics", {})
        self.evaluator.restore(meta)
        self.data_state.restore(meta)


def _asked(manager: Any, question: str, *about: Any) -> str:
    """Returns the answer of a method that a user's own manager need not have; empty without one."""
    method = getattr(manager, question, None)
    return "" if method is None else method(*about)


def _unsavable(problem: str) -> str:
    return f"no checkpoint of this run can be saved, on any storage: {problem}; change the model, or what it records"
