"""Rows with the shapes of the data, where the data cannot be read."""

from __future__ import annotations

import numpy as np

from trainers.config.arguments import TrainingArguments


class StandIn:
    """Rows of `sequence_length` + 1 tokens, all 0: of one document, as packed rows are if `data` packs."""

    takes_any_index = True

    def __init__(self, arguments: TrainingArguments):
        config = arguments.data
        places = config.sequence_length + 1
        self._row = {"tokens": np.zeros(places, np.int32), "sample_id": np.zeros((), np.int32)}
        if config.packing is not None:
            self._row |= {"segments": np.ones(places, np.int32), "positions": np.arange(places, dtype=np.int32)}
        if config.packing is not None or config.mixture:
            self._row |= {"token_weight": np.ones(places, np.float32), "source": np.zeros((), np.int32)}

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._row
