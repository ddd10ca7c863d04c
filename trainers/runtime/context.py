"""What a trainer may report to, and ask of, the process that runs it. Works alike under the orchestrator and alone.

A user's own trainer calls `progress`, `stop_requested`, `restore_from` and `saved`. A trainer that calls none of them is
watched for three things: the exit of its process, the run's `time_limit`, and silence. A gang none of whose processes has sent an
event or printed a line for `driver.watchdog.silent_s` (an hour) counts as hung. A trainer that calls `progress` must keep calling
it: a pause longer than `driver.watchdog.step_floor_s` (60 s), and than `step_factor` median steps, counts as a hang.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

from gangway.stop_reason import StopReason
from gangway.text import cut
from gangway.wire.events import Event, MachineTakenAway, problem_of
from gangway.wire.limits import RETRY_FOR_S
from gangway.wire.orders import Profile

MAX_VALUES = 10_000
"""Arrays with more values are no part of an event."""


def plain(value: Any) -> Any:
    """Returns the value as JSON can hold it: scalars of NumPy and JAX become numbers, paths text, tuples and sets lists. An array
    on a device is waited for. Raises TypeError for what is none of these, and what an array raises that cannot be read here."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {key if type(key) is str else str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return _of_scalar(value)


def number(value: Any) -> float | int:
    """Returns a number for one, or for an array with one value. Raises TypeError for anything else."""
    found = plain(value)
    if isinstance(found, list) and len(found) == 1:
        return number(found[0])
    if not isinstance(found, int | float):
        raise TypeError(f"{type(value).__name__} is no number")
    return int(found) if isinstance(found, bool) else found


def whole_number(value: Any) -> int:
    """Returns an integer for one, or for a number that is one. Raises TypeError for anything else."""
    found = number(value)
    if isinstance(found, float) and not found.is_integer():
        raise TypeError(f"{found} is no integer")
    return int(found)


