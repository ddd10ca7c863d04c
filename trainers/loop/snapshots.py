"""Snapshots of the state in the memory of the hosts (`snapshot.every_steps`): which steps have one, and going on from one.

    step k is due     the next step leaves its state as it is; a thread copies that state meanwhile
    k is complete     what a checkpoint of step k would record is added: the snapshot is whole on this host
    a step later      each host says by the flags of the step which is its newest; the step tells all hosts the least of them
    then              the snapshot is whole on every host: the slots of older ones may be written again

All hosts decide alike, by the settings and by what the steps tell. So after a failure they have one in common: a slot is written
only while another one has a snapshot that is known to be whole on every host.
"""

from __future__ import annotations

import collections
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from gangway.errors import UsageError
from trainers import runtime
from trainers.checkpoint.restorer import Accept, Restored
from trainers.checkpoint.slots import Refused, Snapshot, Writer, num_bytes_of, table_of, views_of
from trainers.config import SnapshotConfig
from trainers.loop.hooks import Hooks, overrides
from trainers.loop.saver import KEY
from trainers.metrics.host_usage import bytes_available
from trainers.runtime import multihost
from trainers.runtime.executables import Program
from trainers.step.state import TrainState

MOST_BYTES = 256e6
"""More than two slots are used only if they have no more than this together."""
MIN_SLOTS = 2
NOT_READY = -1
EXCHANGE_S = 60.0
"""How long the hosts wait for each other to say which snapshots they have."""


@dataclass
class _Job:
    """A snapshot that is not whole yet. The loop and the thread that copies both have it."""

    number: int
    step: int
    state: TrainState | None
    """None: it is copied, or there is nothing to copy."""
    data: Mapping[str, Any]
    told: str | None = None
    copied: threading.Event = field(default_factory=threading.Event)
    decided: threading.Event = field(default_factory=threading.Event)
    """`told` is there; or it is None for good, for training has left this state behind."""


