"""Rows of one length out of documents: cut where they are longer, filled up where they are shorter. For what is not packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from gangway.errors import DataError
from trainers.data.documents import Document, Encoder, Record, Records
from trainers.data.epoch_order import held_out
from trainers.protocol import METRIC

Truncation = Literal["keep_start", "keep_end"]
CUT = METRIC + "cut_examples"
"""The leaf of a row that is 1 if a text of it was longer than the row: published as the part of such rows."""


class Rows:
    """The rows of records, each made when it is read. Errors say where the record comes from."""

    def __init__(self, records: Records, row: Callable[[Record], dict[str, Any]]):
        self.records, self._row = records, row

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.records[index]
        try:
            return self._row(record)
        except DataError as error:
            raise DataError(f"{self.records.where(index)}: {error}") from error

    def where_is(self, index: int) -> str:
        return self.records.where(index)


class Part:
    """Some of the records."""

    def __init__(self, records: Records, indices: np.ndarray):
        self.records, self.indices = records, indices

    @property
    def columns(self) -> tuple[str, ...]:
        return self.records.columns

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Record:
        return self.records[self._place(index)]

    def where(self, index: int) -> str:
        return self.records.where(self._place(index))

    def _place(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        return int(self.indices[index])


def split(records: Records, eval_fraction: float) -> tuple[Part, Part]:
    """Returns (the records to train on, those that are held out): a random choice, the same with any seed. Raises DataError if
    one has none."""
    train, held = held_out(len(records), num_held_out(len(records), eval_fraction))
    return Part(records, train), Part(records, held)


def num_held_out(num_records: int, eval_fraction: float) -> int:
    """Returns how many records are held out. Raises DataError if none is, or none is left to train on."""
    number = round(num_records * eval_fraction)
    if num_records == number or (eval_fraction > 0 and number == 0):
        raise DataError(
            f"data.eval_fraction = {eval_fraction} of {num_records} records leaves {num_records - number} to train on and "
            f"{number} to hold out: expected at least one each; give more data, or another eval_fraction"
        )
    return number


def cut(document: Document, length: int, truncation: Truncation) -> Document:
    """Returns what is kept of a document: all of it, or `length` tokens. Raises DataError if no target is left of one that is
    longer."""
    tokens, weight = document.tokens, document.token_weight
    weight = np.ones(len(tokens), np.float32) if weight is None else weight
    if len(tokens) <= length:
        return Document(tokens, weight)
    kept = kept_places(len(tokens), length, truncation)
    if not np.any(weight[kept][1:] > 0):
        raise DataError(
            f"of its {len(tokens)} tokens {length} are kept (data.truncation = {truncation!r}), and no target is among them; "
            "set a larger data.sequence_length, or the other data.truncation"
        )
    return Document(tokens[kept], weight[kept])


def kept_places(num_tokens: int, length: int, truncation: Truncation) -> slice:
    """Returns the places of the `length` tokens that are kept of a document that has more."""
    return slice(0, length) if truncation == "keep_start" else slice(num_tokens - length, num_tokens)


def cut_alike(documents: Sequence[Document], length: int, truncation: Truncation) -> list[Document]:
    """Returns what is kept of texts that begin with the same prompt, as `cut` does: of the prompt the same in each. Raises
    DataError if no target is left of one that is longer."""
    longest = max(len(document.tokens) for document in documents)
    if truncation == "keep_end" and longest > length:
        start = min(longest - length, num_given_to_all(documents))
        documents = [_without(document, start) for document in documents]
    return [cut(document, length, truncation) for document in documents]


def _without(document: Document, start: int) -> Document:
    weight = document.token_weight
    return Document(document.tokens[start:], None if weight is None else weight[start:])


def num_given_to_all(documents: Sequence[Document]) -> int:
    """Returns how many tokens all documents begin with that are no targets."""
    shortest = min(len(document.tokens) for document in documents)
    first, places = documents[0], np.zeros(shortest, bool)
    for tokens, weight in documents:
        places |= tokens[:shortest] != first.tokens[:shortest]
        places |= True if weight is None else weight[:shortest] != 0
    return int(np.argmax(places)) if places.any() else shortest


def padded(document: Document, length: int, truncation: Truncation) -> dict[str, np.ndarray]:
    """Returns {"tokens": int32[length], "token_weight": float32[length], CUT: float32}, filled up at the end with tokens of
    weight 0. Raises DataError if no target is left of a document that is longer."""
    tokens, weight = cut(document, length, truncation)
    filling = (0, length - len(tokens))
    return {
        "tokens": np.pad(tokens, filling).astype(np.int32),
        "token_weight": np.pad(weight, filling).astype(np.float32),  # type: ignore[arg-type]
        CUT: np.array(len(document.tokens) > length, np.float32),
    }


def padded_rows(records: Records, encoder: Encoder, sequence_length: int, truncation: Truncation) -> Rows:
    """Returns rows of one document each, for `trainers.tasks.causal_lm`: one token more than `sequence_length`."""
    return Rows(records, lambda record: padded(only(encoder.encode([record])), sequence_length + 1, truncation))


def stacked(rows: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns rows that are one example, [rows, ...]. It counts as cut if one of them is."""
    leaves = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return {**leaves, CUT: leaves[CUT].max()}


def only(documents: Sequence[Document]) -> Document:
    (document,) = documents
    return document
