"""The order of the examples: every epoch has a permutation of its own, which depends on the seed alone, on any machine and with
any version of NumPy."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

ROUNDS = 4
"""Of Grain's shuffle of indices."""
FEW = 1024
"""Grain's shuffle of fewer indices takes longer than sorting them: of two indices it takes 6 ms."""

KEPT = 1 << 15
"""How many orders of few indices are kept: one for each length of the documents of each source. 64 MB at most."""


def shuffled(index: int, size: int, *key: int) -> int:
    """Returns the place of `index` in a permutation of `size` numbers."""
    if size <= FEW:
        return int(_order_of_few(size, *key)[index])
    # Only here: other data needs no Grain.
    from grain.experimental import index_shuffle

    return int(index_shuffle(index, max_index=size - 1, seed=_number(*key), rounds=ROUNDS))


@functools.lru_cache(maxsize=KEPT)
def _order_of_few(size: int, *key: int) -> np.ndarray:
    return order(size, *key).astype(np.int16)


def order(size: int, *key: int) -> np.ndarray:
    """Returns a permutation int64[size]."""
    # Not by NumPy's generators, which may change: a run must go on with the order that it began with.
    return np.argsort(digests(size, *key), kind="stable")


def digests(size: int, *key: int) -> np.ndarray:
    """Returns uint64[size]: a digest of each index (SplitMix64; Steele, Lea and Flood, 2014)."""
    x = (np.arange(size, dtype=np.uint64) + np.uint64(_number(*key) << 32)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def held_out(number: int, num_held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the indices to train on, those that are held out), each in order, of `number` things. Which are held out depends
    on nothing but how many there are: it is the same on every machine, with any seed. They are a random choice: the last ones
    of data in order of its classes would be of one class."""
    by_digest = np.argsort(digests(number), kind="stable")
    return np.sort(by_digest[num_held_out:]), np.sort(by_digest[:num_held_out])


def _number(*key: int) -> int:
    """Returns a digest of the key, below 2^32."""
    return int.from_bytes(hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=4).digest(), "little")


class EpochOrder:
    """The examples of one epoch after the other. Takes any index from 0 on; `len` is the number of examples of one epoch."""

    takes_any_index = True

    def __init__(self, examples: Any, seed: int, *, shuffle: bool):
        self.examples, self._seed, self._shuffle = examples, seed, shuffle

    def _in_order(self, examples: Any) -> Any:
        # Only here: training on data of one's own needs no Grain, and its import, of a second, belongs beside the compilation.
        import grain

        order = grain.MapDataset.source(examples)
        if self._shuffle:
            order = order.seed(self._seed).shuffle()
        # After the shuffle: Grain then shuffles each repetition anew, with a seed made of `seed` and the number of the epoch.
        return order.repeat(None)

    @functools.cached_property
    def _order(self) -> Any:
        return self._in_order(self.examples)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        return self._order[index]

    def where_is(self, index: int) -> str:
        return where_is(self.examples, int(self._in_order(range(len(self)))[index]))


def where_is(data: Any, index: int) -> str:
    """Returns which example of the data has this index, for errors."""
    own = getattr(data, "where_is", None)
    return f"example {index} of the data ({type(data).__name__})" if own is None else own(index)
