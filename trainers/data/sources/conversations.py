"""Rows of one conversation or completion each, out of records: supervised fine-tuning without packing."""

from __future__ import annotations

from trainers import runtime
from trainers.config.arguments import TrainingArguments
from trainers.data.documents import notes_of
from trainers.data.encoders import encoder_of
from trainers.data.padded import Rows, padded_rows, split
from trainers.data.sources.records import open_told
from trainers.text import tokenizers


def conversations(arguments: TrainingArguments) -> tuple[Rows, Rows]:
    """Returns (training rows, held-out rows) of the records of `arguments.data`, encoded as `data.examples` says and filled up to
    `data.sequence_length`."""
    config = arguments.data
    tokenizers.check(tokenizers.of(arguments), arguments)
    records = open_told(config, runtime.current().note)
    encoder = encoder_of(config, arguments, records.columns)
    for line in notes_of(encoder, records):
        runtime.current().note(line)
    train, held_out = (
        padded_rows(part, encoder, config.sequence_length, config.truncation) for part in split(records, config.eval_fraction)
    )
    return train, held_out
