"""One driver per run: a lease in the run's storage, with an epoch that fences out every earlier driver.

`lease.json` says who drives the run and is renewed while it does. The right to write it is won by *creating*
`epochs/NNNNNN.json`, which succeeds for exactly one of several drivers that start at once, in whatever clusters they run.
A driver whose successor has an epoch has lost the run, whether or not it has noticed: it must neither train nor commit.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import psutil

from orchestrator import storage

TTL_S = 15.0
RENEW_EVERY_S = 4.0
"""Three renewals may fail before the lease runs out."""
Clock = Callable[[], float]


class RunInUse(Exception):
    """Another launch holds the run."""


class LeaseLost(Exception):
    """Another driver has taken the run over."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who drives, or last drove, a run."""

    epoch: int
    launch_id: str
    hostname: str
    machine: str
    """Tells whether `pid` means anything here: two containers may share a host name."""
    pid: int
    process_started_at_s: float
    """A process id is given out again: with this it is unique."""
    since_s: float
    renewed_at_s: float
    released: bool = False


def holder_of(run_dir: str) -> Holder | None:
    """The latest driver of the run, alive or not; None before the first one."""
    return _holder(storage.read_json(_lease_path(run_dir)))


def is_live(holder: Holder, now_s: float, ttl_s: float = TTL_S) -> bool:
    """False once it released the run, did not renew its lease for `ttl_s`, or was a process of this machine that is gone."""
    if holder.released or now_s - holder.renewed_at_s > ttl_s:
        return False
    return holder.machine != this_machine() or _process_lives(holder.pid, holder.process_started_at_s)


def acquire(
    run_dir: str, launch_id: str, clock: Clock, *, ttl_s: float = TTL_S, on_lost: Callable[[], None] | None = None
) -> Lease:
    """Takes the run. Raises RunInUse while another launch drives it; a driver of the same launch is succeeded at once.

    `on_lost` is called once, from the renewing thread, when a successor has been found.
    """
    while True:
        holder, epoch = _latest(run_dir)
        now_s = clock()
        if holder is not None and holder.launch_id != launch_id and is_live(holder, now_s, ttl_s):
            raise RunInUse(_in_use_message(run_dir, holder, now_s, ttl_s))
        mine = _this_driver(epoch + 1, launch_id, now_s)
        if storage.create_json(_epoch_path(run_dir, mine.epoch), asdict(mine)):
            return Lease(run_dir, mine, clock, ttl_s, on_lost)


def check_free(run_dir: str, clock: Clock = time.time) -> None:
    """Raises RunInUse if a launch drives the run: an early word to the user. Only `acquire` decides."""
    holder, now_s = holder_of(run_dir), clock()
    if holder is not None and is_live(holder, now_s):
        raise RunInUse(_in_use_message(run_dir, holder, now_s, TTL_S))


def this_machine() -> str:
    """This boot of this machine, and the process-id namespace we are in."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # Not Linux.
        return socket.gethostname()


class Lease:
    """A held lease, renewed by a thread until `release()`. Made by `acquire`."""

    def __init__(self, run_dir: str, mine: Holder, clock: Clock, ttl_s: float, on_lost: Callable[[], None] | None):
        self._run_dir, self._mine, self._clock, self._ttl_s, self._on_lost = run_dir, mine, clock, ttl_s, on_lost
        self._renewed_at_s = mine.renewed_at_s
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_renewing, name="lease", daemon=True)
        self.renew()
        self._thread.start()

    @property
    def epoch(self) -> int:
        return self._mine.epoch

    @property
    def fence(self) -> str:
        """The document that exists once the run has a newer driver: whoever works for this one must commit nothing then."""
        return _epoch_path(self._run_dir, self.epoch + 1)

    def succeeded_by(self, launch_id: str) -> bool:
        """Whether the next driver after this one was of that launch. False while there is none."""
        successor = _holder(storage.read_json(self.fence))
        return successor is not None and successor.launch_id == launch_id

    def renew(self) -> None:
        """Raises LeaseLost when the run has a newer driver, StorageError or OSError when the storage does not answer."""
        # Asked for by name: a late write of ours over a successor's `lease.json` would otherwise look like our own lease.
        if storage.exists(self.fence):
            self._lost = True
            raise LeaseLost(f"{self._run_dir}: epoch {self.epoch} has a successor; this driver must stop")
        document = self._document()
        storage.write_json(_lease_path(self._run_dir), document)
        self._renewed_at_s = document["renewed_at_s"]

    def valid(self) -> bool:
        """False once another driver may have taken the run: nothing may be committed then."""
        return not self._lost and self._clock() - self._renewed_at_s <= self._ttl_s

    def release(self) -> None:
        """Lets the next driver in at once."""
        self._stop.set()
        self._thread.join()
        try:
            if not self._lost and not storage.exists(self.fence):
                storage.write_json(_lease_path(self._run_dir), self._document(released=True))
        except (OSError, storage.StorageError):
            return  # A lease that cannot be released runs out.

    def _document(self, released: bool = False) -> dict[str, Any]:
        return asdict(self._mine) | {"renewed_at_s": self._clock(), "released": released}

    def _keep_renewing(self) -> None:
        while not self._stop.wait(RENEW_EVERY_S):
            try:
                self.renew()
            except LeaseLost:
                if self._on_lost is not None:
                    self._on_lost()
                return
            except (OSError, storage.StorageError):
                continue  # `valid()` turns false by itself if this goes on.


def _latest(run_dir: str) -> tuple[Holder | None, int]:
    """The newest driver and its epoch. A driver that has its epoch but has not written `lease.json` yet counts."""
    holder = holder_of(run_dir)
    epoch = holder.epoch if holder else 0
    while (claim := _holder(storage.read_json(_epoch_path(run_dir, epoch + 1)))) is not None:
        holder, epoch = claim, epoch + 1
    return holder, epoch


def _this_driver(epoch: int, launch_id: str, now_s: float) -> Holder:
    return Holder(
        epoch=epoch,
        launch_id=launch_id,
        hostname=socket.gethostname(),
        machine=this_machine(),
        pid=os.getpid(),
        process_started_at_s=psutil.Process().create_time(),
        since_s=now_s,
        renewed_at_s=now_s,
    )


def _process_lives(pid: int, started_at_s: float) -> bool:
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started_at_s) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _in_use_message(run_dir: str, holder: Holder, now_s: float, ttl_s: float) -> str:
    since = datetime.fromtimestamp(holder.since_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    name = os.path.basename(run_dir.rstrip("/"))
    return (
        f"run {name!r} is in use: process {holder.pid} on {holder.hostname} drives it since {since} "
        f"(launch {holder.launch_id}, last heard of {max(0.0, now_s - holder.renewed_at_s):.0f} s ago); "
        f"stop that one, wait {ttl_s:.0f} s if it is gone already, or start this one under another name (name=...)"
    )


def _holder(data: dict[str, Any] | None) -> Holder | None:
    return Holder(**data) if data is not None else None


def _lease_path(run_dir: str) -> str:
    return storage.join(run_dir, "lease.json")


def _epoch_path(run_dir: str, epoch: int) -> str:
    return storage.join(run_dir, "epochs", f"{epoch:06}.json")
