"""Bytes that are text: UTF-8, or as `data.encoding` says. What is not is an error, and never a sign in its place."""

from __future__ import annotations

import codecs
import io
import re
from functools import cached_property
from typing import Any

from gangway.errors import DataError
from trainers.data.sources.access import ByteRanges, read_bytes

UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
BINARY = {
    **{
        b"\x1f\x8b": "compressed by gzip",
        b"BZh": "compressed by bzip2",
        b"\xfd7zXZ": "compressed by xz",
        b"\x28\xb5\x2f\xfd": "zstd",
    },
    **{b"%PDF-": "a PDF", b"PK\x03\x04": "a zip", b"\x89PNG": "a PNG", b"\xff\xd8\xff": "a JPEG", b"SQLite format 3": "SQLite"},
    **{b"PAR1": "Parquet", b"ARROW1": "Arrow"},
}
"""How files begin that are no text in any encoding."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a sign of UTF-16. Alone it is no text: no tokenizer takes it."""


def is_utf_8(encoding: str) -> bool:
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


def text_of(content: bytes, encoding: str = "utf-8", first: int = 0) -> str:
    """Returns the text, without a mark of the encoding in front. `first`: the place of the content in its file, for errors.
    Raises ValueError."""
    try:
        text = content.decode("utf-8" if is_utf_8(encoding) else encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        if kind := next((kind for mark, kind in BINARY.items() if first == 0 and content.startswith(mark)), None):
            raise ValueError(f"it is {kind}, and no text") from error
        utf_16 = "; it begins as UTF-16 does: set data.encoding=utf-16" if content.startswith(UTF_16_MARKS) else ""
        found = f"byte 0x{content[error.start]:02x} at offset {first + error.start}" if error.start < len(content) else "its end"
        raise ValueError(
            f"it is no {encoding}: {found}: {error.reason}{utf_16 or '; say with data.encoding what it is, such as latin-1'}"
        ) from error
    if (place := text.find("\0")) >= 0:
        raise ValueError(
            f"it has a zero byte, which no text has (character {place}): is it UTF-16 (data.encoding=utf-16-le), or no text?"
        )
    if lone := SURROGATE.search(text):
        raise ValueError(f"it has half of a sign of UTF-16 at character {lone.start()}: {lone[0]!r}")
    return text


def read_text(path: str, encoding: str) -> str:
    """Returns the text of a whole file. Raises DataError with the file and the offset of what is no text; DataMissingError or
    DataUnavailableError."""
    try:
        return text_of(read_bytes(path), encoding)
    except ValueError as error:
        raise DataError(f"data.paths: {path}: {error}") from error


def ranges_of(path: str, encoding: str) -> ByteRanges | Recoded:
    """Returns the file for reading parts of it as UTF-8."""
    return ByteRanges(path) if is_utf_8(encoding) else Recoded(path, encoding)


class Recoded:
    """A file of another encoding as UTF-8, in memory: a newline may be another byte there, or several."""

    def __init__(self, path: str, encoding: str):
        self.path, self.encoding = path, encoding

    @cached_property
    def _content(self) -> bytes:
        return read_text(self.path, self.encoding).encode()

    def open(self) -> Any:
        return io.BytesIO(self._content)

    def read(self, start: int, stop: int) -> bytes:
        """Returns the bytes from `start` up to `stop`; fewer at the end of the file."""
        return self._content[start:stop]
