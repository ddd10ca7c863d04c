"""Data that can only be read from its beginning, or has a state."""

from __future__ import annotations

import time

import jax
import numpy as np

from tests.programs.tiny import Numbers
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.config.arguments import TrainingArguments
from trainers.protocol import TrainerConfigureDataloaderOutput


class Stream:
    """As Numbers, in order. It ends after `num_examples`, on a host other than the first after `num_elsewhere`."""

    def __init__(self, num_examples: int, num_elsewhere: int | None = None):
        self.num_examples, self.num_elsewhere = num_examples, num_elsewhere or num_examples
        self.numbers, self.read = Numbers(10**6, 8), 0

    def __iter__(self):
        for index in range(self.num_examples):
            # Only there: before it has joined, a process does not know which host it is.
            if index == self.num_elsewhere and jax.process_index() > 0:
                return
            self.read += 1
            yield {"tokens": self.numbers[index]["tokens"]}


def uneven(arguments: TrainingArguments):
    return Stream(90, 70), Numbers(21, 8)


def even(arguments: TrainingArguments):
    return Stream(70), Numbers(21, 8)


class Slow(Numbers):
    """Its examples take their time on hosts other than the first."""

    def __getitem__(self, index):
        # The first is read for its shapes, before the process has joined and knows which host it is.
        if index > 0 and jax.process_index() > 0:
            time.sleep(0.05)
        return super().__getitem__(index)


def slow_elsewhere(arguments: TrainingArguments):
    return Slow(96, 8), Numbers(21, 8)


class Drawn:
    """Batches of this host, drawn with a seed of its own: nothing but its state, or drawing again, finds a place in it."""

    def __init__(self, seed: int, num_rows: int):
        self.num_rows, self.read, self.generator = num_rows, 0, np.random.default_rng(seed)

    def __iter__(self):
        return self

    def __next__(self):
        self.read += 1
        starts = self.generator.integers(0, 200, self.num_rows)
        return {"tokens": (starts[:, None] + np.arange(9)).astype(np.int32)}

    def get_state(self):
        return self.generator.bit_generator.state

    def set_state(self, state):
        self.generator.bit_generator.state = state


class OwnStreams(BaseTrainer):
    """Each host reads data of its own."""

    def configure_dataloaders(self):
        self.stream = Drawn(jax.process_index(), self.arguments.global_batch_size // jax.process_count())
        return TrainerConfigureDataloaderOutput(self.stream, None)

    def on_training_end(self, state):
        runtime.current().note(f"drawn here: {self.stream.read}")
        return state
