"""Runs the real training process, `python -m trainers.worker`, on several local hosts without Ray."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster import ports
from cluster.process import ChildProcess, Exit, child_env, spawn
from cluster.topology import HostsConfig, process_env
from trainers.arguments import TrainingArguments

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240


class Host:
    """One training process and everything it told."""

    def __init__(self, child: ChildProcess):
        self.child, self.events, self.exit = child, [], None
        self.changed = threading.Condition()
        child.watch(self._take, self._ended)

    def wait_for(self, kind: str) -> dict[str, Any]:
        """The first event of this kind; fails the test if the process ends without it."""
        with self.changed:
            self.changed.wait_for(lambda: self.exit is not None or self.of(kind), TIMEOUT_S)
            assert self.of(kind), f"no {kind!r} event; exit {self.exit}; told {self.events[-3:]}; printed {self.child.log_tail()}"
            return self.of(kind)[0]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["ev"] == kind]

    def _take(self, event: dict[str, Any]) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def _ended(self, how: Exit) -> None:
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
    **orders: Any,
) -> list[Host]:
    """A generation: the hosts have their orders when this returns. The caller's thread must outlive them."""
    config = HostsConfig(count=hosts, devices_per_host=devices_per_host)
    folder.mkdir(parents=True, exist_ok=True)
    preparation = {
        "cmd": "prepare",
        "arguments_class": "trainers.arguments:TrainingArguments",
        "arguments": dataclasses.asdict(arguments),
    }
    made = []
    for index in range(hosts):
        own = {**process_env(config, index, str(folder / "cache")), "PYTHONPATH": str(ROOT), **(env or {})}
        inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        log = str(folder / f"host-{index}.log")
        made.append(Host(spawn("trainers.worker", env=child_env(inherited, own), first_line=preparation, log_path=log)))
    coordinator = f"127.0.0.1:{ports.free_port()}"
    for index, host in enumerate(made):
        host.wait_for("warm")
        go = {"cmd": "go", "generation": 0, "host": index, "num_hosts": hosts, "coordinator": coordinator, **orders}
        assert host.child.send(go)
    return made


def run(arguments: TrainingArguments, folder: Path, *, hosts: int, devices_per_host: int, **how: Any) -> list[Host]:
    """Runs to the end; every process must end by itself with status 0."""
    made = start(arguments, folder, hosts=hosts, devices_per_host=devices_per_host, **how)
    return to_the_end(made)


def to_the_end(made: list[Host]) -> list[Host]:
    for host in made:
        host.wait_for("done")
    for host in made:
        assert host.child.wait_gone(TIMEOUT_S)
        assert host.exit.code == 0, (host.exit, host.child.log_tail())
    return made


def kill(made: list[Host]) -> None:
    for host in made:
        host.child.kill()
        assert host.child.wait_gone(TIMEOUT_S)


def losses(host: Host) -> dict[int, float]:
    return {e["step"]: e["metrics"]["loss"] for e in host.of("metrics") if "loss" in e["metrics"]}


def result(host: Host) -> dict[str, Any]:
    return host.wait_for("done")["result"]
