"""Texts with labels, out of records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainers import tokenizers
from trainers.config.arguments import TrainingArguments
from trainers.config.section import did_you_mean
from trainers.data.chat import shown, value_of
from trainers.data.documents import TEXT, Document, Record, Records
from trainers.data.padded import Rows, padded, split
from trainers.data.sources.records import open_records
from trainers.errors import DataError
from trainers.tokenizers import Tokenizer

LABEL = "label"


def labelled_texts(arguments: TrainingArguments) -> tuple[Rows, Rows]:
    """Returns (training rows, held-out rows) of the records of `arguments.data`, with the columns `text` and `label`."""
    tokenizer = tokenizers.of(arguments)
    tokenizers.check(tokenizer, arguments)
    train, held_out = split(open_records(arguments.data), arguments.data.eval_fraction)
    return labelled(train, tokenizer, arguments), labelled(held_out, tokenizer, arguments)


def labelled(records: Records, tokenizer: Tokenizer, arguments: TrainingArguments) -> Rows:
    """Returns rows {"tokens": int32[T], "token_weight": float32[T], "label": int32}. Padding has the weight 0."""
    config, end = arguments.data, [] if tokenizer.separator is None else [tokenizer.separator]

    def row(record: Record) -> dict[str, Any]:
        text = value_of(record, TEXT)
        if not isinstance(text, str) or not text:
            raise DataError(f"column {TEXT!r} is {shown(repr(text))}: expected a text")
        document = Document(np.array([*tokenizer.encode(text), *end], np.int32))
        label = label_of(value_of(record, LABEL), arguments.classification.labels)
        return {**padded(document, config.sequence_length, config.truncation), "label": label}

    return Rows(records, row)


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