def _of_scalar(value: Any) -> Any:
    if isinstance(value, Enum):
        return plain(value.value)
    # Subclasses, such as numpy.float64.
    if (kind := next((kind for kind in (str, int, float) if isinstance(value, kind)), None)) is not None:
        return kind(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else _of_array(value)


def _of_array(value: Any) -> Any:
    size, as_list = getattr(value, "size", None), getattr(value, "tolist", None)
    if not isinstance(size, int) or not callable(as_list):
        raise TypeError(f"{type(value).__name__} is nothing that JSON can hold")
    if size > MAX_VALUES:
        raise TypeError(f"{type(value).__name__} of {size} values: at most {MAX_VALUES} are passed on")
    found = as_list()
    # A scalar of another library, such as one of bfloat16.
    return float(found) if type(found) not in (bool, int, float, str, list) and hasattr(found, "__float__") else plain(found)


MAX_ODD, MAX_ODD_TEXT = 20, 300
"""How many mistakes in reports are reported, and how many letters of each."""


class SnapshotFiles(NamedTuple):
    """The memory that the agent keeps when this process dies, as descriptors of files."""

    own: tuple[int, ...]
    kept: tuple[int, ...]
    """What earlier processes of this host have left."""


class Runtime:
    """One process's side of the channel to its agent. `send` takes an event, a dict that JSON can hold, and must not block."""

    def __init__(
        self,
        send: Callable[[Event], None],
        *,
        restore_from: str | None = None,
        program_key: str | None = None,
        stop_at: int | None = None,
        skip_batches: Sequence[int] = (),
        committed_step: int | None = None,
        driver_term: int = 0,
        generation: int = 0,
        time_used_s: float = 0.0,
        retry_for_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self.send, self.clock, self.restore_path = send, clock, restore_from
        self.program_key = program_key
        """The name of the code that runs: compiled programs are kept for the next generation under it. None: they are not kept.
        """
        self.stop_at = stop_at
        """The batch index at which to save and stop, the same on all hosts; None: the configuration's limits alone."""
        self.skip_batches = tuple(skip_batches)
        """Batches whose update is not applied, the same on all hosts."""
        self.committed_step = committed_step
        """The highest step that the run ever committed, as the driver knows it. A folder that shows less belongs to another run,
        or the storage is missing. None: not known, or none yet."""
        self.driver_term, self.generation = driver_term, generation
        """Of two processes that save to one folder, the one of the later driver, then of the later generation, is right. Terms
        count from 1; 0: no driver."""
        self.time_used_s = time_used_s
        """The seconds of the `time_limit` that the run had used when this process got its orders, as the driver knows them. The
        same on all hosts."""
        self.retry_for_s = RETRY_FOR_S if retry_for_s is None else retry_for_s
        """How long a state is held that the storage does not take (`driver.restart.retry_for_s`)."""
        self.snapshot_files: SnapshotFiles | None = None
        """None: there is no agent that would keep snapshots."""
        self.snapshots_since = 0
        """The oldest generation whose snapshots may be gone on from."""
        self.step = self.batch_index = 0
        """The steps completed and the batches drawn, and below, how many seconds the loop's thread has worked since the loop
        began, other than waiting for the device. The loop writes them, the heartbeat's thread reads them."""
        self.busy_s = 0.0
        self.at_step = 0
        """The step that the loop's thread works at: that of an error which it raises. Ahead of `step` by the steps in flight."""
        self.usage: dict[str, float] = {}
        """How much of its machine this host used at the last publish (`trainers.metrics.host_usage`); empty before the first.
        """
        self.evaluated_batches = 0
        """The batches of evaluations so far. An evaluation writes it, the heartbeat's thread reads it."""
        self._phase: str | None = None
        self._stop: str | None = None
        self._asked: str | None = None
        """Why the training itself, or a signal to it alone, asked for its end. Apart from `_stop`: it ends with that training
        (`training_ended`), and a signal that came after it must not."""
        self._save_requests = self._handled_saves = 0
        self.profiling = False
        """Whether the loop is recording a profile."""
        self._profile_request: Profile | None = None
        self._on_taken_over: Callable[[int], None] = lambda driver_term: None
        self._notice: MachineTakenAway | None = None
        self._lock = threading.Lock()
        self._odd: set[str] = set()

    def emit(self, event: Event) -> None:
        """Sends `event` with the time. Any thread may call this; it does not block, unless the event has an array of a device,
        which is waited for. An event that is none of `gangway.wire.events` is not sent: a note says what is wrong with it."""
        try:
            converted = plain({"t": self.clock(), **event})
            problem = problem_of(converted)
        except Exception as error:  # of an array that cannot be read here, or a value of the user's own
            problem = f"{type(error).__name__}: {error}"
        if problem:
            self.tell_odd(f"{event.get('ev')!r}: {problem}")
        else:
            self.send(converted)

    def tell_odd(self, what: str) -> None:
        """Says, once for each kind of mistake, that something that was reported cannot be passed on."""
        kind = re.sub(r"[\d.]+", "0", what)
        if kind not in self._odd and len(self._odd) < MAX_ODD:
            self._odd.add(kind)
            self.note(f"not passed on: {what[:MAX_ODD_TEXT]}; training goes on, and the next ones like it are not reported")

    def phase(self, name: str) -> None:
        self._phase = name
        self.emit({"ev": "phase", "phase": name})

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Enters a phase inside another one, which continues after it. If the trainer reports no phases, none is reported."""
        before = self._phase
        if before is not None:
            self.phase(name)
        # No `finally`: after an error the phase in which it happened stays the present one.
        yield
        if before is not None:
            self.phase(before)

    def note(self, message: str) -> None:
        """Shows a message on the console of the run."""
        self.emit({"ev": "note", "message": cut(message)})

    def request_stop(self, reason: str, *, of_training: bool = False) -> None:
        """Asks for a stop; the first reason, one of `StopReason`, stays. Safe in a signal handler. `of_training`: the request
        ends with the present training, as one of reason `requested` always does."""
        # No lock: the handler may interrupt this very thread while it holds one.
        if reason != StopReason.REQUESTED and not of_training:
            self._stop = self._stop or reason
        elif self._stop is None:
            self._asked = self._asked or reason

    def training_ended(self) -> None:
        """Must be called at the end of each training. A stop that the training itself asked for (`requested`) is done with; a
        signal, a notice or an order is for the whole process, and ends a later training too. Requests to save are done with."""
        self._asked = None
        self.take_save_requests()

    def request_save(self) -> None:
        """Asks for a checkpoint after the present step."""
        with self._lock:
            self._save_requests += 1

    def take_save_requests(self) -> bool:
        """Returns whether a save was requested since the last call: each request counts once in the life of the process."""
        # No lock: every step asks, and a signal handler that requests one may interrupt it.
        requests = self._save_requests
        new, self._handled_saves = requests > self._handled_saves, requests
        return new

    def request_profile(self, request: Profile) -> None:
        """Asks to record the next steps of this host. The answer is an event, `profile`, with this id."""
        with self._lock:
            busy = self.profiling or self._profile_request is not None
            if not busy:
                self._profile_request = request
        if busy:
            problem = "another profile is under way: ask again when it is written"
            self.emit({"ev": "profile", "id": request["id"], "problem": problem})

    def take_profile_request(self) -> Profile | None:
        """Returns a request that was not handled yet; each only once."""
        # First without the lock: this is asked at every step, and there is hardly ever a request.
        if self._profile_request is None:
            return None
        with self._lock:
            request, self._profile_request = self._profile_request, None
            # Under the lock: no second request is accepted between this one and its trace.
            self.profiling = True
        return request

    def notice(self, reason: str, deadline_s: float | None = None) -> None:
        """Reports that the machine is about to go away: all hosts save and stop. Safe in a signal handler, so it sends nothing
        itself; the heartbeat's thread does."""
        self._notice = self._notice or {"reason": reason, "deadline_s": deadline_s}
        self.request_stop(StopReason.PREEMPTED)

    def take_notice(self) -> MachineTakenAway | None:
        """Returns a notice that was not sent yet; each only once."""
        notice, self._notice = self._notice, None
        return notice

    def taken_over(self, driver_term: int) -> None:
        """The driver of this term has taken the gang over."""
        with self._lock:
            self.driver_term = driver_term
            # Under the lock: a follower must not get an older term after a newer one.
            self._on_taken_over(driver_term)

    def follow_driver(self, on_taken_over: Callable[[int], None]) -> None:
        """Calls `on_taken_over` with the term of the present driver, and again when another one takes the gang over."""
        with self._lock:
            self._on_taken_over = on_taken_over
            on_taken_over(self.driver_term)

    @property
    def stop_reason(self) -> str | None:
        """Why training is asked to stop; None if it is not."""
        return self._asked or self._stop


_current = Runtime(lambda event: None)


def current() -> Runtime:
    return _current


def install(runtime: Runtime) -> None:
    """Makes `runtime` this process's; called once by the process's main."""
    global _current  # noqa: PLW0603 - one process, one conversation
    _current = runtime


def progress(step: int, metrics: Mapping[str, float] | None = None, **more: float) -> None:
    """Reports that `step` optimizer steps are complete, and optionally their metrics, in a mapping or by name, such as
    `progress(3, loss=loss)`. Cheap: call it every step.

    Numbers may be scalars of NumPy or JAX; one on a device is waited for. What is no number is left out, and a note says so once.
    """
    try:
        step = whole_number(step)
        named = {**(metrics or {}), **more}
    except Exception as error:  # a mistake in a report is no failure of the training
        _current.tell_odd(f"progress({step!r}, ...): {error}")
        return
    if _current.step == 0 and step > 0:
        _current.emit({"ev": "first_step", "step": step})
    _current.step = _current.batch_index = _current.at_step = step
    if numbers := _numbers(named):
        _current.emit({"ev": "metrics", "step": step, "metrics": numbers})


def _numbers(metrics: Mapping[Any, Any]) -> dict[str, float]:
    found = {}
    for name, value in metrics.items():
        try:
            found[str(name)] = number(value)
        except Exception as error:  # an array of other hosts' devices, a value of the user's own
            _current.tell_odd(f"progress(..., {name}=...): {type(error).__name__}: {error}")
    return found


def request_stop(why: str) -> None:
    """Asks for the end of training: all hosts stop at one step and save, and the run ends as `requested`. One host is enough.
    `BaseTrainer.train` clears the request at its end. `why` is a sentence for people."""
    if _current.stop_reason is None:
        _current.note(f"training is asked to stop: {why}")
    _current.request_stop(StopReason.REQUESTED)


def stop_requested() -> bool:
    """Whether this host was asked to stop. With several hosts, agree on it (`trainers.runtime.multihost`) before acting."""
    return _current.stop_reason is not None


def restore_from() -> str | None:
    """Returns the path last given to `saved` by an earlier generation, or None."""
    return _current.restore_path


def saved(step: int, path: str | os.PathLike[str]) -> None:
    """Reports that a checkpoint is complete and may be given to `restore_from` after a failure. Call it on host 0."""
    try:
        _current.emit({"ev": "saved", "step": whole_number(step), "path": os.fspath(path)})
    except Exception as error:  # a mistake in a report is no failure of the training
        _current.tell_odd(f"saved({step!r}, {path!r}): {error}")
