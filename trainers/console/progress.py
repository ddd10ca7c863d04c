"""The progress of a command over many records: a bar on a terminal, or else lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO, cast

from gangway.terminal import shown

PLAIN_EVERY_S = 5.0
"""The time between two lines where there is no terminal."""
Progress = Callable[[int, int, int], None]
"""(records done, units made of them in this process, records that earlier processes had done)"""


def progress_on(stream: TextIO, name: str, total: int, unit: str) -> AbstractContextManager[Progress]:
    """Returns what shows the progress over `total` records, and how many of `unit`, such as tokens, a second makes."""
    stream = cast(TextIO, shown(stream))
    if stream.isatty():
        return Bar(stream, name, total, unit)
    return nullcontext(plain_lines(stream, name, total, unit, time.monotonic))


def plain_lines(stream: TextIO, name: str, total: int, unit: str, clock: Callable[[], float]) -> Progress:
    begun_s, last_s = clock(), float("-inf")

    def progress(done: int, num_units: int, before: int) -> None:
        nonlocal last_s
        now_s = clock()
        if now_s - last_s < PLAIN_EVERY_S and done < total:
            return
        last_s = now_s
        per_s = num_units / max(now_s - begun_s, 1e-3)
        kept = f" ({before:,} of them from before)" if before else ""
        print(f"{name}: {done:,} of {total:,} records{kept}, {per_s:,.0f} {unit}/s", file=stream, flush=True)

    return progress


class Bar:
    """A bar on a terminal, as long as it is open."""

    def __init__(self, stream: TextIO, name: str, total: int, unit: str):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Screen

        self._begun_s, self._unit = time.monotonic(), unit
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        self._screen = Screen(*columns, TimeRemainingColumn(), console=Console(file=stream, highlight=False))
        self._task = self._screen.add_task(name, total=total, rate="")

    def __enter__(self) -> Progress:
        self._screen.start()
        return self._show

    def __exit__(self, *error: Any) -> None:
        self._screen.stop()

    def _show(self, done: int, num_units: int, before: int) -> None:
        per_s = num_units / max(time.monotonic() - self._begun_s, 1e-3)
        self._screen.update(self._task, completed=done, rate=f"{per_s:,.0f} {self._unit}/s")