class Snapshots:
    """Takes the snapshots of one process. All hosts must call its methods alike; none of them waits for a device or another host,
    unless `waits` (a hook may use up the state): then `begin` waits for the copy."""

    def __init__(
        self,
        every_steps: int,
        files: tuple[int, ...],
        shapes: TrainState,
        about: Mapping[str, Any],
        prepare: Callable[[], Program],
        *,
        waits: bool = False,
    ):
        """`prepare` returns the step that leaves its state as it is, compiled: it is called in the thread that copies."""
        self._every_steps, self._about, self._prepare, self._waits = every_steps, about, prepare, waits
        self._table, self._host = table_of(shapes), runtime.current()
        # By the whole state: hosts with parts of other sizes must have as many slots.
        num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
        self._files = files[: max(MIN_SLOTS, min(len(files), int(MOST_BYTES / max(num_bytes, 1))))]
        self.step: Program | None = None
        """The step that leaves its state as it is."""
        self.newest = NOT_READY
        """The number of the newest snapshot that is whole on this host; 0: there is none yet."""
        self.skipped = 0
        """How many were due, and not taken: the one before was not whole on every host yet."""
        self._common, self._begun = NOT_READY, 0
        self._pending: collections.deque[_Job] = collections.deque()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._ended = False

    def start(self) -> None:
        """Called after the first step: until then a recovery needs the cores."""
        threading.Thread(target=self._run, name="snapshots", daemon=True).start()

    def begin(self, step: int, state: TrainState, data: Callable[[], Mapping[str, Any]]) -> bool:
        """Begins a snapshot of `state` if one is due. Then the next step must be taken with the program `step`. `data` returns
        what is recorded of the position in the data."""
        if step % self._every_steps or self._common == NOT_READY:
            return False
        number = self._begun + 1
        if number > len(self._files) and number - len(self._files) >= self._common:
            self.skipped += 1  # in its slot is the newest that every host has, or may have
            return False
        self._begun = number
        job = _Job(number, step, None if self._ended else state, data())
        self._pending.append(job)
        self._jobs.put(job)
        if self._waits and not self._ended:
            job.copied.wait()
        return True

    def awaits(self, step: int) -> bool:
        """Whether `tell` is to be called now that this step is complete."""
        return bool(self._pending) and self._pending[0].step == step

    def tell(self, meta: Mapping[str, Any]) -> None:
        """Gives the oldest snapshot that was begun what a checkpoint of its step would record."""
        job = self._pending.popleft()
        # As text: what is in it may change while the thread copies.
        job.told = json.dumps({**meta, **job.data, "step": job.step, "driver_term": self._host.driver_term})
        job.decided.set()

    def observe(self, whole: int) -> None:
        """Takes the newest snapshot that is whole on every host."""
        if self._common < 1 <= whole:
            self._host.emit({"ev": "snapshots", "since": self._host.generation})
            if self._host.generation == 0:
                size = num_bytes_of(self._table) / 1e6
                multihost.note_from_host0(
                    f"snapshots: the first is whole on every host; {len(self._files)} of {size:,.1f} MB each"
                )
        self._common = max(self._common, whole)

    def leave_behind(self) -> None:
        """Training goes back: what was begun is not to be gone on from."""
        self._begun -= len(self._pending)  # the same on all hosts; their numbers are used again
        for job in self._pending:
            job.decided.set()
        self._pending.clear()

    def close(self) -> None:
        """Training is over."""
        self.leave_behind()
        self._jobs.put(None)
        if self.skipped:
            multihost.note_from_host0(
                f"{self.skipped} of {self.skipped + self._begun} snapshots were not taken, for the one before was not whole on "
                "every host yet: to take each of them, set snapshot.every_steps higher"
            )

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        job: _Job | None = None
        try:
            needed, free = len(self._files) * num_bytes_of(self._table), bytes_available()
            if needed > free:
                raise MemoryError(f"they need {needed / 1e6:,.0f} MB of this machine's memory, and {free / 1e6:,.0f} MB are free")
            writer = Writer(self._files, self._table, self._about)
            self.step = self._prepare()
            self.newest = 0
            while (job := self._jobs.get()) is not None:
                self._take(writer, job)
        except Exception as error:  # a thread's boundary: training is worth more than a snapshot
            self._ended = True
            # A state that could not be computed, as when another host is gone, ends the training too.
            if job is None or not isinstance(error, jax.errors.JaxRuntimeError):
                self._host.note(f"no more snapshots are taken, and training goes on without: {multihost.one_line(error)}")
            while job is not None:  # the loop must not wait, nor a state stay in memory
                job.state = None
                job.copied.set()
                job = self._jobs.get()

    def _take(self, writer: Writer, job: _Job) -> None:
        slot = job.number % len(self._files)
        if job.state is not None and not (job.decided.is_set() and job.told is None):
            digests = writer.copy(slot, views_of(job.state, self._table))
        job.state = None  # first: it is as large as the state that is trained
        job.copied.set()
        job.decided.wait()
        if job.told is not None:
            writer.seal(slot, job.number, digests, job.told)
            self.newest = job.number


