"""The first line of a command, at once: before it imports what takes long. Needs nothing but the standard library."""

from __future__ import annotations

import sys
from typing import TextIO

CLOCK_WIDTH = 7
"""Columns of the time before each line of a log."""
TERMINAL_CLOCK_WIDTH = 9


def say(line: str, *, stream: TextIO | None = None, clock: bool = False) -> None:
    """Prints the line to `stream` (default: standard output); `clock`: with the time 0:00 in front, as a console prints its
    lines."""
    stream = sys.stdout if stream is None else stream
    width = TERMINAL_CLOCK_WIDTH if stream.isatty() else CLOCK_WIDTH
    print(f"{'0:00':>{width}}  {line}" if clock else line, file=stream, flush=True)
