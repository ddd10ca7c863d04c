"""The lease of a run in its storage: one driver at a time, with a driver term that fences out every earlier driver.

`lease.json` says who drives the run and is renewed while it does. The right to write it is won by a record of the run's row
(`gangway.storage.row`), which exactly one of several drivers that start at once can create, in whatever clusters they run. A
driver has lost the run as soon as there is a newer term, whether or not it has noticed: it must neither train nor commit.

Clocks of two machines are never compared. An observer considers the lease of another machine expired when its *stamp* did not
change for `ttl_s` by the observer's clock. So the first look takes that long, unless the lease was released. For the holder, the
lease expires by the holder's clock, counted from just before its last renewal was written.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from functools import partial
from typing import Any

from gangway.storage import documents
from gangway.storage.opening import place_of, place_of_run
from gangway.storage.row import FOLDER, OvertakenError, Record, Row
from gangway.storage.row import KIND as ROW_KIND
from gangway.waits import pause
from orchestrator.run_state.processes import lives, started, this_machine
from trainers.checkpoint import layout

TTL_S = 15.0
RENEW_EVERY_S = 4.0
"""Three renewals may fail before the lease runs out."""
LOOK_EVERY_S = 0.5
LEASE = "lease.json"
"""The document, in the run's folder."""
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
    """The boot and pid namespace of the machine. `pid` is valid only there: two containers may share a host name."""
    pid: int
    started: int | None = None
    """The tick at which the process was started. It makes the process unique: process ids are used again."""
    since_s: float
    renewed_at_s: float
    """By the holder's wall clock: for people."""
    renewed_s: float | None = None
    """By the monotonic clock, which all processes of its machine share."""
    renewals: int = 0
    released: bool = False

    @property
    def stamp(self) -> tuple[int, int]:
        """A value that changes with each renewal."""
        return self.driver_term, self.renewals

    @property
    def here(self) -> bool:
        return self.machine == this_machine()

    @property
    def dead(self) -> bool:
        """Whether it is known to be dead: it has released the run, or was a process of this machine that is gone."""
        return self.released or (self.here and not lives(self.pid, self.started))

    def surely_lives(self, passed_s: float, ttl_s: float) -> bool:
        """Returns whether it is known to live: a process of this machine that has renewed its lease in time, by the monotonic
        clock."""
        return self.here and not self.dead and self.renewed_s is not None and passed_s - self.renewed_s <= ttl_s


LEASE_KIND = documents.DocumentKind("lease.json", Holder, "the driver with the newest term counts as the one that drives the run")


@dataclass(frozen=True, kw_only=True)
class Time:
    """The clocks of a lease."""

    wall: Clock = time.time
    """The wall clock, for people only: it differs between machines."""
    passed: Clock = time.monotonic
    """The monotonic clock, by which leases expire."""
    sleep: Callable[[float], None] = pause


def holder_of(run_dir: str) -> Holder | None:
    """Returns the latest driver of the run that has written `lease.json`, alive or not; None before the first one, or if the
    document is damaged. Raises NewerDocument."""
    return holder_in(LEASE_KIND.if_whole(_lease_path(run_dir)))


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
    """Takes the run. Raises RunInUse while another launch drives it, and if any other driver comes in the same moment. A driver
    of the same launch is replaced at once.

    `on_lost` is called once, from the renewing thread, when there is a newer driver. `waiting` is called if it takes time to find
    out whether a driver on another machine lives. The new term is higher than `above_term`, whatever is left in the storage.
    """
    row = row_of(run_dir)
    while True:
        seen = row.newest()
        if seen.damaged:
            waiting(f"{seen.damaged.partition(';')[0]}; it is passed over: {ROW_KIND.cost}")
        driver_term = max(above_term, wait_until_free(run_dir, times, launch_id=launch_id, ttl_s=ttl_s, waiting=waiting))
        mine = _this_driver(max(driver_term, seen.term.driver_term + seen.unreadable) + 1, launch_id, times)
        found = partial(layout.without_row, place_of(run_dir))
        try:
            taken = row.take_over(asdict(mine), mine.driver_term - 1, seen=seen, found=found)
        except OvertakenError:
            continue  # another driver has come since the look
        # A folder in its place could not be written over.
        for note in LEASE_KIND.salvaged(_lease_path(run_dir))[1]:
            waiting(note)
        mine = replace(mine, driver_term=taken.term.driver_term)  # higher where a record has been damaged meanwhile
        try:
            return Lease(run_dir, mine, times, ttl_s, on_lost, row, taken.step)
        except LeaseLost as error:
            raise RunInUse(f"run '{_name(run_dir)}' is in use: another driver has taken it in the same moment") from error


def wait_until_free(
    run_dir: str,
    times: Time = Time(),
    *,
    launch_id: str | None = None,
    ttl_s: float = TTL_S,
    waiting: Callable[[str], None] = lambda message: None,
) -> int:
    """Waits until no launch but `launch_id` can drive the run; returns the latest term. Raises RunInUse if another one drives
    it."""
    last_stamp: tuple[int, int] | None = None
    since_s = 0.0
    while True:
        holder, driver_term = _latest(run_dir)
        if holder is None or holder.dead or holder.launch_id == launch_id:
            return driver_term
        lives = holder.surely_lives(times.passed(), ttl_s) or (last_stamp is not None and holder.stamp != last_stamp)
        if lives:
            raise RunInUse(_in_use_message(run_dir, holder))
        if holder.stamp != last_stamp:
            last_stamp, since_s = holder.stamp, times.passed()
            waiting(_waiting_message(run_dir, holder, ttl_s))
        elif times.passed() - since_s > ttl_s:
            return driver_term
        times.sleep(LOOK_EVERY_S)


