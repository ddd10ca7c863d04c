"""One driver per run: a lease in the run's storage, with an term that fences out every earlier driver.

`lease.json` says who drives the run and is renewed while it does. The right to write it is won by *creating*
`driver_terms/NNNNNN.json`, which succeeds for exactly one of several drivers that start at once, in whatever clusters they run.
A driver whose successor has an term has lost the run, whether or not it has noticed: it must neither train nor commit.

Clocks of two machines are never compared. Another machine's lease has run out when its *stamp* did not change for `ttl_s` by the
observer's own clock, so a first look takes as long as that, unless the lease was released; a holder's own lease runs out by the
holder's own clock, counted from before its last renewal was written.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from trainers.checkpoint import fence
from trainers.storage import documents

TTL_S = 15.0
RENEW_EVERY_S = 4.0
"""Three renewals may fail before the lease runs out."""
LOOK_EVERY_S = 0.5
UNKNOWN = "(unknown)"
Clock = Callable[[], float]


class RunInUse(Exception):
    """Another launch holds the run."""


class LeaseLost(Exception):
    """Another driver has taken the run over."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who drives, or last drove, a run."""

    driver_term: int
    launch_id: str
    hostname: str
    machine: str
    """Tells whether `pid` means anything here: two containers may share a host name."""
    pid: int
    process_started_at_s: float
    """A process id is given out again: with this it is unique."""
    since_s: float
    renewed_at_s: float
    """On the holder's clock: for people, and for other processes of its machine."""
    renewals: int = 0
    released: bool = False

    @property
    def stamp(self) -> tuple[int, int, float]:
        """Another one after each renewal."""
        return self.driver_term, self.renewals, self.renewed_at_s

    @property
    def here(self) -> bool:
        return self.machine == this_machine()

    @property
    def dead(self) -> bool:
        """Known without waiting: it has released the run, or was a process of this machine that is gone."""
        return self.released or (self.here and not _process_lives(self.pid, self.process_started_at_s))

    def surely_lives(self, now_s: float, ttl_s: float) -> bool:
        """Known without waiting: a process of this machine that has renewed its lease by this machine's clock."""
        return self.here and not self.dead and now_s - self.renewed_at_s <= ttl_s


@dataclass(frozen=True, kw_only=True)
class Time:
    """What a lease knows of time."""

    wall: Clock = time.time
    """Shown to people; two machines never agree on it."""
    passed: Clock = time.monotonic
    """What leases run out by."""
    sleep: Callable[[float], None] = time.sleep


def holder_of(run_dir: str) -> Holder | None:
    """The latest driver of the run, alive or not; None before the first one."""
    return _holder(documents.read_json(_lease_path(run_dir)))


def acquire(
    run_dir: str,
    launch_id: str,
    times: Time = Time(),
    *,
    ttl_s: float = TTL_S,
    on_lost: Callable[[], None] | None = None,
    waiting: Callable[[str], None] = lambda message: None,
    above_term: int = 0,
) -> Lease:
    """Takes the run. Raises RunInUse while another launch drives it; a driver of the same launch is succeeded at once.

    `on_lost` is called once, from the renewing thread, when a successor has been found. `waiting` is told if it takes time to
    find out whether a driver of another machine lives. The term is higher than `above_term`, whatever is left in the storage.
    """
    while True:
        driver_term = max(above_term, wait_until_free(run_dir, times, launch_id=launch_id, ttl_s=ttl_s, waiting=waiting))
        mine = _this_driver(driver_term + 1, launch_id, times.wall())
        if documents.create_json(_term_path(run_dir, mine.driver_term), asdict(mine)):
            return Lease(run_dir, mine, times, ttl_s, on_lost)


def wait_until_free(
    run_dir: str,
    times: Time = Time(),
    *,
    launch_id: str | None = None,
    ttl_s: float = TTL_S,
    waiting: Callable[[str], None] = lambda message: None,
) -> int:
    """Returns when no launch but `launch_id` can drive the run: the latest term. Raises RunInUse as soon as one is seen to."""
    seen: tuple[int, int, float] | None = None
    since_s = 0.0
    while True:
        holder, driver_term = _latest(run_dir)
        if holder is None or holder.dead or holder.launch_id == launch_id:
            return driver_term
        lives = holder.surely_lives(times.wall(), ttl_s) or (seen is not None and holder.stamp != seen)
        if lives and holder.launch_id != UNKNOWN:
            raise RunInUse(_in_use_message(run_dir, holder))
        if holder.stamp != seen:
            seen, since_s = holder.stamp, times.passed()
            waiting(_waiting_message(run_dir, holder, ttl_s))
        elif times.passed() - since_s > ttl_s:
            return driver_term
        times.sleep(LOOK_EVERY_S)


def check_free(run_dir: str, clock: Clock = time.time) -> None:
    """Raises RunInUse if a launch surely drives the run, from this machine: an early word to the user, at once. Only `acquire`
    decides."""
    holder = holder_of(run_dir)
    if holder is not None and holder.surely_lives(clock(), TTL_S):
        raise RunInUse(_in_use_message(run_dir, holder))


