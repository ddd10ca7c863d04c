"""What a trainer may ask of whoever runs it, and tell it. Works alike under the orchestrator and alone.

A trainer of one's own calls `progress`, `stop_requested`, `restore_from` and `saved`; one that calls none of them is watched for
process exit and total time only. One that calls `progress` must go on calling it: a pause longer than
`driver.watchdog.step_floor_s` (60 s), and than `step_factor` median steps, is taken for a hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trainers.runtime.stop_reason import StopReason

Event = dict[str, Any]


class Runtime:
    """One process's side of the conversation. `send` takes an event, a JSON-able dict with "ev" and "t", and must not block."""

    def __init__(
        self,
        send: Callable[[Event], None],
        *,
        restore_from: str | None = None,
        program_key: str | None = None,
        stop_at: int | None = None,
        skip_batches: Sequence[int] = (),
        fence: str | None = None,
        run: str | None = None,
        committed_step: int | None = None,
        driver_term: int = 0,
        generation: int = 0,
        clock: Callable[[], float] = time.time,
    ):
        self.send, self.clock, self.restore_path = send, clock, restore_from
        self.program_key = program_key
        """Names the code that runs: compiled programs are kept for the next generation under it. None: they are not kept."""
        self.stop_at = stop_at
        """The batch index at which to save and stop, the same on all hosts; None: the configuration's limits alone."""
        self.skip_batches = tuple(skip_batches)
        """Batches whose update is not applied, the same on all hosts."""
        self.run, self.committed_step = run, committed_step
        """The run's name in the record beside its checkpoints, and the highest step that it ever committed, as the driver knows:
        a folder that shows less is not the run's, or not there. None: nobody knows, or none yet."""
        self.driver_term, self.generation = driver_term, generation
        """Of two processes that save to one folder, the later driver's, then the later generation's, is in the right. Epochs
        count from 1; 0: nobody drives."""
        self.step = self.batch_index = 0
        """Completed and drawn, and below how long the loop's thread was busy with something other than the device since the loop
        began: for the heartbeat, written by the loop, read by a thread."""
        self.busy_s = 0.0
        self._phase: str | None = None
        self._stop: str | None = None
        self._save_requests = 0
        self.profiling = False
        """Whether the loop records a profile just now."""
        self._profile_request: Event | None = None
        self._fence = fence
        self._obey_fence: Callable[[str | None], None] = lambda path: None
        self._notice: dict[str, Any] | None = None
        self._lock = threading.Lock()

    def emit(self, kind: str, /, **fields: Any) -> None:
        self.send({"t": self.clock(), "ev": kind, **fields})

    def phase(self, name: str) -> None:
        self._phase = name
        self.emit("phase", phase=name)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A phase in the midst of another one, which goes on after it. Of a trainer that tells no phases, none is told."""
        before = self._phase
        if before is not None:
            self.phase(name)
        yield
        if before is not None:
            self.phase(before)

    def note(self, message: str) -> None:
        self.emit("note", message=message)

    def request_stop(self, reason: str) -> None:
        """The first reason stays. Safe in a signal handler."""
        self._stop = self._stop or reason

    def request_save(self) -> None:
        with self._lock:
            self._save_requests += 1

    def request_profile(self, request: Event) -> None:
        """{"id", "steps"}: to record the next steps of this host. The answer is an event, `profile`, with this id."""
        with self._lock:
            busy = self.profiling or self._profile_request is not None
            if not busy:
                self._profile_request = request
        if busy:
            self.emit("profile", id=request["id"], problem="another profile is under way: ask again when it is written")

    def take_profile_request(self) -> Event | None:
        """One that nobody has begun with, once."""
        if self._profile_request is None:
            return None
        with self._lock:
            request, self._profile_request = self._profile_request, None
            self.profiling = True
        return request

    def notice(self, reason: str, deadline_s: float | None = None) -> None:
        """The machine is about to go away: all hosts are to save and stop. Safe in a signal handler, so it sends nothing itself:
        the heartbeat's thread does."""
        self._notice = self._notice or {"reason": reason, "deadline_s": deadline_s}
        self.request_stop(StopReason.PREEMPTED)

    def take_notice(self) -> dict[str, Any] | None:
        """A notice that was not told yet, once."""
        notice, self._notice = self._notice, None
        return notice

    def fence(self, path: str | None) -> None:
        """If `path` exists, another driver has the run: no checkpoint may be committed any more."""
        with self._lock:
            self._fence = path
            self._obey_fence(path)

    def follow_fence(self, read_commands: Callable[[str | None], None]) -> None:
        """Calls `read_commands` with the fence that holds now, and again whenever there is another one."""
        with self._lock:
            self._obey_fence = read_commands
            read_commands(self._fence)

    @property
    def stop_reason(self) -> str | None:
        return self._stop

    @property
    def save_requests(self) -> int:
        return self._save_requests


_current = Runtime(lambda event: None)


def current() -> Runtime:
    return _current


def install(runtime: Runtime) -> None:
    """Makes `runtime` this process's; called once by the process's main."""
    global _current  # noqa: PLW0603 - one process, one conversation
    _current = runtime


def progress(step: int, metrics: Mapping[str, float] | None = None) -> None:
    """Tells that `step` optimizer steps are complete, and any metrics of it. Cheap: call it every step."""
    if _current.step == 0 and step > 0:
        _current.emit("first_step", step=step)
    _current.step = _current.batch_index = step
    if metrics:
        _current.emit("metrics", step=step, metrics=dict(metrics))


def stop_requested() -> bool:
    """Whether this host was asked to stop. With several hosts, agree on it (`trainers.runtime.multihost`) before acting."""
    return _current.stop_reason is not None


def restore_from() -> str | None:
    """The path last given to `saved` by an earlier generation, or None."""
    return _current.restore_path


def saved(step: int, path: str) -> None:
    """Tells that a checkpoint is complete and may be given to `restore_from` after a failure. Call it on host 0."""
    _current.emit("saved", step=step, path=path)
