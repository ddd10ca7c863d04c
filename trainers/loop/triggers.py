"""What is due at which step, from the settings alone and so the same on all hosts; and where data that ends by itself ends.

A *step* is a batch drawn, whether or not its update was applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from trainers.config import CheckpointConfig, EvaluationConfig, PreviewConfig
from trainers.loop.inflight import LOOK_AHEAD_STEPS, Agreed
from trainers.runtime import multihost
from trainers.runtime.stop_reason import StopReason


@dataclass(frozen=True)
class Epochs:
    """Counted from 0. Data of no known length (0 samples) is one epoch."""

    num_samples: int
    global_batch_size: int

    def at(self, step: int) -> float:
        """How many have passed."""
        return step * self.global_batch_size / (self.num_samples or math.inf)

    def begun_at(self, step: int) -> range:
        """Those that begin with the batch that comes at `step`."""
        return range(self._of(step - 1) + 1, self._of(step) + 1)

    def ended_at(self, step: int) -> range:
        """Those that the last batch before `step` made full."""
        return range(self._of(step - 1), self._of(step))

    def made_full(self, every: int, step: int) -> bool:
        """Whether the last batch before `step` made a number of epochs full that is a multiple of `every`."""
        return self._of(step) // every > self._of(step - 1) // every

    def _of(self, batch_index: int) -> int:
        """That in which a batch begins."""
        if not self.num_samples:
            return min(batch_index, 0)
        return batch_index * self.global_batch_size // self.num_samples


@dataclass(frozen=True)
class Due:
    """After the last batch before a step."""

    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    previews: PreviewConfig
    epochs: Epochs

    def save(self, step: int) -> bool:
        config = self.checkpoint
        return self._now(step, config.save_steps, config.save_epochs, config.save_after_step)

    def evaluate(self, step: int) -> bool:
        config = self.evaluation
        return config.at_start if step == 0 else self._now(step, config.every_steps, config.every_epochs, config.after_step)

    def preview(self, step: int) -> bool:
        every = self.previews.every_steps
        return every is not None and step % every == 0

    def _now(self, step: int, every_steps: int | None, every_epochs: int | None, after_step: int) -> bool:
        if step < after_step:
            return False
        if every_steps is not None and step % every_steps == 0:
            return True
        return every_epochs is not None and self.epochs.made_full(every_epochs, step)


@dataclass
class EndOfData:
    """Of data that ends by itself, on the host where it ends first: told ahead, for all hosts to stop after the same batch."""

    ends: Callable[[int], bool] | None
    """Whether this host has no data for a batch. None: the data never ends."""
    step: int | None = None
    """Of the first batch that there is no data for, as all hosts have agreed."""

    def start(self, step: int) -> None:
        """Looks where it could end too soon for a wish to be heard of in time. All hosts must call this."""
        if self.ends is not None:
            own = next((k for k in range(step, step + LOOK_AHEAD_STEPS) if self.ends(k)), None)
            self.step = min((end for end in multihost.all_hosts("end of data", own) if end is not None), default=None)

    def in_sight(self, step: int) -> bool:
        """Whether this host is to wish for an end."""
        return self.ends is not None and self.ends(step + LOOK_AHEAD_STEPS)

    def hear(self, agreed: Agreed) -> None:
        if agreed.stop_reason is StopReason.END_OF_DATA and self.step is None:
            self.step = agreed.batch_index + LOOK_AHEAD_STEPS

    def reached(self, step: int) -> bool:
        return self.step is not None and step >= self.step
