"""Decides what is due at which step, from the settings alone and so alike on all hosts; and finds the end of finite data.

A *step* is a batch drawn, whether or not its update was applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gangway.stop_reason import StopReason
from trainers.config import CheckpointConfig, EvaluationConfig, PreviewConfig
from trainers.loop.inflight import LOOK_AHEAD_STEPS, Agreed
from trainers.runtime import multihost


@dataclass(frozen=True)
class Epochs:
    """The epochs of a data set, counted from 0. Data of unknown length (0 samples) is one epoch."""

    num_samples: int
    global_batch_size: int
    batches: Callable[[], int | None] = lambda: None
    """Of a user's own loader: the number of batches of an epoch, as soon as it is known."""

    def at(self, step: int) -> float:
        """Returns how many epochs have passed, with the fraction of the present one."""
        if batches := self.batches():
            return step / batches
        return step * self.global_batch_size / (self.num_samples or math.inf)

    def begun_at(self, step: int) -> range:
        """Returns the epochs that begin with the batch drawn at `step`."""
        return range(self._of(step - 1) + 1, self._of(step) + 1)

    def ended_at(self, step: int) -> range:
        """Returns the epochs that the last batch before `step` completed."""
        return range(self._of(step - 1), self._of(step))

    def completed_multiple(self, every: int, step: int) -> bool:
        """Whether the last batch before `step` brought the number of completed epochs to a multiple of `every`, or past one."""
        return self._of(step) // every > self._of(step - 1) // every

    def _of(self, batch_index: int) -> int:
        """Returns the epoch in which a batch begins."""
        if batches := self.batches():
            return batch_index // batches
        if not self.num_samples:
            return min(batch_index, 0)  # -1 before the first batch, so that `begun_at(0)` contains epoch 0
        return batch_index * self.global_batch_size // self.num_samples


@dataclass(frozen=True)
class Due:
    """Decides what is due after the last batch before a step."""

    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    previews: PreviewConfig
    epochs: Epochs
    publish_every_steps: int | None
    publish_every_epochs: int | None = None

    def publish(self, step: int) -> bool:
        return self._is_due(step, self.publish_every_steps, self.publish_every_epochs)

    def save(self, step: int) -> bool:
        config = self.checkpoint
        return self._is_due(step, config.save_steps, config.save_epochs, config.save_after_step, config.save_after_epochs)

    def save_model(self, step: int) -> bool:
        every = self.checkpoint.model_every_steps
        return every is not None and step > 0 and step % every == 0

    def evaluate(self, step: int) -> bool:
        config = self.evaluation
        if step == 0:  # a multiple of every number, but only `at_start` asks for an evaluation there
            return config.at_start
        return self._is_due(step, config.every_steps, config.every_epochs, config.after_step, config.after_epochs)

    def preview(self, step: int) -> bool:
        every = self.previews.every_steps
        return every is not None and step % every == 0

    def _is_due(
        self, step: int, every_steps: int | None, every_epochs: int | None, after_step: int = 0, after_epochs: int = 0
    ) -> bool:
        if step < after_step or self.epochs.at(step) < after_epochs:
            return False
        if every_steps is not None and step % every_steps == 0:
            return True
        return every_epochs is not None and self.epochs.completed_multiple(every_epochs, step)


@dataclass
class EndOfData:
    """The end of finite data. The host whose data ends first asks for a stop ahead of time, so that all hosts stop after the
    same batch."""

    ends: Callable[[int], bool] | None
    """Whether this host has no data for a batch. None: the data never ends."""
    step: int | None = None
    """The index of the first batch without data, as all hosts have agreed."""
    reason: StopReason = StopReason.END_OF_DATA

    def start(self, step: int) -> None:
        """Checks the first steps, at which the data could end before a request reached all hosts. All hosts must call this."""
        if self.ends is not None:
            local_end = next((k for k in range(step, step + LOOK_AHEAD_STEPS) if self.ends(k)), None)
            host_ends = multihost.all_hosts("end of data", local_end)
            self.step = min((end for end in host_ends if end is not None), default=None)

    def in_sight(self, step: int) -> bool:
        """Whether this host must ask for the stop now, for the request to reach all hosts in time."""
        return self.ends is not None and self.ends(step + LOOK_AHEAD_STEPS)

    def observe(self, agreed: Agreed) -> None:
        """Sets the end from the first agreed request; later requests for the same end come from steps in flight."""
        if agreed.stop_reason is StopReason.END_OF_DATA and self.step is None:
            # The host that asked has data up to here (`in_sight`); all hosts read the request at the same step.
            self.step = agreed.batch_index + LOOK_AHEAD_STEPS

    def reached(self, step: int) -> bool:
        return self.step is not None and step >= self.step
