"""A training process as an agent of the orchestrator starts it (`trainers.worker`), without the orchestrator: prepared as a warm
standby, given its orders, killed, followed by its events."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from trainers.config.arguments import TrainingArguments
from trainers.settings import ARGUMENTS_CLASS

LOG_SHOWN = 2000
"""How many of the last letters that a process printed are part of the error about its end."""


class WorkerFailed(Exception):
    """A training process ended before it was done, or does not say what is waited for."""


class Worker:
    """One process, which begins its preparation at once. It is killed at the end of the `with`."""

    def __init__(self, arguments: TrainingArguments, log: Path, env: Mapping[str, str]):
        self.events: list[dict[str, Any]] = []
        self._changed, self._log, self._ended = threading.Condition(), log, False
        reads, writes = os.pipe()
        with open(log, "w") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainers.worker"],
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.STDOUT,
                pass_fds=(writes,),
                env={**os.environ, **env, "EVENT_FD": str(writes)},
                text=True,
            )
        os.close(writes)
        threading.Thread(target=self._follow, args=(reads,), name="events", daemon=True).start()
        self._tell({"cmd": "prepare", "arguments_class": ARGUMENTS_CLASS, "arguments": dataclasses.asdict(arguments)})

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def start(self, **orders: Any) -> None:
        """Lets the process train, as the only host of its gang."""
        self._tell({"cmd": "start", "host": 0, "num_hosts": 1, "coordinator": "127.0.0.1:0", "generation": 0, **orders})

    def save(self) -> None:
        self._tell({"cmd": "save"})

    def kill(self) -> None:
        """Sends SIGKILL, and waits until the process is gone."""
        self._process.kill()
        self._process.wait()

    def wait_for(self, kind: str, such: Callable[[dict[str, Any]], bool] = lambda event: True) -> dict[str, Any]:
        """Returns the first event of this kind, and such. Raises WorkerFailed if the process ends without it."""

        def found() -> dict[str, Any] | None:
            return next((event for event in self.of(kind) if such(event)), None)

        with self._changed:
            self._changed.wait_for(lambda: self._ended or found() is not None)
            if (event := found()) is not None:
                return event
        raise WorkerFailed(self._why())

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["ev"] == kind]

    def phases_s(self) -> dict[str, float]:
        """Returns the seconds of each phase from its orders to the end of the first step."""
        first = self.wait_for("first_step")["t"]
        entered = [(event["phase"], event["t"]) for event in self.of("phase") if event["t"] <= first]
        ends = [*(began for _, began in entered[1:]), first]
        named = [("first step" if phase == "train" else phase, began) for phase, began in entered]
        return {phase: end - began for (phase, began), end in zip(named, ends, strict=True)}

    def losses(self) -> dict[int, str]:
        """Returns the loss of each step, every bit of it."""
        return {event["step"]: event["metrics"]["loss"].hex() for event in self.of("metrics") if "loss" in event["metrics"]}

    def _tell(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerFailed(self._why()) from error

    def _follow(self, reads: int) -> None:
        with os.fdopen(reads) as lines:
            for line in lines:
                with self._changed:
                    self.events.append({"t": time.time(), **json.loads(line)})
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _why(self) -> str:
        if raised := self.of("exception"):
            return f"{raised[-1]['type']}: {raised[-1]['message']}"
        return f"the training process ended early: {self._log.read_text(errors='replace')[-LOG_SHOWN:].strip()}"


def trained(arguments: TrainingArguments, log: Path, env: Mapping[str, str], **orders: Any) -> Worker:
    """Returns a process that has trained to its end. Raises WorkerFailed."""
    with Worker(arguments, log, env) as worker:
        worker.start(**orders)
        worker.wait_for("done")
        return worker
