"""Documents in memory, and datasets that pack them."""

from __future__ import annotations

import numpy as np

from trainers.data.documents import Document
from trainers.data.sources.packed import rows_of


class InMemory:
    """Document i of source s is a run of numbers that tells s and i."""

    def __init__(self, lengths, source=0):
        self.lengths, self.source = np.asarray(lengths, np.int32), source

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        tokens = (97 * self.source + 7 * index + np.arange(self.lengths[index])) % 256
        # Of every third document the first half is a prompt.
        prompt = np.arange(len(tokens)) < len(tokens) // 2
        return Document(tokens.astype(np.int32), None if index % 3 else np.where(prompt, 0, 1).astype(np.float32))


def of_mixture(arguments):
    """For `data.dataset`: as many documents of each source of the mixture, of lengths that are not alike."""
    number = max(1, len(arguments.data.mixture))
    made = [np.random.default_rng(source).integers(2, 24, 60 + 20 * source) for source in range(number)]
    return rows_of([InMemory(lengths, source) for source, lengths in enumerate(made)], arguments)
