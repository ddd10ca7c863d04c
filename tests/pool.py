"""A pool of workers, which are forks of the one process that has collected the tests: `pytest --pool 4`.

Each worker takes one file of tests after the other, in the order of the collection, and sends what its tests report. So every
import is made once, where pytest-xdist's workers each import and collect everything: 20 CPU-s a worker. It asks for one thing: no
module may start a thread, or compute with JAX, when it is imported."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from _pytest.capture import CaptureManager, FDCapture
from _pytest.junitxml import LogXML

from tests.environment import start_jax
from tests.ledger import Ledger, file_of

MACHINES = 2
"""So many files of gangs or whole jobs at a time: each job is a dozen processes."""
HARMLESS_THREADS = ("jemalloc_bg_thd",)
"""Of an allocator, which starts its own anew in a fork."""


class Pool:
    """Runs the tests in place of pytest's loop. What a worker says is reported here as if the tests had been run here."""

    def __init__(self, num_workers: int):
        self._num_workers, self._numbers = num_workers, itertools.count()
        self._waiting: list[list[int]] = []
        """Files that no worker has taken: the indices of their tests."""
        self._workers: list[Worker] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly:
            return None
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        self._waiting.extend(files_of(session.items))
        check_threads()
        gc.collect()
        gc.freeze()  # a fork that collects garbage would copy all that it looks at
        try:
            for _ in range(min(self._num_workers, len(self._waiting))):
                self._start(session)
            while self._workers:
                for connection in wait([worker.connection for worker in self._workers]):
                    self._hear(session, next(worker for worker in self._workers if worker.connection is connection))
        finally:
            # After Ctrl-C, which they have got too, or an error here: what they go on to say finds nobody, and they end.
            for worker in self._workers:
                worker.connection.close()
            for worker in self._workers:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.waitpid(worker.pid, 0)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        return True

    def _start(self, session: pytest.Session) -> None:
        here, there = Pipe()
        number = next(self._numbers)
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks: it has not started yet
            pid = os.fork()
        if not pid:
            here.close()
            for worker in self._workers:
                worker.connection.close()
            become_worker(session, there, number)
        there.close()
        self._workers.append(Worker(pid, here))

    def _hear(self, session: pytest.Session, worker: Worker) -> None:
        hook = session.config.hook
        try:
            kind, value = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            self._ended(session, worker)
            return
        if kind == "idle":
            worker.idle, worker.on_machines = True, False
            self._hand_out(session)
        elif kind == "started":
            worker.left.remove(value)
            worker.running = session.items[value]
            hook.pytest_runtest_logstart(nodeid=worker.running.nodeid, location=worker.running.location)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=value)
            hook.pytest_runtest_logreport(report=report)
            if session.shouldfail or session.shouldstop:
                for each in self._workers:
                    each.idle = False  # it ends, and is given nothing more
                    with suppress(BrokenPipeError):
                        each.connection.send(None)
        elif kind == "ended":
            assert worker.running is not None
            hook.pytest_runtest_logfinish(nodeid=worker.running.nodeid, location=worker.running.location)
            worker.running = None

    def _hand_out(self, session: pytest.Session) -> None:
        """Gives each worker that has nothing to do the next file that may be run now. One that gets an empty file ends."""
        for worker in [worker for worker in self._workers if worker.idle]:
            stop = session.shouldfail or session.shouldstop or not self._waiting
            room = MACHINES - sum(each.on_machines for each in self._workers)
            allowed = [file for file in self._waiting if room or not needs_machines(session.items[file[0]])]
            if stop or allowed:
                worker.left = [] if stop else [*allowed[0]]
                worker.on_machines = bool(worker.left) and needs_machines(session.items[worker.left[0]])
                worker.idle = False
                worker.connection.send(worker.left)
                if not stop:
                    self._waiting.remove(worker.left)

    def _ended(self, session: pytest.Session, worker: Worker) -> None:
        """A worker that died has failed the test that it ran. Another one takes the rest of its file."""
        self._workers.remove(worker)
        self._hand_out(session)
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if item := worker.running:
            message = f"the worker that ran it ended with status {status}"
            for when in ("call", "teardown"):
                outcome, longrepr = ("failed", message) if when == "call" else ("passed", None)
                report = pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), outcome, longrepr, when)  # type: ignore[arg-type]
                session.config.hook.pytest_runtest_logreport(report=report)
        elif status:
            session.shouldfail = f"a worker ended with status {status} between two tests"
            raise session.Failed(session.shouldfail)
        if worker.left:
            self._waiting.insert(0, worker.left)
        if self._waiting and not (session.shouldfail or session.shouldstop):
            self._start(session)


