"""How far a training in this process is, for who waits for it: one line that changes, on a terminal and in a notebook;
elsewhere a line for each publish.

A carriage return does that in both, and needs no library: those for bars want widgets in a notebook.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO, cast

from gangway import published, terminal

SHOWN = ("loss", "accuracy", "error", "eval_loss", "eval_accuracy", "eval_error")


class Progress:
    """`max_steps`: None if it is not known. Used from one thread."""

    def __init__(self, stream: TextIO | None, max_steps: int | None, clock: Callable[[], float] = time.monotonic):
        # A line that cannot be written must not end the training.
        self._stream, self._max_steps, self._clock = cast(TextIO, terminal.shown(stream)), max_steps, clock
        # A notebook's stream is no terminal, and takes a carriage return all the same.
        self._live = self._stream.isatty() or "ipykernel" in sys.modules
        self._first: tuple[int, float] | None = None
        self._latest: dict[str, float] = {}
        self._line = ""

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        self._latest |= metrics
        self._first = self._first or (step, self._clock())
        further = (name for name in published.own(self._latest) if not name.endswith(published.RATES))
        names = dict.fromkeys((*SHOWN, *further))
        shown = [f"{name} {self._latest[name]:.4g}" for name in names if name in self._latest]
        self._show("  ".join([f"step {step}" + (f"/{self._max_steps}" if self._max_steps else ""), *shown, *self._left(step)]))

    def tell(self, text: str) -> None:
        """Shows a line of its own, which stays."""
        shown, self._line = self._line, ""
        if self._live and shown:
            self._stream.write("\r" + " " * len(shown) + "\r")
        print(text, file=self._stream, flush=True)
        if self._live and shown:
            self._show(shown)

    def close(self) -> None:
        if self._live and self._line:
            print(file=self._stream, flush=True)
        self._line = ""

    def _show(self, line: str) -> None:
        if not self._live:
            print(line, file=self._stream, flush=True)
            return
        # Padded: a shorter line would leave the end of the one before.
        self._stream.write("\r" + line.ljust(len(self._line)))
        self._stream.flush()
        self._line = line

    def _left(self, step: int) -> list[str]:
        assert self._first is not None
        first_step, first_s = self._first
        if self._max_steps is None or step <= first_step or step >= self._max_steps:
            return []
        left_s = (self._clock() - first_s) / (step - first_step) * (self._max_steps - step)
        return [f"{left_s:.0f} s left"]