class Memory:
    """What earlier processes of the hosts have left. All hosts must call `restore` alike."""

    def __init__(self, files: tuple[int, ...], run: str, since: int):
        self._files, self._run, self._since = files, run, since

    def restore(self, abstract: TrainState, accept: Accept, manager: Any) -> Restored | None:
        """Goes on from the newest snapshot that every host has, if there is no newer checkpoint. None: there is none, or none can
        be used, which is noted. Raises CoordinatorError, which names the host, if one does not come."""
        mine, why = dict[tuple[int, int], Snapshot](), []
        for file in self._files:
            try:
                found = self._usable(Snapshot(file), abstract, accept)
                mine[found.about["generation"], found.number] = found
            except Refused as error:
                why.append(str(error))
        offered = multihost.all_hosts("snapshots", [list(mine), list(filter(None, why))], EXCHANGE_S)
        common = set(mine).intersection(*({(*key,) for key in keys} for keys, _ in offered))
        restored = None
        for key in sorted(common, reverse=True):
            if restored := self._read(mine[key], abstract, manager):
                break
        if not common and any(keys or refused for keys, refused in offered):
            problem = multihost.first_problem(["; ".join(refused) or "it has none" * (not keys) for keys, refused in offered])
            multihost.note_from_host0(f"the hosts have no snapshot in common ({problem}): going on from storage")
        for file in self._files:
            os.close(file)
        self._files = ()
        return restored

    def _usable(self, found: Snapshot, abstract: TrainState, accept: Accept) -> Snapshot:
        told, about = found.told, found.about
        what = f"the snapshot of step {told['step']}"
        if about["run"] != self._run or about["generation"] < self._since or told["driver_term"] > runtime.current().driver_term:
            raise Refused(f"{what}: it is of generation {about['generation']}, which does not count any more")
        problem = found.lacks(abstract) or accept(told)
        if KEY in told and about["host"] != jax.process_index():
            problem = f"it has the data of host {about['host']}"
        if problem:
            raise Refused(f"{what}: {problem}")
        return found

    def _read(self, found: Snapshot, abstract: TrainState, manager: Any) -> Restored | None:
        step, make, problem = found.told["step"], None, ""
        try:
            make = found.read(abstract)
        except (Refused, OSError, MemoryError) as error:
            problem = str(error)
        problem = multihost.first_problem(multihost.all_hosts("snapshot", problem, EXCHANGE_S))
        if not problem:
            assert make is not None
            state, problem = manager.go_on_from(step, make, found.told["not_finite"])
            if state is not None:
                return Restored(state, {**found.about["recorded"], **found.told}, [], found.about["generation"])
        if problem:
            multihost.note_from_host0(f"the snapshot of step {step} is not used: {problem}")
        return None


def check(config: SnapshotConfig, train_step: Any, manager: Any, shapes: TrainState) -> None:
    """Raises UsageError if there can be no snapshots here."""
    named = f"snapshot.every_steps = {config.every_steps}"
    if runtime.current().snapshot_files is None:
        raise UsageError(f"{named}: no agent keeps them when this process ends; leave it out, or launch the run (gangway run)")
    if getattr(train_step, "keeping", None) is None:
        raise UsageError(f"{named}: configure_functions gives a compiled step; give a function (state, batch), or leave it out")
    if not hasattr(manager, "go_on_from"):
        raise UsageError(f"{named}: the checkpoint manager is not gangway's, and has no method go_on_from; leave it out")
    if keys := [
        path
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]:
        raise UsageError(
            f"{named}: {jax.tree_util.keystr(keys[0])} is a typed key; keep its jax.random.key_data, or leave it out"
        )


def of_run(
    run_folder: str,
    config: SnapshotConfig,
    recorded: Mapping[str, Any],
    hooks: Hooks,
    shapes: TrainState,
    prepare: Callable[[], Program],
) -> Snapshots | None:
    """Returns what takes the snapshots of a run; None: it has none. `recorded`: its settings, as a checkpoint has them.
    `prepare`: as of Snapshots."""
    host, every_steps = runtime.current(), config.every_steps
    if host.snapshot_files is None or every_steps is None:
        return None
    about = {"run": run_folder, "generation": host.generation, "host": jax.process_index()}
    waits = overrides(hooks, "on_step_start") or overrides(hooks, "on_epoch_begin")
    return Snapshots(every_steps, host.snapshot_files.own, shapes, {**about, "recorded": recorded}, prepare, waits=waits)


def memory_of_run(run_folder: str, config: SnapshotConfig) -> Memory | None:
    """Returns what earlier processes have left; None: the run has no snapshots."""
    host = runtime.current()
    if host.snapshot_files is None or config.every_steps is None:
        return None
    return Memory(host.snapshot_files.kept, run_folder, host.snapshots_since)
