"""What training data is made of: records of a source, the documents of tokens that an encoder makes of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from gangway.errors import DataError

Record = Mapping[str, Any]
"""One line of JSON, one row of Parquet or CSV, one text file ({"text": ...}): plain Python values by column."""


TEXT = "text"
"""The column of a text."""


class Records(Protocol):
    """The records of a source by index, read when they are used: ten million of them cost an index, and not their contents."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the first record."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record:
        """Raises DataError that says where, for a record that cannot be read."""

    def where(self, index: int) -> str:
        """Returns where a record comes from, for errors: `chats.jsonl, line 12`."""


class Document(NamedTuple):
    """What a model reads as one piece: a text, a conversation."""

    tokens: np.ndarray
    """int32[N]"""
    token_weight: np.ndarray | None = None
    """float32[N]: how much each token counts as a target, such as 0 in a prompt. None: 1 for each."""


class Encoder(Protocol):
    """Makes documents of records. Pure: the same record always becomes the same document."""

    def encode(self, records: Sequence[Record]) -> list[Document]:
        """Raises DataError for a record that cannot be encoded."""

    def digest(self) -> str:
        """Returns what tells its documents from those of another encoder: its tokenizer, template and settings."""


class Documents(Protocol):
    """The documents of a source by index. Their lengths are known without reading them: packing plans by lengths."""

    @property
    def lengths(self) -> np.ndarray:
        """int32[N]: the tokens of each document."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...


def notes_of(encoder: Encoder, records: Records) -> list[str]:
    """Returns what a user should know of the documents that an encoder makes of records; nothing of an encoder that tells
    nothing (`notes`: a function of the first record)."""
    notes = getattr(encoder, "notes", None)
    return [] if notes is None else notes(records[0])


def check_all_read(record: Record, *, read: Collection[str], ignored: Collection[str]) -> None:
    """Raises DataError if a record has a column that is neither read nor `ignored` (`data.ignore_columns`): what it says would be
    dropped in silence."""
    unread = [name for name, value in record.items() if name not in read and name not in ignored and value is not None]
    if unread:
        raise DataError(
            f"nothing reads the column{'s' if len(unread) > 1 else ''} {', '.join(unread)} (read are {', '.join(read)}): if that "
            f"is right, set data.ignore_columns=[{', '.join(unread)}]"
        )
