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

        self._examples, self._order, self._num_examples = examples, in_order(examples), len(examples)
        self._in_order = in_order

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        return self._order[index]

    def where_is(self, index: int) -> str:
        return where_is(self._examples, int(self._in_order(range(len(self)))[index]))


def where_is(data: Any, index: int) -> str:
    """Returns which example of the data has this index, for errors."""
    own = getattr(data, "where_is", None)
    return f"example {index} of the data ({type(data).__name__})" if own is None else own(index)
