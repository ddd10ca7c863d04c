"""Texts with labels, out of records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gangway.config.section import did_you_mean
from gangway.errors import DataError
from trainers import runtime
from trainers.config.arguments import TrainingArguments
from trainers.data.chat import RecordEncoder
from trainers.data.documents import TEXT, Document, Record, Records, check_all_read
from trainers.data.messages import value_of
from trainers.data.packed_examples import Kind, packed_examples
from trainers.data.packed_rows import HeldOutRows, TrainingRows
from trainers.data.padded import Rows, only, padded, split
from trainers.data.sources.records import ignored_of, open_records, open_told
from trainers.text import tokenizers
from trainers.text.tokenizers import Tokenizer
from trainers.text.turns import shown

LABEL = "label"
CHECKED = 100
"""So many labels at the beginning of the data, and at its end, are looked at before training begins."""


class LabelledEncoder(RecordEncoder):
    """Makes a document of the text of each record, and of the token that ends a text, if the tokenizer has one."""

    kind = ("labelled",)

    def encode(self, records: Sequence[Record]) -> list[Document]:
        return [self._document(record) for record in records]

    def _document(self, record: Record) -> Document:
        text = value_of(record, TEXT)
        if not isinstance(text, str) or not text:
            raise DataError(f"column {TEXT!r} is {shown(repr(text))}: expected a text")
        check_all_read(record, read=(TEXT, LABEL), ignored=self.ignored)
        return Document(np.array(tokenizers.ended(self.tokenizer, self.tokenizer.encode(text)), np.int32))


def labelled_texts(arguments: TrainingArguments) -> tuple[Rows, Rows] | tuple[TrainingRows, HeldOutRows]:
    """Returns (training rows, held-out rows) of the records of `arguments.data`, with the columns `text` and `label`: a text in
    each row, or with `data.packing: fit` as many as fit (`trainers.data.packed_examples`), with the leaf `label`, int32[S]."""
    tokenizer, config = tokenizers.of(arguments), arguments.data
    # Of packed rows, what makes their tokens tells what is left out.
    records = open_records(config) if config.packing is not None else open_told(config, runtime.current().note)
    if config.on_error == "raise":
        check_labels(records, arguments.classification.labels)
    if config.packing is not None:
        kind = Kind(LabelledEncoder(tokenizer, ignored_of(config)), config.sequence_length, leaves=leaves_of(arguments))
        return packed_examples(arguments, kind)
    tokenizers.check(tokenizer, arguments)
    train, held_out = split(records, config.eval_fraction)
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
    """Returns the place of a label among the names of the classes. Raises DataError.

    A text is the name of a class. A number is the name of one where names are numbers, and else the place of one, from 0 on. A
    boolean is the class `true` or `false`, in any case.
    """
    name = _name_of(value, labels)
    if name is not None:
        if name in labels:
            return np.int32(labels.index(name))
    elif isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(labels):
        return np.int32(value)
    raise DataError(f"column {LABEL!r} is {value!r}: expected {_expected(labels)}{_hint(value, labels)}")


def _name_of(value: Any, labels: Sequence[str]) -> str | None:
    """Returns the name that a value stands for; None if it is no name."""
    if isinstance(value, bool):
        found = [name for name in labels if name.lower() == str(value).lower()]
        return found[0] if len(found) == 1 else ""
    if isinstance(value, int) and any(map(_is_number, labels)):
        return str(value)
    return value if isinstance(value, str) else None


def _is_number(name: str) -> bool:
    return name.removeprefix("-").isdecimal()


def _expected(labels: Sequence[str]) -> str:
    names = f"one of classification.labels ({', '.join(labels)})"
    return names if any(map(_is_number, labels)) else f"{names}, or a number from 0 to {len(labels) - 1}"


def _hint(value: Any, labels: Sequence[str]) -> str:
    if isinstance(value, str) and _is_number(value):
        return (
            f"; a text is the name of a class (in CSV all values are texts): if they are numbers, name the classes so: {value!r}"
        )
    if isinstance(value, int) and value == len(labels):
        return "; numbers from 1 on are names: set classification.labels to them, as texts"
    return did_you_mean(value, labels) if isinstance(value, str) else ""


def check_labels(records: Records, labels: Sequence[str]) -> None:
    """Raises DataError for a label that is none, among the first and the last records."""
    for index in sorted({*range(len(records))[:CHECKED], *range(len(records))[-CHECKED:]}):
        record = records[index]
        try:
            label_of(value_of(record, LABEL), labels)
        except DataError as error:
            raise DataError(f"{records.where(index)}: {error}") from error
