"""Where the lines of a file begin and end, and the rows of CSV: a quoted text of those may have newlines.

No library does this: the reader of pyarrow takes `"a"b` for `ab`, in silence, and names no line in its errors; its reader of JSON
gives all records one type. docs/benchmarks.md has the times of both.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

CHUNK_BYTES = 16 << 20
NEWLINE, QUOTE = b'\n"'
BOM = b"\xef\xbb\xbf"
"""What some programs write in front of UTF-8."""
BLANK = b" \t\r\n"


class Bounds(NamedTuple):
    """The lines of a file that are not blank, or its rows."""

    starts: np.ndarray
    """int64[N]: the byte at which each begins."""
    stops: np.ndarray
    """int64[N]: the byte behind each, its newline included."""
    num_lines: int
    """How many lines the file has, with the blank ones."""


def of_lines(opened: Any) -> Bounds:
    """Returns the lines of a file that is open for reading bytes."""
    ends, whites, _ = _scan(opened, BLANK, None)
    return _filled(ends, whites)


def of_rows(opened: Any, delimiter: bytes) -> Bounds | None:
    """Returns the rows of a file of CSV, if each quote stands where RFC 4180 has one. Else None: `row_by_row` finds them."""
    ends, whites, are_right = _scan(opened, BLANK.replace(delimiter, b""), delimiter)
    return _filled(ends, whites) if are_right else None


def row_by_row(lines: Iterator[bytes], delimiter: bytes) -> Bounds:
    """Returns the rows of a file of CSV by its lines.

    A quote that opens a text makes a row of several lines only where the text is closed as RFC 4180 says, and the row has as
    many values as the first one. Else its first line is a row by itself, a malformed one, and the next row begins behind it.
    """
    feed, white = _Feed(lines), BLANK.replace(delimiter, b"")
    # As text that has a character for each byte.
    reader = csv.reader(feed, delimiter=delimiter.decode(), strict=True)
    bounds: list[tuple[int, int]] = []
    position = feed.skip_mark()
    num_values = None
    while (taken := _taken(reader, feed, num_values)) is not None:
        line, values = taken
        if line.strip(white):
            bounds.append((position, position + len(line)))
            num_values = num_values or values
        position += len(line)
    starts, stops = np.array(bounds, np.int64).reshape(-1, 2).T
    return Bounds(starts, stops, feed.num_lines)


class _Feed:
    """Gives a reader of CSV one line after the other, and takes back those that it should not have had."""

    def __init__(self, lines: Iterator[bytes]):
        self.lines = lines
        self.waiting: deque[bytes] = deque()
        self.given: list[bytes] = []
        self.num_lines = 0

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> str:
        if self.waiting:
            line = self.waiting.popleft()
        else:
            line = next(self.lines)
            self.num_lines += 1
        self.given.append(line)
        return line.decode("latin-1")

    def take_back(self) -> None:
        """Takes back all lines but the first."""
        self.waiting.extendleft(reversed(self.given[1:]))
        del self.given[1:]

    def skip_mark(self) -> int:
        """Leaves out the mark of UTF-8 in front of the first line, and returns the bytes that it has."""
        first = next(self.lines, b"")
        self.num_lines += bool(first)
        marked = first.startswith(BOM)
        if line := first.removeprefix(BOM):
            self.waiting.append(line)
        return len(BOM) if marked else 0


def _taken(reader: Any, feed: _Feed, num_values: int | None) -> tuple[bytes, int] | None:
    """Returns (the bytes of the next row, how many values it has); None at the end of the file."""
    feed.given.clear()
    try:
        num_found = len(next(reader))
        is_good = len(feed.given) == 1 or num_values in (None, num_found)
    except csv.Error:
        num_found, is_good = 1, False
    except StopIteration:
        return None
    if not is_good:
        feed.take_back()
    return b"".join(feed.given), num_found


def _scan(opened: Any, white: bytes, delimiter: bytes | None) -> tuple[np.ndarray, np.ndarray, bool]:
    """Returns (int64[N + 1]: the beginning of the first line and the end of each, int64[N + 1]: the blank bytes before each of
    these, whether all quotes stand where RFC 4180 has them). With a delimiter a newline between quotes ends no line."""
    is_white = np.isin(np.arange(256), np.frombuffer(white, np.uint8))
    head = opened.read(len(BOM))
    begin = len(BOM) if head == BOM else 0
    chunk = b"" if begin else head
    quotes = None if delimiter is None else _Quotes(delimiter)
    ends, whites = [np.full(1, begin, np.int64)], [np.zeros(1, np.int64)]
    position, num_white = begin, 0
    while chunk := chunk or opened.read(CHUNK_BYTES):
        data = np.frombuffer(chunk, np.uint8)
        found = np.flatnonzero(data == NEWLINE)
        if quotes is not None:
            found = found[quotes.are_outside(data, found)]
        blank = np.flatnonzero(is_white[data])
        ends.append(found + position + 1)
        whites.append(np.searchsorted(blank, found, "right") + num_white)
        position, num_white, chunk = position + len(data), num_white + len(blank), b""
    if ends[-1].size == 0 or ends[-1][-1] < position:
        ends.append(np.full(1, position, np.int64))
        whites.append(np.full(1, num_white, np.int64))
    return np.concatenate(ends), np.concatenate(whites), quotes is None or quotes.are_right()


def _filled(ends: np.ndarray, whites: np.ndarray) -> Bounds:
    lengths = np.diff(ends)
    is_filled = lengths > np.diff(whites)
    return Bounds(ends[:-1][is_filled], ends[1:][is_filled], int(np.count_nonzero(lengths)))


class _Quotes:
    """The quotes of a file that is read in chunks. Those with an even number, from 0 on, open a text, and the others close it; a
    quote within a text is two: one that closes it, and one that opens it again."""

    def __init__(self, delimiter: bytes):
        self._before = np.isin(np.arange(256), np.frombuffer(delimiter + b'\n"', np.uint8))
        self._after = np.isin(np.arange(256), np.frombuffer(delimiter + b'\r\n"', np.uint8))
        self._number, self._last, self._right = 0, NEWLINE, True

    def are_outside(self, data: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Returns bool[N]: which places of the next chunk are outside of quotes. Each chunk is asked about once, in turn."""
        # With the last byte of the chunk before, which has a neighbour here.
        data = np.concatenate([np.array([self._last], np.uint8), data])
        quotes = np.flatnonzero(data[1:] == QUOTE) + 1
        closes = (self._number + np.arange(len(quotes))) % 2 == 1
        behind = quotes[closes] + 1
        if self._last == QUOTE and self._number % 2 == 0:
            behind = np.append(behind, 1)
        self._right &= bool(np.all(self._before[data[quotes[~closes] - 1]]))
        self._right &= bool(np.all(self._after[data[behind[behind < len(data)]]]))
        outside = (self._number + np.searchsorted(quotes, places + 1)) % 2 == 0
        self._number, self._last = self._number + len(quotes), int(data[-1])
        return outside

    def are_right(self) -> bool:
        return self._right and self._number % 2 == 0
