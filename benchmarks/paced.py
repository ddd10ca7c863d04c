"""A trainer that takes as many steps as each line of its standard input says, as the loop by hand does (`benchmarks.by_hand`)."""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.by_hand import FIRST_STEP, TOOK
from trainers.base import BaseTrainer
from trainers.callbacks import Callback, RunInfo


class Pace(Callback):
    def __init__(self) -> None:
        self.steps_left, self.began_s = 1, 0.0

    def on_step_end(self, state: RunInfo, *, loss: Any, **kwargs: Any) -> None:
        self.steps_left -= 1
        if self.steps_left:
            return
        last = float(loss)  # waits for the step
        seconds = time.perf_counter() - self.began_s
        print(f"{TOOK} {seconds}" if self.began_s else f"{FIRST_STEP} {last:.4f}", flush=True)
        self.steps_left = int(sys.stdin.readline())
        self.began_s = time.perf_counter()


class PacedTrainer(BaseTrainer):
    def post_init(self) -> None:
        self.add_callback(Pace())
