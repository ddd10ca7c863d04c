"""TensorBoard: event files below `tensorboard` in the run's folder. `tensorboard --logdir RUN/tensorboard` shows them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gangway.published import Distribution
from trainers.recorders.recorder import About

FOLDER = "tensorboard"
FLUSH_S = 10


class TensorBoard:
    """Writes a file for each start. When steps are replayed after a restart, TensorBoard shows the newest values."""

    def __init__(self, about: About):
        self._folder = str(about.output_folder(FOLDER))
        self._writer: Any = None
        self._void_from: int | None = None
        """The first step of which the values in earlier files are no longer true; None: of those that come again."""

    def record(self, step: int, metrics: Mapping[str, float], distributions: Mapping[str, Distribution]) -> None:
        if self._writer is None:
            first = step if "loss" in metrics else step + 1
            self._writer = self._open(first if self._void_from is None else min(first, self._void_from))
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        for name, shape in distributions.items():
            self._writer.add_histogram_raw(name, **_sums(shape), global_step=step)

    def go_back(self, step: int) -> None:
        # The next file makes what follows `step` in this one void.
        self.close()
        self._writer, self._void_from = None, step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, first_step: int) -> Any:
        """Opens a file. From `first_step` on, what earlier files contain is void. An evaluation comes after the training of its
        step."""
        from tensorboardX import SummaryWriter

        # Its own file names have seconds only: a second start within one would overwrite the file of the first.
        return SummaryWriter(self._folder, purge_step=first_step, flush_secs=FLUSH_S, filename_suffix=f".{time.time_ns()}")


def _sums(shape: Distribution) -> dict[str, Any]:
    """Returns the fields of a TensorBoard histogram."""
    num = sum(shape.counts)
    width = (shape.max - shape.min) / len(shape.counts)
    return {
        "min": shape.min,
        "max": shape.max,
        "num": num,
        "sum": shape.mean * num,
        # The mean of the squares is the variance plus the square of the mean.
        "sum_squares": (shape.std**2 + shape.mean**2) * num,
        "bucket_limits": [shape.min + width * (index + 1) for index in range(len(shape.counts))],
        "bucket_counts": list(shape.counts),
    }
