"""Pairs of random tokens for the models of `tests/unit/data/parity`, with completions of different lengths."""

from __future__ import annotations

import numpy as np

LENGTH, PROMPT = 8, 3


class Pairs:
    def __init__(self, num_examples: int, seed: int, references: bool):
        numbers = np.random.default_rng(seed)
        self.tokens = numbers.integers(2, 60, (num_examples, 2, LENGTH + 1)).astype(np.int32)
        self.tokens[:, 1, :PROMPT] = self.tokens[:, 0, :PROMPT]
        # The tokens of a completion: 1 to 6.
        ends = PROMPT + numbers.integers(1, LENGTH + 2 - PROMPT, (num_examples, 2, 1))
        places = np.arange(LENGTH + 1)
        self.weight = ((places >= PROMPT) & (places < ends)).astype(np.float32)
        self.references = -numbers.uniform(1, 20, (num_examples, 2)).astype(np.float32) if references else None

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        pair = {"tokens": self.tokens[index], "token_weight": self.weight[index]}
        return pair if self.references is None else {**pair, "ref_logps": self.references[index]}


def datasets(arguments):
    with_columns = arguments.preference.reference == "columns"
    return Pairs(64, 1, with_columns), Pairs(20, 2, with_columns)
