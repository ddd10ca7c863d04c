"""The order of the examples: every epoch has an order of its own, which depends on the seed alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class EpochOrder:
    """The examples of one epoch after the other. Takes any index from 0 on; `len` is the number of examples of one epoch."""

    takes_any_index = True

    def __init__(self, examples: Any, seed: int, *, shuffle: bool):
        # Only here: training on data of one's own needs no Grain.
        import grain

        def in_order(examples: Any) -> Any:
            order = grain.MapDataset.source(examples)
            if shuffle:
                order = order.seed(seed).shuffle()
            # After the shuffle: Grain then shuffles each repetition anew, with a seed made of `seed` and the number of the epoch.
            return order.repeat(None)

        self._examples, self._order = examples, in_order(examples)
        self._num_examples, self._numbers = len(examples), in_order(range(len(examples)))

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        return self._order[index]

    def where_is(self, index: int) -> str:
        """Returns which example this is, for errors."""
        number = int(self._numbers[index])
        where_is = getattr(self._examples, "where_is", None)
        return f"example {number} of the data" if where_is is None else where_is(number)
