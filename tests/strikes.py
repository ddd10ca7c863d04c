"""Strikes at a running job of the same machine, as soon as it has got far enough."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from orchestrator.reporting.board import Board


class Folder:
    """The folder of orders for `trainers.diagnostics.fault_injection`."""

    def __init__(self, path: Path, step_s: float | None = None):
        """`step_s`: every step takes so much longer, so that a strike has its time."""
        self.path = path
        path.mkdir()
        if step_s is not None:
            (path / "pace.json").write_text(json.dumps({"step_s": step_s}))

    def full_speed(self) -> None:
        """No step takes longer from now on."""
        (self.path / "pace.json").unlink()

    @property
    def env(self) -> dict[str, str]:
        return {"GANGWAY_FAULTS": str(self.path)}

    def order(self, host: int, kind: str, at: int, **more: Any) -> None:
        (self.path / f"host-{host:04d}.json").write_text(json.dumps({"id": kind, "kind": kind, "at": at, **more}))

    def process(self, host: int) -> psutil.Process:
        """The training process that is host `host` now."""
        return psutil.Process(json.loads((self.path / "members" / f"host-{host:04d}.json").read_text())["pid"])

    def agent(self, host: int) -> psutil.Process:
        agent = self.process(host).parent()
        assert agent is not None
        return agent


class Striking(Board):
    """A board that calls `strike(event)` of a thread of its own for the first event that `when(event)` is true of, and so on."""

    def __init__(self, *strikes: tuple[Callable[[dict[str, Any]], bool], Callable[[], Any]]):
        super().__init__()
        self._strikes = list(strikes)

    def post(self, event: dict[str, Any]) -> None:
        super().post(event)
        if self._strikes and self._strikes[0][0](event):
            _, strike = self._strikes.pop(0)
            threading.Thread(target=strike, daemon=True).start()

    @property
    def all_struck(self) -> bool:
        return not self._strikes

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.read(0, 0.0)[1] if event["ev"] == kind]


def step(at_least: int) -> Callable[[dict[str, Any]], bool]:
    """True of the first metrics that are published at this step or later."""
    return lambda event: event["ev"] == "metrics" and event["step"] >= at_least


def checkpoint(at_least: int) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["ev"] == "checkpoint" and event["step"] >= at_least


def recovered(event: dict[str, Any]) -> bool:
    return event["ev"] == "recovered"
