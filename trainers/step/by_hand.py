"""The compiled steps as functions (state, batch), for a loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trainers.metrics.accumulator import Layout, MetricSums
from trainers.metrics.publisher import with_perplexity
from trainers.protocol import Batch
from trainers.runtime.executables import Program
from trainers.step.state import TrainState

BY_HAND = 2
COUNTED = "counted/"


class StepProgram(Program):
    """A compiled step. The loop calls it with all that it needs; with (state, batch) alone it does the same, and waits.

    `batch` is one that the trainer's loader gives: leaves [micro-batches, rows, ...]. A train step returns (state, metrics), and
    uses up the state that it gets. An eval step returns metrics. All hosts must call it alike.
    """

    by_hand: Callable[[Callable[..., Any], TrainState, Batch], Any] | None = None
    keeping: Callable[[], Program] | None = None
    """Returns the same step as a program that leaves its state as it is, for snapshots. Once this one is prepared."""

    def __call__(self, *args: Any) -> Any:
        if len(args) == BY_HAND and self.by_hand is not None:
            return self.by_hand(super().__call__, *args)
        return super().__call__(*args)


def train_by_hand(layout: Layout, no_sums: Callable[[], MetricSums], no_requests: Callable[[], Any]) -> Any:
    """Returns what `StepProgram.by_hand` is for a train step with these metrics."""

    def step(compiled: Callable[..., Any], state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, float]]:
        output = compiled(state, no_sums(), batch, no_requests())
        return output.state, with_perplexity(layout.read(np.asarray(output.step_metrics)), layout)

    return step


def eval_by_hand(layout: Layout, no_sums: Callable[[], MetricSums]) -> Any:
    """Returns what `StepProgram.by_hand` is for an eval step with these metrics."""

    def step(compiled: Callable[..., Any], state: TrainState, batch: Batch) -> dict[str, float]:
        metrics = layout.read(np.asarray(compiled(state, no_sums(), batch)))
        return with_perplexity({name: value for name, value in metrics.items() if not name.startswith(COUNTED)}, layout)

    return step
