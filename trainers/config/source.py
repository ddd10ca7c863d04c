"""Where the records of one source come from, and what becomes of them. Free of JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gangway.config.section import Section, require_none

RULES_OF_RECORDS = 2
"""The version of how records become tokens: one more at each change. Checkpoints and the digests of encoders have it."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig(Section):
    """Records of files: lines of JSON, rows of tables, whole texts (`trainers/data/sources/records.py`)."""

    paths: tuple[str, ...] = ("python-stdlib",)
    """Files, folders (also one that `datasets` has saved), patterns such as `data/*.jsonl`, or URLs; `python-stdlib` stands for
    the sources of the running Python's standard library."""
    pattern: str | None = None
    """Which files of a folder to read, by name, such as `*.txt`. Default: all, but for hidden ones; of `python-stdlib`, `*.py`. A
    file that is named in `paths` is always read."""
    format: Literal["auto", "text", "jsonl", "json", "csv", "parquet", "arrow", "arrayrecord"] = "auto"
    """What the files are. `auto`: by the ending of each; an unknown ending is text, one record for each file."""
    encoding: str = "utf-8"
    """What text, JSON and CSV are encoded in, by a name that Python knows: `latin-1`, `utf-16`. Bytes that are something else
    are an error."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Which column to read in place of another: `{text: content}` for a text in the column `content`; `{prompt: question,
    completion: answer}` for the columns `question` and `answer`."""
    examples: str = "auto"
    """What a record becomes (`trainers/data/encoders.py`): `text`; `chat`, of the column `messages`; `completion`, of `prompt`
    and `completion`. `auto`: by the columns of the first record."""
    on_malformed: Literal["raise", "skip"] = "raise"
    """What becomes of a line of JSON or CSV that cannot be read. `skip`: it is left out and counted."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        if not self.paths:
            yield "paths = []: expected at least one file or folder"
        if not _is_text_encoding(self.encoding):
            yield f"encoding = {self.encoding!r}: expected the name of an encoding of texts, such as utf-8, latin-1 or utf-16"
        if any(not name or not column for name, column in self.columns.items()):
            yield f"columns = {dict(self.columns)}: expected names of columns, such as {{prompt: question}}"


def _is_text_encoding(name: str) -> bool:
    try:
        "".encode(name)
    except LookupError:  # also one of bytes, such as `base64`
        return False
    return True
