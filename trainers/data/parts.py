"""Parts of prepared documents: each is written whole, and sealed. A process that was killed leaves the finished ones."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from gangway.errors import DataError
from gangway.storage import durable, json_text, ours
from trainers.data.documents import Document, Encoder, Record, Records
from trainers.data.prepared import OFFSETS, TOKENS, WEIGHTS, checksum, mapped

MOST_RECORDS, FEWEST_RECORDS, ABOUT_PARTS = 8192, 64, 64
AT_ONCE_BYTES = 4 << 20
"""How much text an encoder gets at once; and at most `AT_ONCE_RECORDS`."""
AT_ONCE_RECORDS = 1024
LENGTHS = "lengths"


class Part(NamedTuple):
    number: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.number:06d}"


def parts_of(num_records: int) -> list[Part]:
    """Returns the parts of so many records: the same for any number of workers."""
    size = min(max(num_records // ABOUT_PARTS, FEWEST_RECORDS), MOST_RECORDS)
    starts = range(0, num_records, size)
    return [Part(number, start, min(start + size, num_records)) for number, start in enumerate(starts)]


def is_finished(folder: Path, part: Part) -> bool:
    """Whether a part was written, and no byte of it has changed."""
    try:
        about = read_part(folder, part)
        return all(checksum(folder / f"{part.name}.{kind}") == digest for kind, digest in about["checksums"].items())
    except (OSError, ValueError):  # it is to be written
        return False


def read_part(folder: Path, part: Part) -> dict[str, Any]:
    """Returns the counts of a part. Raises OSError or ValueError."""
    return json_text.unseal((folder / f"{part.name}.json").read_text())


def write_part(folder: Path, part: Part, records: Records, encoder: Encoder, dtype: np.dtype) -> dict[str, Any]:
    """Encodes the records of a part, writes its files and returns its counts. Raises DataError that says which record."""
    files = _Files(folder, part, dtype)
    try:
        for start, batch in _batches(part, records):
            for document in encode(start, batch, records, encoder):
                files.add(document)
        return files.seal()
    finally:
        files.delete_unfinished()


def encode(start: int, batch: Sequence[Record], records: Records, encoder: Encoder) -> list[Document]:
    try:
        return encoder.encode(batch)
    except DataError:
        # One by one: the error shall say which of them it is.
        for number, record in enumerate(batch):
            try:
                encoder.encode([record])
            except DataError as error:
                raise DataError(f"{records.where(start + number)}: {error}") from error
        raise


def _batches(part: Part, records: Records) -> Iterator[tuple[int, list[Record]]]:
    """Yields (index of the first record, records), so many that an encoder works well and little memory is used."""
    batch: list[Record] = []
    size = 0
    for index in range(part.start, part.stop):
        batch.append(record := records[index])
        size += sum(len(value) for value in record.values() if isinstance(value, str))
        if size >= AT_ONCE_BYTES or len(batch) >= AT_ONCE_RECORDS:
            yield index + 1 - len(batch), batch
            batch, size = [], 0
    if batch:
        yield part.stop - len(batch), batch


class _Files:
    """The files of one part while they are written, under names of their own: another process may write the same part."""

    def __init__(self, folder: Path, part: Part, dtype: np.dtype):
        self.folder, self.part, self.dtype = folder, part, dtype
        self._mine = uuid.uuid4().hex
        self._tokens: BinaryIO = open(self._path(TOKENS), "wb")  # noqa: SIM115 - until they are sealed
        self._weights: BinaryIO | None = None
        self.lengths: list[int] = []
        self.num_tokens = 0
        self.are_whole = True
        """Whether each weight is a whole number that a byte can have."""

    def add(self, document: Document) -> None:
        tokens, weights = document.tokens, document.token_weight
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() <= np.iinfo(self.dtype).max:
            raise DataError(
                f"a token {int(tokens.max())} does not fit into {self.dtype}: the encoder uses ids the tokenizer has not"
            )
        if weights is not None and self._weights is None:
            self._weights = open(self._path(WEIGHTS), "wb")  # noqa: SIM115
            self._weights.write(np.ones(self.num_tokens, np.float32).tobytes())
        if self._weights is not None:
            weights = np.ones(len(tokens), np.float32) if weights is None else weights.astype(np.float32)
            self.are_whole = self.are_whole and bool(np.all(weights == weights.astype(np.uint8)))
            self._weights.write(weights.tobytes())
        self._tokens.write(tokens.astype(self.dtype).tobytes())
        self.lengths.append(len(tokens))
        self.num_tokens += len(tokens)

    def seal(self) -> dict[str, Any]:
        self._path(LENGTHS).write_bytes(np.array(self.lengths, np.int32).tobytes())
        kinds = [TOKENS, LENGTHS, *([WEIGHTS] if self._weights else [])]
        for file in (self._tokens, self._weights):
            if file is not None:
                file.flush()
                durable.sync(file.fileno())
                file.close()
        checksums = {kind: checksum(self._path(kind)) for kind in kinds}
        for kind in kinds:
            os.replace(self._path(kind), self.folder / f"{self.part.name}.{kind}")
        about = {
            "num_documents": len(self.lengths),
            "num_tokens": self.num_tokens,
            "has_weights": self._weights is not None,
            "are_whole": self.are_whole,
            "checksums": checksums,
        }
        # Last: a part without it is not finished.
        durable.write(self.folder / f"{self.part.name}.json", json_text.seal(about))
        return about

    def delete_unfinished(self) -> None:
        for file in (self._tokens, self._weights):
            if file is not None:
                file.close()
        for kind in (TOKENS, LENGTHS, WEIGHTS):
            ours.delete(self._path(kind), ours.TEMPORARY)

    def _path(self, kind: str) -> Path:
        return self.folder / f"{self.part.name}.{kind}.{self._mine}.tmp"


def join(work: Path, parts: Sequence[Part], folder: Path, dtype: np.dtype) -> dict[str, Any]:
    """Writes the files of `folder` from those of its parts in `work`, and returns what `prepared.json` says of them."""
    abouts = [read_part(work, part) for part in parts]
    weights = _weights_type(abouts)
    checksums = {TOKENS: _write(folder / TOKENS, (mapped(work / f"{part.name}.{TOKENS}", "uint8") for part in parts))}
    if weights is not None:
        pieces = (_weights(work, part, about, weights) for part, about in zip(parts, abouts, strict=True))
        checksums[WEIGHTS] = _write(folder / WEIGHTS, pieces)
    lengths = [np.fromfile(work / f"{part.name}.{LENGTHS}", np.int32) for part in parts]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths), dtype=np.int64)])
    with durable.replaced(folder / OFFSETS) as file:
        np.save(file, offsets, allow_pickle=False)
    checksums[OFFSETS] = checksum(folder / OFFSETS)
    return {
        "num_documents": len(offsets) - 1,
        "num_tokens": int(offsets[-1]),
        "dtype": dtype.name,
        "weights": weights,
        "checksums": checksums,
    }


def _weights_type(abouts: Sequence[dict[str, Any]]) -> str | None:
    weighted = [about for about in abouts if about["has_weights"]]
    return None if not weighted else "uint8" if all(about["are_whole"] for about in weighted) else "float32"


def _weights(work: Path, part: Part, about: dict[str, Any], dtype: str) -> bytes:
    if not about["has_weights"]:
        return np.ones(about["num_tokens"], dtype).tobytes()
    return np.fromfile(work / f"{part.name}.{WEIGHTS}", np.float32).astype(dtype).tobytes()


def _write(path: Path, pieces: Iterator[Any]) -> str:
    digest = hashlib.sha256()
    with durable.replaced(path) as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()
