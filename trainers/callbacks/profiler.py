"""Records what hosts and devices do in a window of steps, on schedule and on demand, for XProf and TensorBoard.

Training does not wait for it: a trace ends when the loop knows that its last step is complete, and a thread of its own writes
it. For a run in a bucket it writes it to a temporary folder, and puts the files into the bucket.
"""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from gangway.storage import durable, ours
from gangway.storage.documents import is_url
from gangway.storage.opening import place_of
from gangway.wire.events import Profile
from trainers import runtime
from trainers.callbacks.callback import Callback, RunInfo
from trainers.config import ProfileConfig
from trainers.step.host_flags import RUN_AHEAD_STEPS


@dataclass(frozen=True)
class Trace:
    """A recording in progress. Steps are batch indices."""

    folder: str | None
    """Where the profile shall be in the end; None: it warms up, and is thrown away."""
    work: str
    """Where JAX writes it: the same, or a temporary folder."""
    first: int
    last: int
    request: str | None = None
    """The id of the request; None: on schedule."""

    @property
    def is_temporary(self) -> bool:
        return self.work != self.folder


class Profiler(Callback):
    """Records profiles on this host. Each host decides by itself: a trace does not concern the others."""

    def __init__(self, config: ProfileConfig, folder: str):
        self.config = config
        self.folder = folder if is_url(folder) else os.path.abspath(folder)
        self._trace: Trace | None = None
        self._writer: threading.Thread | None = None
        self._steps = 0
        """The number of steps that this process has begun."""

    def on_step_begin(self, state: RunInfo, **kwargs: Any) -> None:
        due = self.due(self._steps)
        self._steps += 1
        if due == "warm up":
            self._begin(None, state.batch_index, state.batch_index)
        elif due == "record":
            self._end_warmup()
            last = state.batch_index + (self.config.record_steps or 1) - 1
            self._begin(self._folder_of(state), state.batch_index, last)
        # Only without a trace in progress: a request is taken once, and would be lost.
        elif self._trace is None and (request := runtime.current().take_profile_request()) is not None:
            last = state.batch_index + request["steps"] - 1
            self._begin(self._folder_of(state), state.batch_index, last, request["id"])

    def on_step_end(self, state: RunInfo, **kwargs: Any) -> None:
        trace = self._trace
        if trace is None or trace.folder is None or self._writer is not None:
            return
        # Only now is the last step of the trace complete: later ones may still be in flight.
        if state.global_step - RUN_AHEAD_STEPS > trace.last:
            # Writing a big trace takes minutes: on this thread the host, and all that wait for it, would seem to hang.
            self._writer = threading.Thread(target=self._end, name="profile", daemon=True)
            self._writer.start()

    def on_train_end(self, state: RunInfo, **kwargs: Any) -> None:
        self._end_warmup()
        if (writer := self._writer) is not None:
            writer.join()
        elif (trace := self._trace) is not None:
            self._trace = replace(trace, last=min(trace.last, state.batch_index - 1))
            self._end()

    def due(self, step: int) -> str | None:
        """Returns what the schedule begins with a step of this process, counted from 0: `warm up`, `record`, or None."""
        config = self.config
        if config.record_steps is None or jax.process_index() not in config.hosts or step < config.skip_steps:
            return None
        number, position = divmod(step - config.skip_steps, config.wait_steps + config.warmup_steps + config.record_steps)
        if number >= config.repeat:
            return None
        if position == config.wait_steps + config.warmup_steps:
            return "record"
        return "warm up" if position == config.wait_steps else None

    def _folder_of(self, state: RunInfo) -> str:
        """Returns a folder for each host and window: hosts that share a machine would overwrite each other's file."""
        return f"{self.folder}/step-{state.batch_index:08d}/host-{jax.process_index():04d}"

    def _begin(self, folder: str | None, first: int, last: int, request: str | None = None) -> None:
        if self._trace is not None:
            assert folder is not None
            self._report(Trace(folder, folder, first, last, request), "another profile was under way")
            return
        runtime.current().profiling = True
        self._trace = trace = Trace(folder, folder or "", first, last, request)
        try:
            if folder is None or is_url(folder):
                self._trace = trace = replace(trace, work=tempfile.mkdtemp(prefix="profile-"))
            durable.make_folder(trace.work)  # before the start: once JAX could not write, it never traces again
            jax.profiler.start_trace(trace.work)
        except Exception as error:  # a profile that fails must not end the run
            self._over(trace, f"it could not be started: {error}")

    def _end(self) -> None:
        if (trace := self._trace) is None:
            return
        problem = None
        try:
            jax.profiler.stop_trace()
            if trace.folder is not None and trace.is_temporary:
                put(Path(trace.work), trace.folder)
        except Exception as error:  # as above: the disk may be full
            problem = f"it could not be written: {error}"
        self._over(trace, problem)

    def _end_warmup(self) -> None:
        if (trace := self._trace) is not None and trace.folder is None:
            self._end()

    def _over(self, trace: Trace, problem: str | None) -> None:
        self._trace = self._writer = None
        runtime.current().profiling = False
        if trace.is_temporary:
            with suppress(OSError):  # it is in a folder for temporary files
                ours.delete(trace.work, ours.TEMPORARY_FOLDER)
        if problem or trace.folder is not None:
            self._report(trace, problem)

    def _report(self, trace: Trace, problem: str | None) -> None:
        event: Profile = {"ev": "profile", "id": trace.request, "problem": problem, "path": trace.folder or trace.work}
        runtime.current().emit({**event, "first_step": trace.first + 1, "last_step": trace.last + 1})


def put(folder: Path, url: str) -> None:
    """Puts the files of a folder into a bucket, under their paths in it. Raises OSError."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        place = place_of(url) / path.relative_to(folder).as_posix()
        place.store.upload(place.key, path)
