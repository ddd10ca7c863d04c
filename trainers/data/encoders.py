"""What makes documents of records (`trainers.data.documents.Encoder`): a table by the kind of the examples (`data.examples`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from gangway.config.section import did_you_mean
from gangway.errors import DataError, UsageError
from trainers.config.arguments import TrainingArguments
from trainers.config.data import SourceConfig
from trainers.config.hf_files import BYTES
from trainers.data.chat import COMPLETION, MESSAGES, PROMPT, ChatEncoder, CompletionEncoder, RecordEncoder
from trainers.data.documents import TEXT, Document, Encoder, Record, check_all_read
from trainers.data.sources.records import ignored_of
from trainers.text import tokenizers

AUTO = "auto"


class TextEncoder(RecordEncoder):
    """The tokens of a text, with those that begin and end one, if the tokenizer has some. Bytes end with a newline."""

    kind = ("text",)

    def encode(self, records: Sequence[Record]) -> list[Document]:
        texts = [self._text(record) for record in records]
        found = self.tokenizer.encode_documents(texts)
        return [Document(np.array(self._whole(tokens), np.int32)) for tokens in found]

    def _whole(self, tokens: Sequence[int]) -> list[int]:
        if self.tokenizer.source == BYTES:
            return [*tokens, *b"\n"]
        return tokenizers.ended(self.tokenizer, tokenizers.begun(self.tokenizer.begin, tokens))

    def _text(self, record: Record) -> str:
        text = record.get(TEXT)
        if not isinstance(text, str):
            found = f"it is {type(text).__name__}" if TEXT in record else f"there are {', '.join(record) or 'none'}"
            raise DataError(f"expected a text in the column {TEXT!r}: {found}")
        check_all_read(record, read=(TEXT,), ignored=self.ignored)
        return text


class EncoderKind(NamedTuple):
    fits: Callable[[Sequence[str]], bool]
    """Whether records of these columns are of this kind."""
    expects: str
    """The columns that it needs, for errors."""
    make: Callable[[TrainingArguments, Collection[str]], Encoder]
    """Gets the ignored columns, too. Must not read the tokenizer: a process that finds its documents prepared needs none."""


ENCODERS: dict[str, EncoderKind] = {
    "chat": EncoderKind(
        fits=lambda columns: MESSAGES in columns,
        expects=f"{MESSAGES!r}",
        make=lambda arguments, ignored: ChatEncoder(tokenizers.of(arguments), ignored=ignored),
    ),
    "completion": EncoderKind(
        fits=lambda columns: {PROMPT, COMPLETION} <= {*columns},
        expects=f"{PROMPT!r} and {COMPLETION!r}",
        make=lambda arguments, ignored: CompletionEncoder(tokenizers.of(arguments), ignored=ignored),
    ),
    "text": EncoderKind(
        fits=lambda columns: TEXT in columns,
        expects=f"{TEXT!r}",
        make=lambda arguments, ignored: TextEncoder(tokenizers.of(arguments), ignored=ignored),
    ),
}
"""The kinds by name. `auto`: the first that fits."""


def encoder_of(source: SourceConfig, arguments: TrainingArguments, columns: Sequence[str]) -> Encoder:
    """Returns the encoder for records with these columns. Raises UsageError for an unknown kind, and DataError if the columns do
    not fit."""
    if source.examples not in (AUTO, *ENCODERS):
        known = (AUTO, *ENCODERS)
        raise UsageError(
            f"data.examples = {source.examples!r}: expected one of {', '.join(known)}{did_you_mean(source.examples, known)}"
        )
    kinds = ENCODERS if source.examples == AUTO else {source.examples: ENCODERS[source.examples]}
    for kind in kinds.values():
        if kind.fits(columns):
            return kind.make(arguments, ignored_of(arguments.data, source))
    wanted = "; or ".join(f"{name}: {kind.expects}" for name, kind in kinds.items())
    raise DataError(
        f"data.paths {', '.join(source.paths)}: the records have the columns {', '.join(columns) or 'none'}; expected for "
        f"{wanted}; data.columns names others, such as {{{TEXT}: {next(iter(columns), 'body')}}}"
    )
