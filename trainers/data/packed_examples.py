"""Rows of several examples each, such as pairs of texts and texts with labels: a budget of tokens for each row.

An example is a segment of its row. It has one text, or several beside each other: then the row has a line for each, and the
example is the same segment of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gangway.errors import DataError, DataMissingError, UsageError
from trainers import runtime
from trainers.config import DataConfig
from trainers.config.arguments import TrainingArguments
from trainers.data import preparing
from trainers.data.documents import Document, Documents, Encoder, Record, Records
from trainers.data.epoch_order import held_out
from trainers.data.mixture import Mixture, Share
from trainers.data.packed_rows import HeldOutRows, Row, TrainingRows
from trainers.data.packing import Counts, Fit, Pieces
from trainers.data.padded import cut_alike, num_held_out
from trainers.data.sources.packed import ALONE
from trainers.data.sources.records import open_records
from trainers.text import tokenizers


@dataclass(frozen=True)
class Kind:
    """What the examples of a task are made of."""

    encoder: Encoder
    """Makes `num_texts` documents of each record."""
    row_places: int
    """The tokens that a line of a row has room for."""
    num_texts: int = 1
    leaves: Callable[[Record], Mapping[str, np.ndarray]] | None = None
    """Returns what an example has beside its texts, such as a label; None: nothing, and the records are not read again."""
    check: Callable[[Sequence[Document]], None] = lambda texts: None
    """Raises DataError for texts that nothing can be learnt from."""


class Examples:
    """The examples of a source by index, with their texts as tokens: `num_texts` documents for each."""

    def __init__(self, kind: Kind, documents: Documents, config: DataConfig):
        self.kind, self.documents, self.config = kind, documents, config
        # [examples, texts]
        self.lengths = np.asarray(documents.lengths).reshape(-1, kind.num_texts)

    def __len__(self) -> int:
        return len(self.lengths)

    def texts(self, index: int) -> list[Document]:
        """Returns the texts of an example, as much of each as a row has room for. Raises DataError that says where it is."""
        first = index * self.kind.num_texts
        try:
            whole = [self.documents[first + number] for number in range(self.kind.num_texts)]
            texts = cut_alike(whole, self.kind.row_places, self.config.truncation)
            self.kind.check(texts)
        except DataError as error:
            raise DataError(f"{self._records.where(index)}: {error}") from error
        return texts

    def leaves(self, index: int) -> Mapping[str, np.ndarray]:
        if self.kind.leaves is None:
            return {}
        try:
            return self.kind.leaves(self._records[index])
        except DataError as error:
            raise DataError(f"{self._records.where(index)}: {error}") from error

    @cached_property
    def _records(self) -> Records:
        return open_records(self.config)


@dataclass(frozen=True)
class PackedExamples:
    """The rows that some of the examples make."""

    examples: Examples
    indices: np.ndarray
    """int64[N]: which examples."""
    plan: Fit
    counts: Counts
    num_segments: int
    """The most examples of a row, also of the other rows that a task gets."""
    first_sample_id: int
    name: str = ALONE
    number: int = 0

    @property
    def lengths(self) -> np.ndarray:
        """int32[N]: the longest text of each example, which the rows are planned by."""
        return self.examples.lengths[self.indices].max(1)

    def __len__(self) -> int:
        return len(self.plan)

    def row(self, epoch: int, row: int) -> Row:
        """Returns a row of the plan. P is the places of a line.

        - `tokens`, `segments` (from 1 on; 0: filling), `positions` (from 0 on in each text) and `token_weight`: [texts, P], or
          [P] if an example has one text;
        - `example_weight`, float32[S]: 1 for each segment that the row has, then 0. S is the most examples that any row of the
          plan has, so the same for all rows;
        - the leaves of the examples, [S, ...], filled up with 0;
        - `sample_id`.
        """
        kind, indices = self.examples.kind, [int(self.indices[piece.document]) for piece in self.plan.pieces(epoch, row)]
        tokens, segments, positions = np.zeros((3, kind.num_texts, kind.row_places), np.int32)
        token_weight = np.zeros(tokens.shape, np.float32)
        places = [0] * kind.num_texts
        for segment, index in enumerate(indices, start=1):
            for line, text in enumerate(self.examples.texts(index)):
                here = slice(places[line], places[line] + len(text.tokens))
                tokens[line, here], segments[line, here] = text.tokens, segment
                positions[line, here] = np.arange(len(text.tokens))
                token_weight[line, here] = text.token_weight
                places[line] = here.stop
        lines = {"tokens": tokens, "segments": segments, "positions": positions, "token_weight": token_weight}
        lines = lines if kind.num_texts > 1 else {name: leaf[0] for name, leaf in lines.items()}
        sample_id = np.asarray((self.first_sample_id + row) % np.iinfo(np.int32).max, np.int32)
        return {**lines, **self._leaves(indices), "sample_id": sample_id}

    def _leaves(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        found = [{"example_weight": np.ones((), np.float32), **self.examples.leaves(index)} for index in indices]
        filling = self.num_segments - len(indices)
        leaves = {name: np.stack([each[name] for each in found]) for name in found[0]}
        return {name: np.pad(leaf, [(0, filling)] + [(0, 0)] * (leaf.ndim - 1)) for name, leaf in leaves.items()}

    def notes(self) -> str:
        counts, kind = self.counts, self.examples.kind
        lines = f"{kind.num_texts} x " if kind.num_texts > 1 else ""
        parts = [
            f"{self.name}: {counts.num_documents:,} examples in {counts.num_rows:,} rows of {lines}{kind.row_places:,} tokens, "
            f"at most {self.num_segments:,} in a row, {100 * counts.efficiency:.2f} % full"
        ]
        if counts.num_overlong:
            parts.append(f"{counts.num_overlong:,} longer than a row ({counts.lost_tokens:,} of their tokens are left out)")
        return "; ".join(parts)


def packed_examples(arguments: TrainingArguments, kind: Kind) -> tuple[TrainingRows, HeldOutRows]:
    """Returns (training rows, held-out rows) of the examples of `arguments.data`; the same examples are held out as without
    packing.

    The tokens are made once and kept on this machine, for the plan needs the lengths of all. Raises UsageError with all settings
    that do not fit, DataError for an example of which a cut leaves nothing to learn, and DataMissingError.
    """
    config = arguments.data
    if problems := list(problems_of(config)):
        raise UsageError("\n".join(problems))
    documents = preparing.documents_of(config, arguments, kind.encoder, runtime.current().note)
    tokenizers.check(tokenizers.of(arguments), arguments, documents.num_ids)
    examples = Examples(kind, documents, config)
    parts = held_out(len(examples), num_held_out(len(examples), config.eval_fraction))
    train = _planned(examples, parts[0], arguments, shuffle=config.shuffle)
    held = _planned(examples, parts[1], arguments, shuffle=False)
    _check_rows(train, held, config)
    # One number for both: their rows have the same shapes.
    most = max(train.num_segments, held.num_segments)
    train = replace(train, num_segments=most)
    held = replace(held, num_segments=most, first_sample_id=len(train))
    mixture = Mixture([Share(ALONE, ((0, 1.0),))])
    return TrainingRows([train], mixture, arguments.seed, shuffle=config.shuffle), HeldOutRows([held])


def problems_of(config: DataConfig) -> Iterator[str]:
    """Yields the settings that examples which share rows do not take."""
    if config.packing == "concat":
        yield "data.packing = 'concat': it cuts texts where a row ends, and an example is whole; set fit, or leave it out"
    if config.overlong == "split":
        yield "data.overlong = 'split': the parts of an example are none themselves; expected cut or drop"
    if config.mixture:
        names = ", ".join(source.name for source in config.mixture)
        yield f"data.mixture = {names}: examples are packed of data.paths alone; leave it out"
    if config.prepared is not None:
        yield (
            f"data.prepared = {config.prepared!r}: `python -m trainers.prepare` makes no such examples; leave it out, for each "
            "machine keeps the tokens that it has made"
        )


def _planned(examples: Examples, indices: np.ndarray, arguments: TrainingArguments, *, shuffle: bool) -> PackedExamples:
    """Returns the rows of some of the examples. Raises DataError for the first one of which a cut leaves nothing to learn."""
    kind, config, lengths = examples.kind, arguments.data, examples.lengths[indices]
    longest = lengths.max(1, initial=0)
    pieces = Pieces(longest, kind.row_places, config.overlong, config.truncation, shortest=1)
    kept = lengths.copy()
    for place in pieces.documents[longest[pieces.documents] > kind.row_places].tolist():
        kept[place] = [len(text.tokens) for text in examples.texts(int(indices[place]))]
    plan = Fit(longest, pieces, kind.row_places, (arguments.seed, 0), shuffle=shuffle)
    return PackedExamples(
        examples, indices, plan, _counts(lengths, kept, pieces, plan, kind), plan.most_pieces, first_sample_id=0
    )


def _counts(lengths: np.ndarray, kept: np.ndarray, pieces: Pieces, plan: Fit, kind: Kind) -> Counts:
    """Returns the counts of a plan, with all texts of each example: of their tokens, as many as `kept` are in a row."""
    filled = int(kept[pieces.documents].sum())
    places = kind.num_texts * kind.row_places
    return replace(plan.counts, row_places=places, filled_places=filled, lost_tokens=int(lengths.sum()) - filled)


def _check_rows(train: PackedExamples, held_out: PackedExamples, config: DataConfig) -> None:
    if len(train) == 0 or (config.eval_fraction > 0 and len(held_out) == 0):
        kind = "training" if len(train) == 0 else "held-out"
        raise DataMissingError(
            f"{ALONE} has no {kind} rows: data.overlong = {config.overlong!r} leaves out each example that is longer than "
            f"data.sequence_length = {config.sequence_length}; set cut, or a larger sequence_length"
        )
