"""JSON lines: `metrics.jsonl` in the run's folder, or in the one of `recorder_folders`, one object for each publish."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from gangway.published import Distribution
from gangway.storage import documents, durable, json_text, shapes
from gangway.storage.documents import set_aside
from trainers.recorders.recorder import About

FILE = "metrics.jsonl"
LEFT = "metrics.left.jsonl"
"""The lines of courses that training has left."""


class _Line(TypedDict):
    t: float
    step: int
    metrics: dict[str, float | None]
    not_finite: NotRequired[dict[str, str]]
    distributions: NotRequired[dict[str, Any]]


class JsonLines:
    """Writes `{"t": unix time, "step": ..., "metrics": {...}, "distributions": {...}}`. Numbers that are not finite are null, and
    `not_finite` says what they are: `{"loss": "nan"}`.

    Each number is there once: when a step is replayed after a restart, the file keeps what it has. A line that a process left
    unfinished is closed with a newline, and is not valid JSON. When training goes back to take another course, the lines of later
    steps are moved to LEFT.
    """

    def __init__(self, about: About):
        path = about.output_folder() / FILE
        durable.make_folder(path.parent)
        self._path = path
        self._open()

    def record(self, step: int, metrics: Mapping[str, float], distributions: Mapping[str, Distribution]) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items() if self._is_new(name, step)}
        shapes = {name: shape._asdict() for name, shape in distributions.items() if self._is_new(name, step)}
        if not numbers and not shapes:
            return
        line: dict[str, Any] = {"t": time.time(), "step": step, "metrics": numbers}
        if odd := {name: str(float(metrics[name])) for name, number in numbers.items() if number is None}:
            line["not_finite"] = odd
        if shapes:
            line["distributions"] = shapes
        self._append(json_text.dumps(line).encode() + b"\n")
        self._last_step |= dict.fromkeys((*numbers, *shapes), step)

    def go_back(self, step: int) -> None:
        lines = list(read(self._path))
        if not any(line["step"] > step for line in lines):
            return
        self._file.close()
        with durable.appending(self._path.parent / LEFT) as file:
            file.writelines(json_text.dumps(line).encode() + b"\n" for line in lines if line["step"] > step)
        # After those are elsewhere: a process that dies in between loses none.
        durable.write(self._path, "".join(json_text.dumps(line) + "\n" for line in lines if line["step"] <= step))
        self._open()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._last_step: dict[str, int] = {}
        # Of each name by itself: evaluations come separately from the training of the same step.
        for line in read(self._path):
            self._last_step |= dict.fromkeys((*line["metrics"], *line.get("distributions", ())), line["step"])
        if durable.is_in_the_way(self._path):
            set_aside(self._path)
        # Unbuffered: a line is in the file when `record` returns, even if the process is killed then.
        self._file = durable.appending(self._path, buffering=0)
        self._torn = self._path.stat().st_size > 0 and not _ends_with_newline(self._path)

    def _append(self, data: bytes) -> None:
        data = b"\n" + data if self._torn else data
        self._torn = True  # until all of it is written: a disk may be full
        while data:
            # An unbuffered file may take only a part of the bytes.
            data = data[self._file.write(data) :]
        self._torn = False

    def _is_new(self, name: str, step: int) -> bool:
        return step > self._last_step.get(name, -1)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of such a file; none if there is no file. What is no such line is left out."""
    if not path.is_file():
        return
    with durable.reading(path) as file:
        for text in file:
            try:
                line = documents.parse(text, path)
            except documents.DamagedDocument:
                continue  # left unfinished
            if not shapes.problem(_Line, line):
                yield line


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
