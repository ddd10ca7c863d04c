"""Rows with the shapes of the data, where the data cannot be read."""

from __future__ import annotations

import numpy as np

from trainers.config.arguments import TrainingArguments


class StandIn:
    """Examples of `sequence_length` + 1 tokens, all 0."""

    takes_any_index = True

    def __init__(self, arguments: TrainingArguments):
        self.data = arguments.data

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"tokens": np.zeros(self.data.sequence_length + 1, np.int32), "sample_id": np.zeros((), np.int32)}
