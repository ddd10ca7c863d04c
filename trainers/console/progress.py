"""The progress of a command over many records: a bar on a terminal, or else lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO, cast

from gangway.terminal import shown

PLAIN_EVERY_S = 5.0
"""The time between two lines where there is no terminal."""
Progress = Callable[[int, int, int], None]
"""(records done, units made of them in this process, records that earlier processes had done)"""


def progress_on(stream: TextIO, name: str, total: int, unit: str) -> AbstractContextManager[Progress]:
    """Returns what shows the progress over `total` records, and how many of `unit`, such as tokens, a second makes."""
    stream = cast(TextIO, shown(stream))
    if stream.isatty():
        return bar(stream, name, total, unit)
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


@contextmanager
def bar(stream: TextIO, name: str, total: int, unit: str) -> Iterator[Progress]:
    """Shows a bar on a terminal, as long as the block lasts."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Screen

    begun_s = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Screen(*columns, TimeRemainingColumn(), console=Console(file=stream, highlight=False)) as screen:
        task = screen.add_task(name, total=total, rate="")

        def progress(done: int, num_units: int, before: int) -> None:
            per_s = num_units / max(time.monotonic() - begun_s, 1e-3)
            screen.update(task, completed=done, rate=f"{per_s:,.0f} {unit}/s")

        yield progress
