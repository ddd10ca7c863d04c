"""Texts with labels, out of records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from trainers import runtime, tokenizers
from trainers.config.arguments import TrainingArguments
from trainers.config.section import did_you_mean
from trainers.data.chat import digest_of
from trainers.data.documents import TEXT, Document, Record, Records, check_all_read
from trainers.data.messages import value_of
from trainers.data.packed_examples import Kind, packed_examples
from trainers.data.packed_rows import HeldOutRows, TrainingRows
from trainers.data.padded import Rows, only, padded, split
from trainers.data.sources.records import ignored_of, open_told
from trainers.errors import DataError
from trainers.tokenizers import Tokenizer
from trainers.turns import shown

LABEL = "label"


class LabelledEncoder:
    """Makes a document of the text of each record, and of the token that ends a text, if the tokenizer has one."""

    def __init__(self, tokenizer: Tokenizer, ignored: Collection[str] = ()):
        self.tokenizer, self.ignored = tokenizer, frozenset(ignored)

    def encode(self, records: Sequence[Record]) -> list[Document]:
        return [self._document(record) for record in records]

    def digest(self) -> str:
        return digest_of("labelled", self.tokenizer, *sorted(self.ignored))

    def _document(self, record: Record) -> Document:
        end = [] if self.tokenizer.separator is None else [self.tokenizer.separator]
        text = value_of(record, TEXT)
        if not isinstance(text, str) or not text:
            raise DataError(f"column {TEXT!r} is {shown(repr(text))}: expected a text")
        check_all_read(record, read=(TEXT, LABEL), ignored=self.ignored)
        return Document(np.array([*self.tokenizer.encode(text), *end], np.int32))


def labelled_texts(arguments: TrainingArguments) -> tuple[Rows, Rows] | tuple[TrainingRows, HeldOutRows]:
    """Returns (training rows, held-out rows) of the records of `arguments.data`, with the columns `text` and `label`: a text in
    each row, or with `data.packing: fit` as many as fit (`trainers.data.packed_examples`), with the leaf `label`, int32[S]."""
    tokenizer, config = tokenizers.of(arguments), arguments.data
    if config.packing is not None:
        kind = Kind(LabelledEncoder(tokenizer, ignored_of(config)), config.sequence_length, leaves=leaves_of(arguments))
        return packed_examples(arguments, kind)
    tokenizers.check(tokenizer, arguments)
    train, held_out = split(open_told(config, runtime.current().note), config.eval_fraction)
    return labelled(train, tokenizer, arguments), labelled(held_out, tokenizer, arguments)


def labelled(records: Records, tokenizer: Tokenizer, arguments: TrainingArguments) -> Rows:
    """Returns rows {"tokens": int32[T], "token_weight": float32[T], "label": int32}. Padding has the weight 0."""
    config, leaves = arguments.data, leaves_of(arguments)
    encoder = LabelledEncoder(tokenizer, ignored_of(config))

    def row(record: Record) -> dict[str, Any]:
        document = only(encoder.encode([record]))
        return {**padded(document, config.sequence_length, config.truncation), **leaves(record)}

    return Rows(records, row)


def leaves_of(arguments: TrainingArguments) -> Callable[[Record], dict[str, np.ndarray]]:
    """Returns what makes the leaves of an example beside its text."""
    labels = arguments.classification.labels
    return lambda record: {LABEL: np.asarray(label_of(value_of(record, LABEL), labels))}


def label_of(value: Any, labels: Sequence[str]) -> np.int32:
    """Returns the place of a label, given by its name or its place. Raises DataError."""
    if isinstance(value, str) and value in labels:
        return np.int32(labels.index(value))
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(labels):
        return np.int32(value)
    hint = did_you_mean(value, labels) if isinstance(value, str) else ""
    raise DataError(
        f"column {LABEL!r} is {value!r}: expected one of classification.labels ({', '.join(labels)}), or a number from 0 to "
        f"{len(labels) - 1}{hint}"
    )
