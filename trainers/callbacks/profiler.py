"""Records what hosts and devices do in a window of steps, on schedule and on demand, for XProf and TensorBoard.

Nothing waits for it: a trace is ended when the loop knows that its last step is complete, and written by a thread of its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from dataclasses import dataclass, replace
from typing import Any

import jax

from trainers import runtime
from trainers.callbacks.callback import Callback, RunInfo
from trainers.config import ProfileConfig
from trainers.step.host_flags import RUN_AHEAD_STEPS


@dataclass(frozen=True)
class Trace:
    """What is being recorded. Steps are batch indices."""

    folder: str
    first: int
    last: int
    request: str | None = None
    """Whose it is; None: on schedule."""
    thrown_away: bool = False


class Profiler(Callback):
    """Each host decides for itself: a trace is nobody else's business."""

    def __init__(self, config: ProfileConfig, folder: str):
        self.config = config
        self.folder = folder if "://" in folder else os.path.abspath(folder)
        self._trace: Trace | None = None
        self._writer: threading.Thread | None = None
        self._steps = 0
        """That this process has begun."""

    def on_step_begin(self, state: RunInfo, **kwargs: Any) -> None:
        due = self.due(self._steps)
        self._steps += 1
        if due == "warm up":
            self._begin(Trace(tempfile.mkdtemp(prefix="profile-"), state.batch_index, state.batch_index, thrown_away=True))
        elif due == "record":
            self._throw_away()
            last = state.batch_index + (self.config.record_steps or 1) - 1
            self._begin(Trace(self._folder_of(state), state.batch_index, last))
        elif self._trace is None and (wanted := runtime.current().take_profile_request()) is not None:
            last = state.batch_index + wanted["steps"] - 1
            self._begin(Trace(self._folder_of(state), state.batch_index, last, wanted["id"]))

    def on_step_end(self, state: RunInfo, **kwargs: Any) -> None:
        trace = self._trace
        if trace is None or trace.thrown_away or self._writer is not None:
            return
        if state.global_step - RUN_AHEAD_STEPS > trace.last:
            # A big trace takes minutes to write: its host must not seem to hang, nor the others who would wait for it.
            self._writer = threading.Thread(target=self._end, name="profile", daemon=True)
            self._writer.start()

    def on_train_end(self, state: RunInfo, **kwargs: Any) -> None:
        self._throw_away()
        if (writer := self._writer) is not None:
            writer.join()
        elif (trace := self._trace) is not None:
            self._trace = replace(trace, last=min(trace.last, state.batch_index - 1))
            self._end()

    def due(self, step: int) -> str | None:
        """What begins with a step of this process, counted from 0, by the schedule: `warm up`, `record`, or nothing."""
        config = self.config
        if config.record_steps is None or jax.process_index() not in config.hosts or step < config.skip_steps:
            return None
        number, place = divmod(step - config.skip_steps, config.wait_steps + config.warmup_steps + config.record_steps)
        if number >= config.repeat:
            return None
        if place == config.wait_steps + config.warmup_steps:
            return "record"
        return "warm up" if place == config.wait_steps else None

    def _folder_of(self, state: RunInfo) -> str:
        """One for each host and window: hosts that share a machine would write over each other's file."""
        return f"{self.folder}/step-{state.batch_index:08d}/host-{jax.process_index():04d}"

    def _begin(self, trace: Trace) -> None:
        if self._trace is not None:
            self._tell(trace, "another profile was under way")
            return
        self._trace = trace
        runtime.current().profiling = True
        try:
            if "://" not in trace.folder:
                os.makedirs(trace.folder, exist_ok=True)  # before, not after: JAX traces no more once it could not write
            jax.profiler.start_trace(trace.folder)
        except Exception as error:  # a look at the run is never a reason to end it
            self._over(trace, f"it could not be started: {error}")

    def _end(self) -> None:
        if (trace := self._trace) is None:
            return
        problem = None
        try:
            jax.profiler.stop_trace()
        except Exception as error:  # as above: the disk may be full
            problem = f"it could not be written: {error}"
        self._over(trace, problem)

    def _throw_away(self) -> None:
        if (trace := self._trace) is not None and trace.thrown_away:
            self._end()

    def _over(self, trace: Trace, problem: str | None) -> None:
        self._trace = self._writer = None
        runtime.current().profiling = False
        if trace.thrown_away:
            shutil.rmtree(trace.folder, ignore_errors=True)
        if problem or not trace.thrown_away:
            self._tell(trace, problem)

    def _tell(self, trace: Trace, problem: str | None) -> None:
        about = {"id": trace.request, "first_step": trace.first + 1, "last_step": trace.last + 1}
        runtime.current().emit("profile", **about, path=trace.folder, problem=problem)