def check_free(run_dir: str, passed: Clock = time.monotonic) -> None:
    """Raises RunInUse if a launch on this machine surely drives the run: an early error for the user. Only `acquire` decides."""
    holder = holder_of(run_dir)
    if holder is not None and holder.surely_lives(passed(), TTL_S):
        raise RunInUse(_in_use_message(run_dir, holder))


def row_of(run_dir: str) -> Row:
    """Returns the row of a run."""
    return Row(place_of_run(run_dir) / FOLDER)


class Lease:
    """A held lease, renewed by a thread until `release()`. Made by `acquire`."""

    def __init__(
        self,
        run_dir: str,
        mine: Holder,
        times: Time,
        ttl_s: float,
        on_lost: Callable[[], None] | None,
        row: Row,
        committed_step: int | None,
    ):
        self.committed_step = committed_step
        """The highest step that was ever committed as the run was taken."""
        self._row = row
        self._run_dir, self._mine, self._times, self._ttl_s, self._on_lost = run_dir, mine, times, ttl_s, on_lost
        self._renewals = 0
        self._renewed_s = times.passed()
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_renewing, name="lease", daemon=True)
        # Before the thread: `acquire` returns a lease that is written, or raises.
        self.renew()
        self._thread.start()

    @property
    def driver_term(self) -> int:
        return self._mine.driver_term

    def superseded_by(self, launch_id: str) -> bool:
        """Returns whether the latest driver is newer than this one and of that launch."""
        successor, driver_term = _latest(self._run_dir)
        return successor is not None and driver_term > self.driver_term and successor.launch_id == launch_id

    def superseded(self) -> bool:
        """Returns whether the run has a newer driver. Raises OSError when the storage does not answer."""
        return self._lost or self._has_successor()

    def renew(self) -> None:
        """Renews the lease. Raises LeaseLost when the run has a newer driver, StorageError or OSError when the storage does not
        answer."""
        # Checked by the row, not by `lease.json`: a late write of ours may have overwritten the successor's `lease.json`.
        if self._has_successor():
            self._lost = True
            raise LeaseLost(f"{self._run_dir}: term {self.driver_term} has a successor; this driver must stop")
        begun_s = self._times.passed()  # before the write: nobody can see the new stamp earlier
        self._renewals += 1
        LEASE_KIND.write(_lease_path(self._run_dir), self._document())
        self._renewed_s = begun_s

    def valid(self) -> bool:
        """Returns False once another driver may have taken the run: then nothing may be committed."""
        return not self._lost and self._times.passed() - self._renewed_s <= self._ttl_s

    def release(self) -> None:
        """Releases the run: the next driver need not wait."""
        # The thread first: a renewal after the release would take it back.
        self._stop.set()
        self._thread.join()
        try:
            if not self._lost and not self._has_successor():
                LEASE_KIND.write(_lease_path(self._run_dir), self._document(released=True))
        except (OSError, documents.StorageError):
            return  # A lease that cannot be released expires.

    def _has_successor(self) -> bool:
        """Raises OSError where nobody can tell."""
        return self._row.newest().term.driver_term > self.driver_term

    def _document(self, released: bool = False) -> dict[str, Any]:
        times = {"renewed_at_s": self._times.wall(), "renewed_s": self._times.passed()}
        return asdict(self._mine) | times | {"renewals": self._renewals, "released": released}

    def _keep_renewing(self) -> None:
        while not self._stop.wait(RENEW_EVERY_S):
            try:
                self.renew()
            except LeaseLost:
                if self._on_lost is not None:
                    self._on_lost()
                return
            except (OSError, documents.StorageError):
                continue  # `valid()` becomes false if this goes on.


def _latest(run_dir: str) -> tuple[Holder | None, int]:
    """Returns the newest driver and its term. A driver that has a term but has not written `lease.json` yet counts too."""
    holder = holder_of(run_dir)
    driver_term = holder.driver_term if holder else 0
    newest = row_of(run_dir).newest()
    if newest.term.driver_term > driver_term:
        holder, driver_term = _in_record(newest), newest.term.driver_term
    return holder, driver_term


def _in_record(record: Record) -> Holder | None:
    """Returns the driver that a record names; None for a process without a driver, which holds nothing."""
    return holder_in(dict(record.holder)) if "launch_id" in record.holder else None


def _this_driver(driver_term: int, launch_id: str, times: Time) -> Holder:
    now_s = times.wall()
    return Holder(
        driver_term=driver_term,
        launch_id=launch_id,
        hostname=socket.gethostname(),
        machine=this_machine(),
        pid=os.getpid(),
        started=started(os.getpid()),
        since_s=now_s,
        renewed_at_s=now_s,
        renewed_s=times.passed(),
    )


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


def holder_in(data: Mapping[str, Any] | None) -> Holder | None:
    """Returns the driver that the contents of `lease.json` name."""
    names = {field.name for field in fields(Holder)}
    return Holder(**{name: value for name, value in data.items() if name in names}) if data is not None else None


def _lease_path(run_dir: str) -> str:
    return documents.join(run_dir, LEASE)
