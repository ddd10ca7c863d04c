"""Data that can only be read from its beginning."""

from __future__ import annotations

import jax

from tests.programs.tiny import Numbers
from trainers.config.arguments import TrainingArguments


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
