"""Snapshots of a host's part of a state, in memory that outlives its process: how one is written, and how one is read.

A slot is one file in memory (`cluster.agent.snapshot_memory`):

    0       the seal: magic, number, where the header is, how long, a digest of all this and of the header; zeros: nothing is here
    4096    the parts of the arrays, each at a multiple of 4096
    after   the header: what is known when it is sealed (JSON), and the table of the parts, the same for all of a process (JSON)

The seal goes first and comes last: zeros, parts, header, seal. So a process that is killed at any moment leaves a slot that is
whole or has no seal. Every byte that counts is under a digest, and is compared before it is used.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np

PAGE = 4096
SEAL = struct.Struct("<8sQQQQ")
DIGEST = struct.Struct("<Q")
MAGIC = b"GANGSNAP"
CHUNK_BYTES = 1 << 19
"""What is copied and digested at once: it stays in the cache of a core, and other threads run between two."""
MADV_POPULATE_WRITE = 23


class Refused(Exception):
    """A snapshot that cannot be used. The message says which part of it, and why."""


class Part(NamedTuple):
    """What a host has of one array: a block of it."""

    name: str
    dtype: str
    shape: list[int]
    """Of the whole array."""
    block: list[list[int]]
    """(start, stop) of each dimension."""
    offset: int
    num_bytes: int


def table_of(tree: Any) -> list[Part]:
    """Returns the parts of this host, each once. `tree`: arrays, or shapes with shardings."""
    parts, offset = list[Part](), PAGE
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        blocks = [_block(index, leaf.shape) for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()]
        for block in {str(block): block for block in blocks}.values():
            size = int(np.prod([stop - start for start, stop in block], dtype=np.int64)) * leaf.dtype.itemsize
            parts.append(Part(jax.tree_util.keystr(path), str(leaf.dtype), list(leaf.shape), block, offset, size))
            offset += -(-size // PAGE) * PAGE
    return parts


def _block(index: Any, shape: Sequence[int]) -> list[list[int]]:
    return [[*part.indices(size)[:2]] for part, size in zip(index, shape, strict=True)]


def num_bytes_of(table: Sequence[Part]) -> int:
    return PAGE + sum(-(-part.num_bytes // PAGE) * PAGE for part in table)


def views_of(tree: Any, table: Sequence[Part]) -> Iterator[np.ndarray]:
    """Yields the arrays of the table's parts, as bytes. Waits for the device, which may have to send each: one after the
    other, and none is kept."""
    found = dict[tuple[str, str], Any]()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        for shard in leaf.addressable_shards:
            found.setdefault((jax.tree_util.keystr(path), str(_block(shard.index, leaf.shape))), shard.data)
    for part in table:
        yield np.ascontiguousarray(found.pop((part.name, str(part.block)))).reshape(-1).view(np.uint8)


class Writer:
    """Writes snapshots into the slots of this process. `about` is the same for all of them."""

    def __init__(self, files: Sequence[int], table: Sequence[Part], about: Mapping[str, Any]):
        """Takes the memory, and touches it: the first use of a page takes longer than to copy one. Raises OSError."""
        self._table, self._files, self._maps = table, files, list[mmap.mmap]()
        self._same = json.dumps({"about": about, "table": table}).encode()
        self._size = num_bytes_of(table)
        for file in files:
            os.ftruncate(file, max(self._size, os.fstat(file).st_size))  # it cannot shrink
            os.pwrite(file, bytes(PAGE), 0)  # of an earlier training of this process
            mapped = mmap.mmap(file, self._size)
            # A child that the user's code forks would keep it, and then the agent could not seal it.
            mapped.madvise(mmap.MADV_DONTFORK)
            with suppress(OSError):  # a kernel from before 5.14: the copy touches them
                for start in range(0, self._size, CHUNK_BYTES):
                    mapped.madvise(MADV_POPULATE_WRITE, start, min(CHUNK_BYTES, self._size - start))
            self._maps.append(mapped)

    def copy(self, slot: int, views: Iterable[np.ndarray]) -> list[int]:
        """Copies the parts; returns their digests. What was in this slot is no snapshot any more."""
        import xxhash

        os.pwrite(self._files[slot], bytes(PAGE), 0)
        whole, digests = np.frombuffer(self._maps[slot], np.uint8), []
        for view, part in zip(views, self._table, strict=True):
            target, digest = whole[part.offset :][: part.num_bytes], xxhash.xxh3_64()
            for start in range(0, part.num_bytes, CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                np.copyto(target[start : start + CHUNK_BYTES], chunk)
                digest.update(chunk.data)
            digests.append(digest.intdigest())
        return digests

    def seal(self, slot: int, number: int, digests: Sequence[int], told: str) -> None:
        """Makes a snapshot of what was copied. `number`: of two snapshots of one process the greater is the newer. `told` is what
        is known of it, as JSON."""
        now = f'{{"told": {told}, "digests": {json.dumps(digests)}}}'.encode()
        os.pwrite(self._files[slot], now + self._same, self._size)
        first = SEAL.pack(MAGIC, number, self._size, len(now), len(self._same))
        os.pwrite(self._files[slot], first + _digest(first, now + self._same), 0)


class Snapshot:
    """A snapshot in a slot that nobody writes to any more. Its parts are not read yet, and not compared."""

    def __init__(self, file: int):
        """Raises Refused if it is damaged; with an empty message if there is none, or it was not finished."""
        first = os.pread(file, SEAL.size, 0)
        if len(first) < SEAL.size or not first.strip(b"\0"):
            raise Refused("")
        magic, self.number, size, now, same = SEAL.unpack(first)
        header = os.pread(file, now + same, size) if magic == MAGIC and now + same <= os.fstat(file).st_size else b""
        if _digest(first, header) != os.pread(file, DIGEST.size, SEAL.size):
            raise Refused("its header is damaged")
        told, other = json.loads(header[:now]), json.loads(header[now:])
        self.about: dict[str, Any] = other["about"]
        self.told: dict[str, Any] = told["told"]
        self._digests, self._file = told["digests"], file
        self.table = [Part(*row) for row in other["table"]]

    def lacks(self, abstract: Any) -> str:
        """Returns what this host needs of such a state and is not in here; empty if nothing is."""
        there = {*map(_key, self.table)}
        missing = next((part for part in table_of(abstract) if _key(part) not in there), None)
        return "" if missing is None else f"it does not have {missing.name}{missing.block} as {missing.dtype}{missing.shape}"

    def read(self, abstract: Any) -> Callable[[], Any]:
        """Compares all parts with their digests. Returns a function that makes the state of them, which all hosts must call.
        Raises Refused."""
        import xxhash

        mapped = mmap.mmap(self._file, 0, prot=mmap.PROT_READ)
        whole, parts = np.frombuffer(mapped, np.uint8), dict[str, np.ndarray]()
        for part, digest in zip(self.table, self._digests, strict=True):
            data = whole[part.offset :][: part.num_bytes]
            if xxhash.xxh3_64_intdigest(data.data) != digest:
                raise Refused(f"{part.name} is damaged")
            shape = [stop - start for start, stop in part.block]
            parts[part.name + str(part.block)] = data.view(jax.numpy.dtype(part.dtype)).reshape(shape)

        def array(path: Any, leaf: Any) -> jax.Array:
            name, shape = jax.tree_util.keystr(path), leaf.shape
            # A copy: an array on a CPU may use NumPy's memory, and this one must not be written to.
            return jax.make_array_from_callback(
                shape, leaf.sharding, lambda index: parts[name + str(_block(index, shape))].copy()
            )

        return lambda: jax.tree_util.tree_map_with_path(array, abstract)


def _key(part: Part) -> str:
    return f"{part.name} {part.dtype} {part.shape} {part.block}"


def _digest(*parts: bytes) -> bytes:
    import xxhash

    return DIGEST.pack(xxhash.xxh3_64_intdigest(b"".join(parts)))
