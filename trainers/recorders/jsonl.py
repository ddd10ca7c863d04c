"""JSON lines: `metrics.jsonl` in the run's folder, one object for each publish."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainers.recorders.recorder import About, Distribution

FILE = "metrics.jsonl"


class JsonLines:
    """`{"t": unix time, "step": ..., "metrics": {...}, "distributions": {...}}`. Numbers that are not finite are null.

    Each number is there once: of a step that comes again after a restart, the file keeps what it has. A line that a process left
    unfinished is closed, and is no JSON.
    """

    def __init__(self, about: About):
        path = Path(about.folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self._last_step: dict[str, int] = {}
        for line in read(path):
            self._last_step |= dict.fromkeys((*line["metrics"], *line.get("distributions", ())), line["step"])
        self._file = path.open("ab", buffering=0)
        self._torn = path.stat().st_size > 0 and not _ends_with_newline(path)

    def record(self, step: int, metrics: Mapping[str, float], distributions: Mapping[str, Distribution]) -> None:
        numbers = {name: _finite(value) for name, value in metrics.items() if self._is_new(name, step)}
        shapes = {name: shape._asdict() for name, shape in distributions.items() if self._is_new(name, step)}
        if not numbers and not shapes:
            return
        line: dict[str, Any] = {"t": time.time(), "step": step, "metrics": numbers}
        if shapes:
            line["distributions"] = shapes
        self._append(json.dumps(line).encode() + b"\n")
        self._last_step |= dict.fromkeys((*numbers, *shapes), step)

    def close(self) -> None:
        self._file.close()

    def _append(self, data: bytes) -> None:
        data = b"\n" + data if self._torn else data
        self._torn = True  # until all of it is written: a disk may be full
        while data:
            data = data[self._file.write(data) :]
        self._torn = False

    def _is_new(self, name: str, step: int) -> bool:
        return step > self._last_step.get(name, -1)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of such a file, of one that is not there none."""
    if not path.exists():
        return
    with path.open() as file:
        for text in file:
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                continue  # left unfinished


def _finite(value: float) -> float | None:
    return value if value - value == 0 else None


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
