"""The tensors in a file of safetensors, on a disk or in a bucket: what there is, and one of them or a part of one.

In a bucket the head is read first, and then of a tensor the rows that are asked for: nothing of the file is kept here.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gangway.errors import CheckpointError
from gangway.storage.store import Place, StorageUnavailable

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The names of types in a file of safetensors; those that a parameter may have."""
MAX_HEAD_BYTES = 100_000_000
"""The library takes no longer one."""
READ_FIRST = 1 << 18
"""Bytes: most heads are shorter, and are there with one request."""
PART_BYTES, PARTS_AT_ONCE = 16 << 20, 4


class Header(NamedTuple):
    """What is said of a tensor."""

    dtype: str
    """As the file has it: `BF16`."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Head:
    """What is said at the beginning of a file."""

    metadata: Mapping[str, str]
    headers: Mapping[str, Header]
    """By name, in the order of the file."""
    offsets: Mapping[str, tuple[int, int]]
    """Of a file in a bucket: the first byte of each tensor, and the one after its last."""


_heads: dict[str, Head] = {}
"""Of files in buckets, by URL: a tensor is found by them again."""


def head(path: Place) -> Head:
    """Returns what is in a file. Raises CheckpointError if it is no whole file of safetensors, and OSError."""
    if not path.store.is_local:
        _heads[path.url] = _head_in_bucket(path)
        return _heads[path.url]
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path.path, framework="numpy") as file:
            parts = {name: file.get_slice(name) for name in file.offset_keys()}
            headers = {name: Header(part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
            return Head(file.metadata() or {}, headers, {})
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no whole file of safetensors: {error}") from error


def read(path: Place, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    """Returns the part of a tensor that `index` says, () being all of it. Raises OSError, and what the library raises."""
    if not path.store.is_local:
        return _read_in_bucket(path, name, index)
    from safetensors import safe_open

    with safe_open(path.path, framework="numpy") as file:
        # Without dimensions there is nothing to slice.
        return file.get_slice(name)[index] if index else file.get_tensor(name)


def _head_in_bucket(place: Place) -> Head:
    size = place.size()
    begin = place.part(0, min(size, READ_FIRST))
    length = int.from_bytes(begin[:8], "little")
    if len(begin) < 8 or length > min(size - 8, MAX_HEAD_BYTES):
        raise CheckpointError(f"{place} is no whole file of safetensors: it has {size} bytes, and no head")
    text = begin[8 : 8 + length]
    if len(text) < length:
        text += place.part(8 + len(text), 8 + length)
    try:
        found = json.loads(text)
        metadata = found.pop("__metadata__", {})
        headers = {name: Header(str(one["dtype"]), tuple(map(int, one["shape"]))) for name, one in found.items()}
        spans = {name: one["data_offsets"] for name, one in found.items()}
        offsets = {name: (int(start) + 8 + length, int(stop) + 8 + length) for name, (start, stop) in spans.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{place} is no whole file of safetensors: its head cannot be read ({error!r})") from error
    order = sorted(headers, key=lambda name: offsets[name])
    _check_offsets(place, headers, [(name, *offsets[name]) for name in order], 8 + length, size)
    return Head(metadata, {name: headers[name] for name in order}, offsets)


def _check_offsets(place: Place, headers: Mapping[str, Header], spans: list[tuple[str, int, int]], begin: int, size: int) -> None:
    """Raises CheckpointError unless the tensors lie one after the other, each as long as its shape says, and fill the file."""
    for name, start, stop in spans:
        dtype, shape = headers[name]
        is_long = dtype not in DTYPES or stop - start == math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        if start != begin or stop < start or not is_long:
            raise CheckpointError(f"{place} is no whole file of safetensors: {name} is not where its head says")
        begin = stop
    if begin != size:
        raise CheckpointError(f"{place} is no whole file of safetensors: it has {size} bytes, and its head says {begin}")


def _read_in_bucket(place: Place, name: str, index: tuple[slice, ...]) -> np.ndarray:
    found = _heads.get(place.url) or head(place)
    dtype, shape = found.headers[name]
    start, stop = found.offsets[name]
    rows = range(*index[0].indices(shape[0])) if index else range(0)
    if index and rows.step == 1:  # whole rows lie together
        width = (stop - start) // max(1, shape[0])
        start, stop = start + rows.start * width, start + max(rows.start, rows.stop) * width
        shape, index = (len(rows), *shape[1:]), (slice(None), *index[1:])
    array = np.frombuffer(_bytes(place, start, stop), np.dtype(DTYPES[dtype])).reshape(shape)
    return array[index] if index else array


def _bytes(place: Place, start: int, stop: int) -> bytes:
    starts = range(start, stop, PART_BYTES)

    def one(begin: int) -> Any:
        return place.part(begin, min(begin + PART_BYTES, stop))

    if len(starts) <= 1:
        data = b"".join(map(one, starts))
    else:
        with ThreadPoolExecutor(PARTS_AT_ONCE) as threads:
            data = b"".join(threads.map(one, starts))
    if len(data) != stop - start:
        raise StorageUnavailable(errno.EIO, "the object was replaced while it was read", place.url)
    return data
