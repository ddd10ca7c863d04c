"""A launch in a world without Ray, processes or time (`fake_gang`): one driver after the other, as Ray Train would start them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from cluster.gang.gang_like import GangsLike
from gangway.storage.documents import DocumentKind
from gangway.wire.console import ConsoleEvent
from orchestrator.config.job import build
from orchestrator.driver.driver import Driver
from orchestrator.driver.ending import Superseded, TrainingFailed
from orchestrator.reporting.board import Board
from orchestrator.run_state.launch import Launch
from orchestrator.run_state.requests import Request
from tests.environment import BUILD
from tests.event_schema import check_event
from tests.unit.fake_gang import DriverDied, FakeGangs, World
from trainers.recorders.dispatch import Recorders
from trainers.recorders.recorder import About

STORAGE = BUILD / "runs"
"""Nothing is written there; but a configuration is refused if this user could not."""
RESTART_DRIVER_S = 2.5
"""Until Ray Train has started another driver."""
WRITE_S = 0.01


class FakeLease:
    def __init__(self, world: World):
        world.driver_term += 1
        self.driver_term, self._world = world.driver_term, world
        self.committed_step: int | None = None

    def superseded(self) -> bool:
        return self._world.driver_term > self.driver_term

    def superseded_by(self, launch_id: str) -> bool:
        return self.superseded()

    def release(self) -> None: ...


class FakeWriter:
    """As `orchestrator.run_state.storage_writer.Writer`; what had not been written when its driver died is lost."""

    def __init__(self, world: World):
        self._world = world
        self._jobs: OrderedDict[str, Callable[[], None]] = OrderedDict()
        self.dead = False
        self._problem: str | None = None

    def put(self, key: str, job: Callable[[], None]) -> None:
        self._world.effect()
        self._jobs.pop(key, None)
        self._jobs[key] = job
        self._world.at(WRITE_S, self._write_next)

    def _write_next(self) -> None:
        if self.dead or not self._jobs:
            return
        if self._world.now_s < self._world.storage_free_s:
            self._world.at(self._world.storage_free_s - self._world.now_s + WRITE_S, self._write_next)
            return
        key, job = self._jobs.popitem(last=False)
        try:
            with self._world.driver_thread():
                job()
        except OSError as error:
            self._problem = str(error)
            self._jobs.setdefault(key, job)  # behind the others
            self._world.at(1.0, self._write_next)
        else:
            self._problem = None

    def problem(self) -> str | None:
        return self._problem

    def flush(self, timeout_s: float) -> bool:
        for _ in self._jobs:
            self._world.at(WRITE_S, self._write_next)
        self._world.advance(timeout_s, until=lambda: not self._jobs)
        return not self._jobs

    def stop(self) -> None:
        self._jobs.clear()


class FakeFolder:
    """As `orchestrator.run_state.run_folder.RunFolder`, in memory."""

    path = str(STORAGE / "fake")

    def __init__(self, world: World):
        self._world, self._files = world, world.files

    def take_requests(self, launch_id: str) -> list[Request]:
        taken, self._files["requests"] = self._files.get("requests", []), []
        return taken

    def salvaged(self, kind: DocumentKind) -> tuple[Any, tuple[str, ...]]:
        return kind.parse(self._files[kind.name], kind.name) if kind.name in self._files else None, ()

    def write(self, kind: DocumentKind, document: Any, name: str | None = None) -> None:
        self._world.write()
        self._files[name or kind.name] = kind.text(document)

    def append(self, name: str, text: str) -> None:
        self._world.write()
        self._files[name] = self._files.get(name, "") + text

    def last_lines(self, name: str) -> list[str]:
        return self._files.get(name, "").splitlines()


class FakeTracker:
    problems: tuple[str, ...] = ()
    identity = "0123456789abcdef"

    def __init__(self, world: World):
        self._published = world.files.setdefault("published", [])

    def log_metrics(self, step: int, metrics: Any, at_s: float | None = None) -> None:
        self._published.append(step)

    def log_artifact(self, path: str, folder: str = "") -> None: ...

    def close(self, timeout_s: float, status: str) -> None: ...


class FakeReporter:
    """As `orchestrator.driver.ray_train.Reporter`."""

    def report(self, metrics: dict[str, Any], checkpoint_path: str | None = None) -> None: ...

    def close(self) -> None: ...


def config(hosts: int = 2, spares: int = 0, time_limit: str | None = None, **driver: Any):
    return build(
        {
            "name": "fake",
            "storage": str(STORAGE),
            "global_batch_size": 8 * hosts,
            "max_num_steps": 1000,
            "time_limit": time_limit,
            "hosts": {"count": hosts, "spares": spares},
            "driver": {"precompile": False, **driver},
            "tracking": {"mlflow": False},
        }
    )


class CheckedBoard(Board):
    def post(self, event: ConsoleEvent) -> None:
        check_event(event, "console")
        super().post(event)


class Launched:
    """One launch. `run` starts drivers until one ends with a result, or fails for good."""

    def __init__(self, world: World, *, hosts: int = 2, spares: int = 0, launch_id: str = "launch", **settings: Any):
        self.world, self.board, self.config = world, CheckedBoard(), config(hosts, spares, **settings)
        self.launch_id, self.started_at_s = launch_id, world.clock()
        self.gangs: GangsLike = FakeGangs(world, hosts + spares, hosts)
        self.launch: Launch
        self.num_drivers = 0

    def start_driver(self) -> Driver:
        world = self.world
        self.num_drivers += 1
        self.lost, self.writer = threading.Event(), FakeWriter(world)
        # As `steady_clock` of the real one: it begins where the clock of the machine is, and makes no step.
        ahead_s = world.driver_ahead_s
        self.clock = lambda: world.clock() + ahead_s
        self.launch = Launch(
            FakeFolder(world),  # type: ignore[arg-type]
            self.launch_id,
            self.started_at_s,
            FakeLease(world),  # type: ignore[arg-type]
            self.lost,
            FakeTracker(world),  # type: ignore[arg-type]
            self.clock,
            self.writer,  # type: ignore[arg-type]
            monotonic=lambda: world.now_s,
        )
        recorders = Recorders((), About("fake", FakeFolder.path, {}), lambda note: None)
        self.driver = Driver(
            self.config,
            self.launch,
            self.board,
            FakeReporter(),
            recorders,
            gangs=self.gangs,
            clock=self.clock,
            monotonic=lambda: world.now_s,
            sleep=world.sleep,
        )
        return self.driver

    def run(self, stored: bool = True) -> dict[str, Any]:
        """The result of the driver that ended the launch. Raises TrainingFailed, or Superseded. `stored`: all of it is."""
        while True:
            try:
                result = self.start_driver().run()
                assert not stored or self.launch.flush(600.0)
                return result
            except DriverDied:
                self.writer.dead = True
                self.world.advance(RESTART_DRIVER_S)

    def kinds(self) -> list[str]:
        return [str(incident.kind) for incident in self.launch.progress.incidents]

    def told(self) -> list[ConsoleEvent]:
        return self.board.read(0, 0.0)[1]


def end_of(launched: Launched, stored: bool = True) -> tuple[str, Any]:
    """(how it ended, the result or the reason)."""
    try:
        return "finished", launched.run(stored)
    except TrainingFailed as error:
        return "failed", str(error)
    except Superseded as error:
        return "superseded", str(error)
