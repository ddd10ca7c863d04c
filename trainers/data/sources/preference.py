"""Pairs of a chosen and a rejected completion, out of records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gangway.errors import DataError
from trainers import runtime
from trainers.config.arguments import TrainingArguments
from trainers.data.chat import PROMPT, RecordEncoder, completed, notes, with_template
from trainers.data.documents import Document, Record, Records, notes_of
from trainers.data.messages import chat_of, messages_of, value_of
from trainers.data.packed_examples import Kind, packed_examples
from trainers.data.packed_rows import HeldOutRows, TrainingRows
from trainers.data.padded import CUT, Rows, cut_alike, padded, split, stacked
from trainers.data.sources.records import ignored_of, open_told
from trainers.text import tokenizers
from trainers.text.tokenizers import Tokenizer
from trainers.text.turns import num_common

CHOSEN, REJECTED = "chosen", "rejected"
REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
"""The sums of the log-probabilities that a reference gives to the tokens of each completion."""


class PairEncoder(RecordEncoder):
    """Makes two documents of each record, the prompt with the chosen and with the rejected completion.

    The columns are `prompt`, `chosen` and `rejected`: texts, or lists of messages. Without a `prompt`, both are conversations,
    and what they begin with in common is the prompt. The other columns are given to the chat template of messages, but those that
    are `ignored`. What the reference gives is read by the loss that needs it.
    """

    kind = ("pair",)

    def __init__(self, tokenizer: Tokenizer, ignored: Collection[str] = ()):
        super().__init__(tokenizer, {*ignored, *REFERENCE_COLUMNS})

    def encode(self, records: Sequence[Record]) -> list[Document]:
        return [document for record in records for document in self.pair(record)]

    def notes(self, record: Record) -> list[str]:
        if isinstance(record.get(CHOSEN), str):
            return []
        columns = [name for name in (PROMPT, CHOSEN) if record.get(name) is not None]
        chat = partial(chat_of, record, columns, self.ignored, unread=(REJECTED,))
        return notes(lambda: with_template(self.tokenizer), chat)

    def pair(self, record: Record) -> list[Document]:
        left_out = self.ignored - {CHOSEN, REJECTED}
        record = {name: value for name, value in record.items() if name not in left_out}
        prompt = prompt_of(record)
        pair = [
            completed(self.tokenizer, completion_of(record, prompt, each), PROMPT, each, self.ignored)
            for each in (CHOSEN, REJECTED)
        ]
        for document in pair:
            check_weights(document)
        check_differ(pair)
        return pair


def pairs(records: Records, tokenizer: Tokenizer, arguments: TrainingArguments) -> Rows:
    """Returns rows of a pair each, of the records that `PairEncoder` takes.

    A row is {"tokens": int32[2, T + 1], "token_weight": float32[2, T + 1]}, chosen first, and with `preference.reference:
    columns` also `ref_logps`, float32[2].
    """
    length, truncation = arguments.data.sequence_length + 1, arguments.data.truncation
    encoder, leaves = PairEncoder(tokenizer, ignored_of(arguments.data)), leaves_of(arguments)

    def row(record: Record) -> dict[str, Any]:
        pair = encoder.pair(record)
        kept = cut_alike(pair, length, truncation)
        check_differ(kept)
        rows = stacked([padded(document, length, truncation) for document in kept])
        is_cut = np.array(any(len(document.tokens) > length for document in pair), np.float32)
        return {**rows, CUT: is_cut, **(leaves(record) if leaves else {})}

    return Rows(records, row)


def preference_pairs(arguments: TrainingArguments) -> tuple[Rows, Rows] | tuple[TrainingRows, HeldOutRows]:
    """Returns (training pairs, held-out pairs) of the records of `arguments.data`: a pair in each row, or with `data.packing:
    fit` as many as fit (`trainers.data.packed_examples`), each a segment of both lines of its row."""
    tokenizer, note = tokenizers.of(arguments), runtime.current().note
    encoder = PairEncoder(tokenizer, ignored_of(arguments.data))
    if arguments.data.packing is not None:
        length = arguments.data.sequence_length + 1
        kind = Kind(encoder, length, num_texts=2, leaves=leaves_of(arguments), check=check_differ)
        return packed_examples(arguments, kind)
    tokenizers.check(tokenizer, arguments)
    records = open_told(arguments.data, note)
    for line in notes_of(encoder, records):
        note(line)
    train, held_out = split(records, arguments.data.eval_fraction)
    return pairs(train, tokenizer, arguments), pairs(held_out, tokenizer, arguments)


def leaves_of(arguments: TrainingArguments) -> Callable[[Record], dict[str, np.ndarray]] | None:
    """Returns what makes the leaves of a pair beside its texts; None: it has none."""
    if arguments.preference.has_reference and arguments.preference.reference == "columns":
        return lambda record: {"ref_logps": reference_of(record)}
    return None


def check_weights(document: Document) -> None:
    """Raises DataError if a token counts in part: a completion is compared by the tokens that it has."""
    weight = document.token_weight
    if weight is not None and np.any((weight > 0) & (weight != 1)):
        raise DataError(f"a message has a weight of {float(weight[(weight > 0) & (weight != 1)][0])}: expected 0 or 1 in a pair")


def check_differ(pair: Sequence[Document]) -> None:
    """Raises DataError if both texts of a pair are the same."""
    if np.array_equal(pair[0].tokens, pair[1].tokens):
        raise DataError("chosen and rejected are the same: nothing can be learnt from them")


def prompt_of(record: Record) -> Any:
    """Returns the prompt: a text or messages. Raises DataError."""
    if record.get(PROMPT) is not None:
        return record[PROMPT]
    if any(isinstance(value_of(record, name), str) for name in (CHOSEN, REJECTED)):
        value_of(record, PROMPT)  # raises: texts need one
    chosen, rejected = messages_of(record, CHOSEN), messages_of(record, REJECTED)
    return chosen[: num_common(chosen, rejected)]


def completion_of(record: Record, prompt: Any, column: str) -> Mapping[str, Any]:
    """Returns a record of the prompt, the completion in `column`, and all columns that are no completion."""
    value = value_of(record, column)
    fields = {name: each for name, each in record.items() if name not in (CHOSEN, REJECTED)}
    return {**fields, PROMPT: prompt, column: value if record.get(PROMPT) is not None else value[len(prompt) :]}


def reference_of(record: Record) -> np.ndarray:
    """Returns float32[2]. Raises DataError."""
    values = [value_of(record, name) for name in REFERENCE_COLUMNS]
    if wrong := [value for value in values if not isinstance(value, int | float) or not np.isfinite(value) or value > 0]:
        raise DataError(f"columns {', '.join(REFERENCE_COLUMNS)} have {wrong[0]!r}: expected log-probabilities, at most 0")
    return np.array(values, np.float32)
