"""A real run, observed from outside: its processes, its files, and orders to its processes. For `chaos` and `verify`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from gangway.storage import documents, identity, ours
from gangway.storage.opening import place_of
from gangway.storage.store import Place
from orchestrator.faultlab.testbed.screen import Screen
from orchestrator.run_state import incident_log
from orchestrator.run_state.launch import STATE
from orchestrator.run_state.lease import holder_of
from orchestrator.run_state.run_folder import RunFolder
from orchestrator.run_state.stored import CHECKPOINTS
from orchestrator.run_state.summary import SUMMARY
from orchestrator.tracking.spool import FOLDER as TRACKING
from trainers.checkpoint import layout

T = TypeVar("T")
FAULTS_VARIABLE = "GANGWAY_FAULTS"
"""As in trainers/diagnostics/fault_injection.py, which says what lies in the folder that it names."""
PATIENCE_S = 240.0
"""For the run to come to what is waited for."""
POLL_S = 0.1
QUIET_S = 0.5
"""A standby that used no CPU for so long is warm: it waits for orders."""
LOG_OF_PROCESS = re.compile(r"/host-\d+/process-[\w-]+\.log$")


class RunError(Exception):
    """The run did not do what was waited for; the message says where to look."""


class Run:
    """A job in processes of its own. `folder` holds its console, orders and logs; it must not be on the run's own storage.

    Raises RunError if there is a run already. `env` is added to the environment. `terminal`, `reader`: as of a `Screen`.
    """

    def __init__(
        self,
        config_path: str,
        overrides: Sequence[str],
        run_dir: str,
        folder: Path,
        env: Mapping[str, str] | None = None,
        *,
        terminal: bool = False,
        reader: bool = False,
    ):
        if documents.exists(documents.join(run_dir, STATE)):
            raise RunError(f"{run_dir} holds a run already: names must be free here; remove it, or set name= or storage=")
        self.config_path, self.overrides, self.run_dir = config_path, [*overrides], place_of(run_dir)
        self.output = folder / "console.log"
        self.screen = Screen(self.output, terminal=terminal, reader=reader)
        self._first_seen_s: dict[str, float] = {}
        """When each checkpoint was seen first, by the name of its folder."""
        self.orders = folder / "faults"
        self.orders.mkdir(parents=True, exist_ok=True)
        # By this path the training processes of the run are found (`_log_of`), whoever started them.
        self.logs = folder.absolute() / "logs" / self.run_dir.name
        self.seen: dict[int, psutil.Process] = {}
        self.between_looks: Callable[[], None] = lambda: None
        """Called by `wait`, each time that what it waits for is not there yet."""
        self._env = {**os.environ, **(env or {})}
        self._num_orders = 0
        self._process: subprocess.Popen | None = None

    # ------------------------------------------------------------------ its life

    def start(self, *more_overrides: str, **env: str) -> None:
        """Runs the command; once more, if it has stopped, as a user would go on. `env`: of this time alone."""
        test_overrides = [f"hosts.env.{FAULTS_VARIABLE}={self.orders}", f"hosts.log_dir={self.logs}"]
        overrides = [*self.overrides, *test_overrides, *more_overrides]
        command = [sys.executable, "-m", "orchestrator.run", self.config_path, *overrides]
        self._process = self.screen.start(command, {**self._env, **env})

    @property
    def process(self) -> subprocess.Popen:
        """The command's."""
        return known(self._process, f"{self.run_dir.name} was not started")

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def finish(self) -> int:
        """Waits for its end; its exit status."""
        while self.running():
            # Each look remembers new processes: at the end, an orphan could not be found any more.
            self.tree()
            time.sleep(POLL_S)
        return self.process.wait()

    def wait(self, condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> bool:
        """True when it holds, False if the run ended before. Raises RunError if it takes too long."""
        deadline_s = time.monotonic() + patience_s
        while self.running():
            if condition():
                return True
            if time.monotonic() > deadline_s:
                raise RunError(f"{self.run_dir.name}: waited {patience_s:.0f} s for {what}; see {self.output}")
            self.between_looks()
            time.sleep(POLL_S)
        return False

    def clean_up(self) -> list[str]:
        """Ends the run if it still goes on; returns the processes of it that were left behind, and ends them too."""
        if self.running():
            # Before the kill: after it, the children belong to another parent.
            self.tree()
            self.process.kill()
            self.process.wait()
        self.screen.close()
        processes = {**self.seen, **{process.pid: process for process in self.training_processes()}}
        # Some time to end by themselves: only what stays was left behind.
        _, alive = psutil.wait_procs(list(processes.values()), timeout=20)
        left = [f"process {process.pid}: {command_of(process)[:80]}" for process in alive]
        for process in alive:
            process.kill()
        return left

    # ------------------------------------------------------------------ what it wrote

    def incidents(self) -> list[dict[str, Any]]:
        """Of all its launches, in their order."""
        lines = RunFolder(self.run_dir.url).last_lines(incident_log.NAME)
        return [entry.incident.to_dict() for _, entry in incident_log.with_launches(lines)[0]]

    def summary(self) -> dict[str, Any]:
        summary = self._read(self.run_dir / SUMMARY)
        if summary is None:
            raise RunError(f"{self.run_dir.name} left no summary; it printed:\n{self.console()[-4000:]}")
        return summary

    def ended_at_s(self) -> float:
        """When it wrote its summary; 0 if it has not, or in a bucket."""
        return modified_s((self.run_dir / SUMMARY).path) if self.run_dir.store.is_local else 0.0

    def tracking(self) -> Path:
        """Returns the folder of its metrics: in a bucket there are copies alone, and the files are on this machine."""
        return Path(identity.local_folder(self.run_dir.url)) / TRACKING

    def ship_the_rest(self) -> None:
        """What the end of a run tells its user to do, if the tracking server was down then."""
        command = [sys.executable, "-m", "orchestrator.tracking", self.run_dir.url]
        with self.output.open("a") as log, suppress(subprocess.TimeoutExpired):  # what is left then is found
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=self._env, timeout=PATIENCE_S, check=False)

    def console(self) -> str:
        return self.output.read_text(errors="replace")

    def checkpoints(self) -> list[Place]:
        """Folders of the complete ones, oldest first."""
        folder = self.run_dir / CHECKPOINTS
        found = [layout.at(folder, step) for step in layout.steps(folder)]
        for path in found:
            self._first_seen_s.setdefault(path.name, time.time())
        return found

    def now_s(self) -> float:
        """Returns the time, for `saved_after`: what is complete by now is known."""
        self.checkpoints()
        return time.time()

    def saved_after(self, at_s: float) -> bool:
        """Whether a checkpoint was completed after that time, which `now_s` has told. A bucket tells no times that could be
        compared with those of this machine: there it counts when a checkpoint was seen first."""
        is_local, found = self.run_dir.store.is_local, self.checkpoints()
        return any((modified_s(path.path) if is_local else self._first_seen_s[path.name]) > at_s for path in found)

    # ------------------------------------------------------------------ its processes

    def tree(self) -> list[psutil.Process]:
        """Everything below the command; remembered, to be looked for at the end."""
        try:
            tree = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.seen.update({process.pid: process for process in tree})
        return tree

    def training_processes(self) -> list[psutil.Process]:
        """Those of this machine, standbys included, wherever they were started from: they print into a folder of ours."""
        return [process for process in psutil.process_iter() if self._log_of(process.pid)]

    def members(self) -> dict[int, psutil.Process]:
        """The living training process of each host of the present generation, by host."""
        members = {}
        for path in (self.orders / "members").glob("host-*.json"):
            member = self._read(place_of(path))
            if member and self._log_of(member["pid"]):
                members[member["host"]] = psutil.Process(member["pid"])
        return members

    def member(self, host: int) -> psutil.Process:
        """Raises RunError if that host has no training process now."""
        members = self.members()
        return known(members.get(host), f"host {host} has no training process; there are hosts {sorted(members)}")

    def agent(self, host: int) -> psutil.Process:
        return known(self.member(host).parent(), f"the training process of host {host} has no parent")

    def driver(self) -> psutil.Process:
        """The process that holds the run's lease."""
        return psutil.Process(known(holder_of(self.run_dir.url), "the run has no driver yet").pid)

    def standbys_are_warm(self) -> bool:
        """Every member has one beside it, and none of them is still at work."""
        members = {process.pid for process in self.members().values()}
        processes = self.training_processes()
        waiting = [process for process in processes if process.pid not in members]
        folders = [os.path.dirname(self._log_of(process.pid) or "") for process in waiting]
        beside = {os.path.dirname(self._log_of(pid) or "") for pid in members}
        if not members or not beside <= set(folders):
            return False
        before = [cpu_s(process) for process in waiting]
        time.sleep(QUIET_S)
        return before == [cpu_s(process) for process in waiting]

    # ------------------------------------------------------------------ orders to the injector in its training processes

    def order(self, host: int, kind: str, **settings: Any) -> str:
        """Tells the training process of `host` to do something to itself; returns the order's id."""
        self._num_orders += 1
        order = {"id": f"{self._num_orders}-{kind}", "kind": kind, **settings}
        documents.write_json(self.orders / f"host-{host:04d}.json", order)
        return order["id"]

    def taken(self, order_id: str) -> dict[str, Any] | None:
        """When, where and by whom the order was carried out; None before that."""
        return self._read(place_of(self.orders / "taken" / f"{order_id}.json"))

    def record_batches(self) -> None:
        """Makes every host note what is in each batch."""
        (self.orders / "batches").mkdir(exist_ok=True)

    def batches(self) -> dict[int, dict[str, str]]:
        """What was noted: digests of rows, by batch. A row that was drawn twice and differed is there twice, then as `again`."""
        found: dict[int, dict[str, str]] = {}
        for path in sorted((self.orders / "batches").glob("*.jsonl")):
            for line in path.read_text().splitlines():
                noted = json.loads(line)
                rows = found.setdefault(noted["batch"], {})
                for row, digest in noted["rows"].items():
                    if rows.setdefault(row, digest) != digest:
                        rows[f"{row} again"] = digest
        return found

    def pace(self, step_s: float | None) -> None:
        """Makes every step of every host take so much longer from now on; None: not any more."""
        if step_s:
            documents.write_json(self.orders / "pace.json", {"step_s": step_s})
        else:
            ours.delete(self.orders / "pace.json", documents.DOCUMENT)

    def full_speed(self) -> None:
        """From now on, whatever has set the pace."""
        self.between_looks = lambda: None
        self.pace(None)

    # ------------------------------------------------------------------ inside

    def _log_of(self, pid: int) -> str | None:
        """Where a training process of this run prints to; None for what is not one, or not any more."""
        try:
            path = os.readlink(f"/proc/{pid}/fd/1")
        except OSError:
            return None
        # The guard of a training process shares its command line, but has closed its output.
        return path if path.startswith(f"{self.logs}/") and LOG_OF_PROCESS.search(path) else None

    def _read(self, path: Place) -> dict[str, Any] | None:
        try:
            return json.loads(path.content())
        except (FileNotFoundError, ValueError):  # ValueError: a disk that is full leaves empty files
            return None


def known(found: T | None, why_not: str) -> T:
    """Returns what was found. Raises RunError with `why_not` if that is nothing."""
    if found is None:
        raise RunError(why_not)
    return found


def step_of(checkpoint: Place) -> int:
    """Returns the step of a checkpoint from the name of its folder, which says more."""
    return int(checkpoint.name.partition("-")[0])


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def cpu_s(process: psutil.Process) -> float | None:
    try:
        return sum(process.cpu_times()[:2])
    except psutil.NoSuchProcess:
        return None


def modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