@dataclass
class Worker:
    """What the pool knows of a worker."""

    pid: int
    connection: Connection
    left: list[int] = field(default_factory=list)
    """Tests of its file that it has not begun."""
    running: pytest.Item | None = None
    idle: bool = False
    on_machines: bool = False
    """It runs a file of gangs or of whole jobs."""


def needs_machines(item: pytest.Item) -> bool:
    return item.nodeid.startswith(("tests/ray/", "tests/faults/"))


def files_of(items: Sequence[pytest.Item]) -> list[list[int]]:
    """Returns the indices of the tests of each file, in the order of the items."""
    return [
        [index for index, _ in of_file]
        for _, of_file in itertools.groupby(enumerate(items), key=lambda each: file_of(each[1].nodeid))
    ]


def check_threads() -> None:
    """Raises RuntimeError if a module has started a thread when it was imported: a fork may copy a lock that it holds."""
    names = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as file:
            names.append(file.read().strip())
    names.remove(names[names.index(max(names, key=names.count))])
    if left := [name for name in names if name not in HARMLESS_THREADS]:
        raise RuntimeError(
            f"{len(left)} threads run when the tests are collected ({', '.join(sorted(set(left)))}), and a fork may copy a lock "
            "of theirs. Which module starts one, or computes with JAX, when it is imported? Let its tests do it"
        )


def become_worker(session: pytest.Session, connection: Connection, number: int) -> None:
    """Runs files until there are none. Never returns."""
    status = 70
    try:
        Running(session, connection, number).run()
        status = 0
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def capture_apart(manager: CaptureManager | None) -> None:
    """Lets this process capture what its tests print into files of its own: those of its parent have one offset for all forks.
    The streams stay, since loggers hold them that were made when modules were imported."""
    capturing = manager and manager._global_capturing
    for each in (capturing.out, capturing.err) if capturing else ():
        if isinstance(each, FDCapture):
            with tempfile.TemporaryFile() as file:
                os.dup2(file.fileno(), each.tmpfile.fileno())


class EndOfFile:
    """In place of the next test: none of the fixtures of a file or of a folder is there for it, those of the session are."""

    def __init__(self, session: pytest.Session):
        self._session = session

    def listchain(self) -> list[Any]:
        return [self._session]


class Running:
    """A worker, and the plugin that sends what its tests report."""

    def __init__(self, session: pytest.Session, connection: Connection, number: int):
        self._session, self._connection = session, connection
        plugins = session.config.pluginmanager
        for plugin in plugins.get_plugins():
            if plugins.get_name(plugin) in ("terminalreporter", "gangway-progress") or isinstance(plugin, LogXML):
                plugins.unregister(plugin)
        capture_apart(plugins.get_plugin("capturemanager"))
        folders = session.config._tmp_path_factory  # type: ignore[attr-defined]
        folders._basetemp = folders.getbasetemp() / f"worker-{number}"
        folders._basetemp.mkdir()
        # Ray writes there which of its clusters was started last.
        os.environ["RAY_TMPDIR"] = f"{os.environ['RAY_TMPDIR']}/{number}"
        os.makedirs(os.environ["RAY_TMPDIR"], exist_ok=True)
        import numpy as np

        random.seed()
        np.random.seed()
        start_jax()
        plugins.register(self, "gangway-worker")
        self._ledger = Ledger()
        plugins.register(self._ledger, "gangway-ledger")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._session.config
        self._connection.send(("report", config.hook.pytest_report_to_serializable(config=config, report=report)))

    def run(self) -> None:
        """Runs files until it is told to stop. Its fixtures are torn down however it ends: they may have started processes."""
        try:
            while (file := self._next_file()) and self._run_file(file):
                pass
        finally:
            self._session._setupstate.teardown_exact(None)
            self._ledger.close()

    def _run_file(self, file: Sequence[int]) -> bool:
        """Says whether it was run to its end."""
        items = self._session.items
        for index, following in itertools.zip_longest(file, file[1:]):
            if self._connection.poll():
                return False
            self._connection.send(("started", index))
            next_item = EndOfFile(self._session) if following is None else items[following]
            self._session.config.hook.pytest_runtest_protocol(item=items[index], nextitem=next_item)
            self._connection.send(("ended", index))
        return True

    def _next_file(self) -> list[int] | None:
        self._connection.send(("idle", None))
        return self._connection.recv()
