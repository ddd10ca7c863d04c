"""Runs the real training process on several local hosts without Ray.

Its imports are made once, and what it compiles is kept, for all tests of a session: see `session`."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cluster.agent import machine
from cluster.agent.child_process import ChildProcess, ExitStatus, child_env
from cluster.hosts.config import HostsConfig
from cluster.hosts.process_env import process_env
from tests import ROOT
from tests.environment import QUICK_TO_COMPILE, as_users_compile
from tests.event_schema import check_event
from tests.multihost.fork_server import ForkServer, settings_of_jax
from tests.programs.processes import PATIENCE_S
from trainers.config.arguments import TrainingArguments

NUM_SERVERS = 3
"""Each has a hash seed of its own: what hosts do, and what a run and its replay do, must not depend on the order of a set."""


class Session:
    """Fork servers, and the folder of JAX's compile cache."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.cache = str(folder)
        self._stack, self._servers, self._turns = stack, {}, itertools.count()

    def spawn(self, env: dict[str, str], **how: Any) -> ChildProcess:
        """By a server that imported JAX with these settings: they cannot be changed after."""
        key = (next(self._turns) % NUM_SERVERS, *sorted(settings_of_jax(env).items()))
        if key not in self._servers:
            self._servers[key] = ForkServer(env)
            self._stack.callback(self._servers[key].close)
        return self._servers[key].spawn(env=env, **how)


@contextmanager
def session(folder: Path) -> Iterator[None]:
    """What all processes share that are started in this context."""
    global shared  # noqa: PLW0603
    with ExitStack() as stack:
        shared = Session(folder, stack)
        yield


shared: Session


class Host:
    """One training process and everything it reported."""

    def __init__(self, child: ChildProcess):
        self.child, self.events, self.exit = child, [], None
        self.changed = threading.Condition()
        child.watch(self._record, self._ended)

    def wait_for(self, kind: str) -> dict[str, Any]:
        """The first event of this kind; fails the test if the process ends without it."""
        with self.changed:
            self.changed.wait_for(lambda: self.exit is not None or self.of(kind), PATIENCE_S)
            assert self.of(kind), f"no {kind!r} event; exit {self.exit}; told {self.events[-3:]}; printed {self.child.log_tail()}"
            return self.of(kind)[0]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["ev"] == kind]

    def _record(self, event: dict[str, Any]) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def _ended(self, how: ExitStatus) -> None:
        with self.changed:
            self.exit = how
            self.changed.notify_all()


def start(
    arguments: TrainingArguments,
    folder: Path,
    *,
    hosts: int,
    devices_per_host: int,
    env: Mapping[str, str] | None = None,
    quickly_compiled: bool = True,
    **orders: Any,
) -> list[Host]:
    """A generation: the hosts have their orders when this returns. The caller's thread must outlive them."""
    config = HostsConfig(count=hosts, devices_per_host=devices_per_host)
    folder.mkdir(parents=True, exist_ok=True)
    preparation = {
        "cmd": "prepare",
        "arguments_class": "trainers.config.arguments:TrainingArguments",
        "arguments": dataclasses.asdict(arguments),
    }
    made = []
    for index in range(hosts):
        given = {"GANGWAY_PROGRAMS": str(folder / "programs"), "PYTHONPATH": str(ROOT), **(env or {})}
        own = {**process_env(config, index, shared.cache), **given}
        inherited = {**os.environ, "XLA_FLAGS": " ".join(QUICK_TO_COMPILE)}
        if not quickly_compiled:
            inherited |= as_users_compile(inherited)
        log = str(folder / f"host-{index}.log")
        made.append(Host(shared.spawn(child_env(inherited, own), first_line=preparation, log_path=log)))
    coordinator = f"127.0.0.1:{machine.free_port()}"
    for index, host in enumerate(made):
        host.wait_for("warm")
        where = {"host": index, "num_hosts": hosts, "coordinator": coordinator}
        told = {**where, **orders}
        assert host.child.send(told if "cmd" in orders else {"cmd": "start", "generation": 0, **told})
    return made


def run(arguments: TrainingArguments, folder: Path, *, hosts: int, devices_per_host: int, **how: Any) -> list[Host]:
    """Runs to the end; every process must end by itself with status 0."""
    made = start(arguments, folder, hosts=hosts, devices_per_host=devices_per_host, **how)
    return to_the_end(made)


def to_the_end(made: list[Host]) -> list[Host]:
    for host in made:
        host.wait_for("done")
        for event in host.events:
            check_event(event, "process")
    for host in made:
        assert host.child.wait_gone(PATIENCE_S)
        assert host.exit.code == 0, (host.exit, host.child.log_tail())
    return made


def kill(made: list[Host]) -> None:
    for host in made:
        host.child.kill()
        assert host.child.wait_gone(PATIENCE_S)


def losses(host: Host) -> dict[int, float]:
    return {e["step"]: e["metrics"]["loss"] for e in host.of("metrics") if "loss" in e["metrics"]}


def result(host: Host) -> dict[str, Any]:
    return host.wait_for("done")["result"]