def this_machine() -> str:
    """This boot of this machine, and the process-id namespace we are in."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # Not Linux.
        return socket.gethostname()


class Lease:
    """A held lease, renewed by a thread until `release()`. Made by `acquire`."""

    def __init__(self, run_dir: str, mine: Holder, times: Time, ttl_s: float, on_lost: Callable[[], None] | None):
        self._run_dir, self._mine, self._times, self._ttl_s, self._on_lost = run_dir, mine, times, ttl_s, on_lost
        self._renewals = 0
        self._renewed_s = times.passed()
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_renewing, name="lease", daemon=True)
        self.renew()
        self._thread.start()

    @property
    def driver_term(self) -> int:
        return self._mine.driver_term

    @property
    def fence(self) -> str:
        """The document that exists once the run has a newer driver: whoever works for this one must commit nothing then."""
        return _term_path(self._run_dir, self.driver_term + 1)

    def superseded_by(self, launch_id: str) -> bool:
        """Whether the latest driver after this one is of that launch. False while there is none."""
        successor, driver_term = _latest(self._run_dir)
        return successor is not None and driver_term > self.driver_term and successor.launch_id == launch_id

    def superseded(self) -> bool:
        """Whether the run has a newer driver. Raises OSError when the storage does not answer."""
        return self._lost or self._has_successor()

    def renew(self) -> None:
        """Raises LeaseLost when the run has a newer driver, StorageError or OSError when the storage does not answer."""
        # Asked for in its folder: a late write of ours over a successor's `lease.json` would otherwise look like our own lease.
        if self._has_successor():
            self._lost = True
            raise LeaseLost(f"{self._run_dir}: term {self.driver_term} has a successor; this driver must stop")
        begun_s = self._times.passed()  # nobody has seen the new stamp before that
        self._renewals += 1
        documents.write_json(_lease_path(self._run_dir), self._document())
        self._renewed_s = begun_s

    def valid(self) -> bool:
        """False once another driver may have taken the run: nothing may be committed then."""
        return not self._lost and self._times.passed() - self._renewed_s <= self._ttl_s

    def release(self) -> None:
        """Lets the next driver in at once."""
        self._stop.set()
        self._thread.join()
        try:
            if not self._lost and not self._has_successor():
                documents.write_json(_lease_path(self._run_dir), self._document(released=True))
        except (OSError, documents.StorageError):
            return  # A lease that cannot be released runs out.

    def _has_successor(self) -> bool:
        """Raises OSError where nobody can tell."""
        return documents.exists(self.fence) if documents.is_url(self.fence) else fence.next_driver(Path(self.fence)) is not None

    def _document(self, released: bool = False) -> dict[str, Any]:
        changes = {"renewed_at_s": self._times.wall(), "renewals": self._renewals, "released": released}
        return asdict(self._mine) | changes

    def _keep_renewing(self) -> None:
        while not self._stop.wait(RENEW_EVERY_S):
            try:
                self.renew()
            except LeaseLost:
                if self._on_lost is not None:
                    self._on_lost()
                return
            except (OSError, documents.StorageError):
                continue  # `valid()` turns false by itself if this goes on.


def _latest(run_dir: str) -> tuple[Holder | None, int]:
    """The newest driver and its term. A driver that has its term but has not written `lease.json` yet counts."""
    holder = holder_of(run_dir)
    driver_term = holder.driver_term if holder else 0
    while (claim := _claim(run_dir, driver_term + 1)) is not None:
        holder, driver_term = claim, driver_term + 1
    return holder, driver_term


def _claim(run_dir: str, driver_term: int) -> Holder | None:
    """Who has that term; None while nobody has it."""
    try:
        return _holder(documents.read_json(_term_path(run_dir, driver_term)))
    except documents.StorageError:  # just being written, or its driver died over it
        return Holder(
            driver_term=driver_term,
            launch_id=UNKNOWN,
            hostname=UNKNOWN,
            machine="",
            pid=0,
            process_started_at_s=0.0,
            since_s=0.0,
            renewed_at_s=0.0,
        )


def _this_driver(driver_term: int, launch_id: str, now_s: float) -> Holder:
    return Holder(
        driver_term=driver_term,
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


def _in_use_message(run_dir: str, holder: Holder) -> str:
    since = datetime.fromtimestamp(holder.since_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    return (
        f"run {_name(run_dir)!r} is in use: process {holder.pid} on {holder.hostname} drives it since {since} "
        f"(launch {holder.launch_id}); stop that one, or start this one under another name (name=...)"
    )


def _waiting_message(run_dir: str, holder: Holder, ttl_s: float) -> str:
    return (
        f"run {_name(run_dir)!r} was driven by process {holder.pid} on {holder.hostname} (launch {holder.launch_id}), which has "
        f"not released it: it is taken over if that one gives no sign of life for {ttl_s:.0f} s"
    )


def _name(run_dir: str) -> str:
    return os.path.basename(run_dir.rstrip("/"))


def _holder(data: dict[str, Any] | None) -> Holder | None:
    known = {field.name for field in fields(Holder)}
    return Holder(**{name: value for name, value in data.items() if name in known}) if data is not None else None


def _lease_path(run_dir: str) -> str:
    return documents.join(run_dir, "lease.json")


def _term_path(run_dir: str, driver_term: int) -> str:
    return documents.join(run_dir, "driver_terms", f"{driver_term:06}.json")
