"""Pairs of a chosen and a rejected completion, out of records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainers import tokenizers
from trainers.config.arguments import TrainingArguments
from trainers.data.chat import PROMPT, completed, messages_of, value_of
from trainers.data.documents import Record, Records
from trainers.data.padded import Rows, padded, split, stacked
from trainers.data.sources.records import open_records
from trainers.errors import DataError
from trainers.tokenizers import Tokenizer

CHOSEN, REJECTED = "chosen", "rejected"
REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
"""The sums of the log-probabilities that a reference gives to the tokens of each completion."""


def pairs(records: Records, tokenizer: Tokenizer, arguments: TrainingArguments) -> Rows:
    """Returns the rows of records with the columns `prompt`, `chosen` and `rejected`: texts, or lists of messages. Without
    a `prompt`, both are conversations, and what they begin with in common is the prompt.

    A row is {"tokens": int32[2, T + 1], "token_weight": float32[2, T + 1]}, chosen first, and with `preference.reference:
    columns` also `ref_logps`, float32[2].
    """
    length, truncation = arguments.data.sequence_length + 1, arguments.data.truncation
    with_reference = arguments.preference.has_reference and arguments.preference.reference == "columns"

    def row(record: Record) -> dict[str, Any]:
        prompt = prompt_of(record)
        documents = (completed(tokenizer, completion_of(record, prompt, each), PROMPT, each) for each in (CHOSEN, REJECTED))
        pair: dict[str, Any] = stacked([padded(document, length, truncation) for document in documents])
        if np.array_equal(*pair["tokens"]):
            raise DataError("chosen and rejected are the same: nothing can be learnt from them")
        return {**pair, "ref_logps": reference_of(record)} if with_reference else pair

    return Rows(records, row)


def preference_pairs(arguments: TrainingArguments) -> tuple[Rows, Rows]:
    """Returns (training pairs, held-out pairs) of the records of `arguments.data`."""
    tokenizer = tokenizers.of(arguments)
    tokenizers.check(tokenizer, arguments)
    train, held_out = split(open_records(arguments.data), arguments.data.eval_fraction)
    return pairs(train, tokenizer, arguments), pairs(held_out, tokenizer, arguments)


def prompt_of(record: Record) -> Any:
    """Returns the prompt: a text or messages. Raises DataError."""
    if record.get(PROMPT) is not None:
        return record[PROMPT]
    if any(isinstance(value_of(record, name), str) for name in (CHOSEN, REJECTED)):
        value_of(record, PROMPT)  # raises: texts need one
    chosen, rejected = messages_of(record, CHOSEN), messages_of(record, REJECTED)
    return chosen[: num_common(chosen, rejected)]


def completion_of(record: Record, prompt: Any, column: str) -> Mapping[str, Any]:
    """Returns a record of the prompt and the completion in `column`."""
    value = value_of(record, column)
    return {PROMPT: prompt, column: value if record.get(PROMPT) is not None else value[len(prompt) :]}


def num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    same = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(same, min(len(one), len(other)))


def reference_of(record: Record) -> np.ndarray:
    """Returns float32[2]. Raises DataError."""
    values = [value_of(record, name) for name in REFERENCE_COLUMNS]
    if wrong := [value for value in values if not isinstance(value, int | float) or not np.isfinite(value) or value > 0]:
        raise DataError(f"columns {', '.join(REFERENCE_COLUMNS)} have {wrong[0]!r}: expected log-probabilities, at most 0")
    return np.array(values, np.float32)
