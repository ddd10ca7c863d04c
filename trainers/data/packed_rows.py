"""Rows of fixed length that are packed of documents: by any index for training, once each for held-out data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gangway.errors import DataError
from trainers.data.documents import Document, Documents
from trainers.data.epoch_order import held_out, shuffled
from trainers.data.mixture import Mixture
from trainers.data.packing import Counts, Piece, Plan

Row = Mapping[str, np.ndarray]


class RowSource(Protocol):
    """The rows of one source: the same number in each epoch, packed anew in each."""

    @property
    def name(self) -> str: ...

    @property
    def number(self) -> int:
        """Its place among the sources."""

    @property
    def counts(self) -> Counts: ...

    @property
    def lengths(self) -> np.ndarray:
        """int32[N]: the tokens of each document, which the rows are planned by."""

    def __len__(self) -> int: ...

    def row(self, epoch: int, row: int) -> Row: ...

    def notes(self) -> str:
        """Returns what the plan has made of the documents, in one line."""


class Subset:
    """Some of the documents of a source."""

    def __init__(self, documents: Documents, indices: np.ndarray):
        self.documents, self.indices = documents, indices
        self.lengths = np.asarray(documents.lengths)[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Document:
        return self.documents[int(self.indices[index])]


def split(documents: Documents, held_out_fraction: float) -> tuple[Subset, Subset]:
    """Returns (training documents, held-out documents). Which are held out depends on nothing but how many there are: it is the
    same on every machine, with any seed and any packing. Of several, at least one is held out, and one is not."""
    number = len(documents)
    num_held_out = min(max(1, round(number * held_out_fraction)), number - 1) if held_out_fraction and number else 0
    train, held = held_out(number, num_held_out)
    return Subset(documents, train), Subset(documents, held)


@dataclass(frozen=True)
class PackedSource:
    """The rows that the documents of one source make."""

    name: str
    number: int
    """Its place among the sources: the leaf `source` of its rows."""
    documents: Documents
    plan: Plan
    first_sample_id: int
    with_segments: bool
    """Whether a row may hold parts of several documents."""

    @property
    def counts(self) -> Counts:
        return self.plan.counts

    @property
    def lengths(self) -> np.ndarray:
        return self.documents.lengths

    def __len__(self) -> int:
        return len(self.plan)

    def row(self, epoch: int, row: int) -> Row:
        """Returns a row of the plan: `tokens`, `segments` (from 1 on; 0: filling), `positions` (from 0 on in each part of a
        document) and `token_weight`, [T + 1] each; `source` and `sample_id`."""
        tokens, segments, positions = np.zeros((3, self.plan.counts.row_places), np.int32)
        token_weight = np.zeros(len(tokens), np.float32)
        place = 0
        for segment, piece in enumerate(self.plan.pieces(epoch, row), start=1):
            document = self._document(piece)
            here, there = slice(place, place + piece.stop - piece.start), slice(piece.start, piece.stop)
            tokens[here], segments[here] = document.tokens[there], segment
            # Anew in each row, also for a document that goes on in it: so they stay below the length of the model's context.
            positions[here] = np.arange(piece.stop - piece.start)
            token_weight[here] = 1.0 if document.token_weight is None else document.token_weight[there]
            place = here.stop
        numbers = {"source": self.number, "sample_id": (self.first_sample_id + row) % np.iinfo(np.int32).max}
        of_segments = {"segments": segments, "positions": positions} if self.with_segments else {}
        leaves = {"tokens": tokens, **of_segments, "token_weight": token_weight}
        return leaves | {name: np.asarray(value, np.int32) for name, value in numbers.items()}

    def _document(self, piece: Piece) -> Document:
        document, length = self.documents[piece.document], int(self.documents.lengths[piece.document])
        if len(document.tokens) != length:
            raise DataError(
                f"document {piece.document} of {self.name} has {len(document.tokens)} tokens, and had {length} when its rows "
                "were planned: its file or its tokenizer has changed; begin a new run"
            )
        return document

    def notes(self) -> str:
        counts = self.counts
        parts = [
            f"{self.name}: {counts.num_documents:,} documents in {counts.num_rows:,} rows of {counts.row_places - 1:,} tokens, "
            f"{100 * counts.efficiency:.2f} % full"
        ]
        if counts.num_overlong:
            lost = f" ({counts.lost_tokens:,} of their tokens are left out)" if counts.lost_tokens else " (in parts)"
            parts.append(f"{counts.num_overlong:,} longer than a row{lost}")
        if counts.num_short:
            parts.append(f"{counts.num_short:,} with less than two tokens left out")
        return "; ".join(parts)


class TrainingRows:
    """Takes any index from 0 on. Each epoch of a source is shuffled anew."""

    takes_any_index = True

    def __init__(self, sources: Sequence[RowSource], mixture: Mixture, seed: int, *, shuffle: bool = True):
        self.sources, self.mixture, self.seed, self.shuffle = tuple(sources), mixture, seed, shuffle

    def __len__(self) -> int:
        """Returns the rows until all sources have left the mixture; if one never does, those of an epoch of each source."""
        return self.mixture.num_rows or sum(map(len, self.sources))

    def __getitem__(self, index: int) -> Row:
        place = self.mixture.at(index)
        source = self.sources[place.source]
        epoch, number = divmod(place.row, len(source))
        if self.shuffle:
            number = shuffled(number, len(source), self.seed, epoch, source.number)
        return source.row(epoch, number)

    def notes(self) -> list[str]:
        """Returns what a person should know of the rows, a line for each source."""
        return [source.notes() for source in self.sources]

    def numbers(self) -> dict[str, float]:
        """Returns the metrics that stay the same while the run goes on."""
        return packing_numbers(self.sources)

    def numbers_at(self, num_rows: int) -> dict[str, float]:
        """Returns the metrics of the first `num_rows` rows: how often each source was read."""
        if len(self.sources) == 1:
            return {}
        rows = self.mixture.counts(num_rows)
        return {f"epoch/{source.name}": count / len(source) for source, count in zip(self.sources, rows, strict=True)}


BARELY = 1e-12
"""The weight, beside the others, of a source that does not count: its own loss is measured, and changes no digit of the mean."""


class HeldOutRows:
    """The held-out rows of all sources, each once. Any first part of them has about the same share of each source's rows."""

    def __init__(self, sources: Sequence[RowSource], weights: Sequence[float] = ()):
        """`weights` are those of the sources: in a mean over all rows each source counts by its weight, however many rows it has.
        Without them each row counts alike."""
        self.sources = tuple(sources)
        sizes = np.array([len(source) for source in sources], np.int64)
        self._source = np.repeat(np.arange(len(sizes)), sizes)
        self._row = np.concatenate([np.arange(size) for size in sizes]) if len(sizes) else np.zeros(0, np.int64)
        # By how far each row is in its source: so `evaluation.max_batches` leaves no source out.
        self._order = np.argsort((self._row + 0.5) / sizes[self._source], kind="stable")
        self._weights = row_weights(sizes, weights) if weights else None

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Row:
        number, row = (int(of_rows[self._order[index]]) for of_rows in (self._source, self._row))
        source = self.sources[number]
        found = source.row(0, row)
        return found if self._weights is None else {**found, "weight": np.asarray(self._weights[number], np.float32)}


def row_weights(sizes: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Returns the weight of a row of each source, so that all rows of a source count by its weight. `sizes` are the rows of each
    source; the weights of all rows add up to their number."""
    shares = np.maximum(np.asarray(weights, float) / sum(weights), BARELY)
    return shares * sizes.sum() / np.maximum(sizes, 1)


def packing_numbers(sources: Sequence[RowSource]) -> dict[str, float]:
    """Returns how full the rows of all sources are, and how many documents were too long for one."""
    counts = [source.counts for source in sources]
    places = sum(each.num_rows * each.row_places for each in counts)
    return {
        "packing_efficiency": sum(each.filled_places for each in counts) / max(1, places),
        "overlong_documents": float(sum(each.num_overlong for each in counts)),
        "lost_tokens": float(sum(each.lost_tokens for each in counts)),
    }
