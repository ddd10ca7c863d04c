"""Lines of JSON and rows of CSV by index: where each begins is found once on a machine, and kept there."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainers.data import kept
from trainers.data.documents import Record
from trainers.data.sources.access import ByteRanges, open_binary, reading, stamp
from trainers.data.sources.files import SourceFile
from trainers.errors import DataError
from trainers.storage import durable, sealed
from trainers.storage.documents import is_url

FORMAT = 1
CHUNK_BYTES = 16 << 20
NEWLINE, RETURN, QUOTE = b'\n\r"'
LEAVE_OUT = "correct it, or leave such lines out with data.on_malformed=skip"


class Lines(NamedTuple):
    """The lines of a file that are not blank."""

    bounds: np.ndarray
    """int64[N + 1]: the byte at which each begins, then the end of the file. Lines that are left out lie in between."""
    numbers_are_indices: bool
    """Whether line i + 1 is the one with index i."""
    num_malformed: int
    """The lines that were left out because they are malformed."""


class LinesFile:
    """What files of lines have in common. `quoted`: a newline between quotes ends no line, as in CSV."""

    quoted = False
    num_header_lines = 0

    def __init__(self, file: SourceFile, on_malformed: str):
        self.path = file.path
        self.ranges = ByteRanges(file.path)
        self.lines = _kept(self, skip=on_malformed == "skip")
        self.begin(self.lines.bounds)

    def begin(self, bounds: np.ndarray) -> None:
        """Reads the header, if there is one. Raises DataError."""

    @property
    def num_malformed(self) -> int:
        return self.lines.num_malformed

    def __len__(self) -> int:
        return max(0, len(self.lines.bounds) - 1 - self.num_header_lines)

    def __getitem__(self, index: int) -> Record:
        line = index + self.num_header_lines
        start, stop = (int(bound) for bound in self.lines.bounds[line : line + 2])
        found = self.ranges.read(start, stop)
        if not found:
            raise DataError(f"{self.path} ends before its record {index + 1}: it was cut while it was read; start again")
        try:
            return self.parse(found)
        except ValueError as error:
            raise DataError(f"{self.where(index)} is malformed: {error}; {LEAVE_OUT}") from error

    def parse(self, line: bytes) -> Record:
        """Returns the record that the bytes begin with. Raises ValueError."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        line = index + self.num_header_lines
        number = line + 1 if self.lines.numbers_are_indices else self._newlines_before(int(self.lines.bounds[line])) + 1
        return f"{self.path}, line {number}"

    def _newlines_before(self, stop: int) -> int:
        steps = range(0, stop, CHUNK_BYTES)
        return sum(self.ranges.read(start, min(start + CHUNK_BYTES, stop)).count(b"\n") for start in steps)


class JsonLines(LinesFile):
    def parse(self, line: bytes) -> Record:
        # What follows was left out.
        record = json.loads(line.partition(b"\n")[0])
        if not isinstance(record, dict):
            raise ValueError(f"expected an object, {{...}}, and found {type(record).__name__}")
        return record


class Csv(LinesFile):
    """Rows as texts by column, in the form of RFC 4180: the first row has the names, a quote in a quoted text is doubled."""

    quoted = True
    num_header_lines = 1

    def __init__(self, file: SourceFile, on_malformed: str):
        csv.field_size_limit(sys.maxsize)  # a text may be long
        self.delimiter = "\t" if file.path.lower().endswith(".tsv") else ","
        super().__init__(file, on_malformed)

    def begin(self, bounds: np.ndarray) -> None:
        header = self.ranges.read(int(bounds[0]), int(bounds[1])) if len(bounds) > 1 else b""
        try:
            # Excel marks UTF-8 by three bytes in front.
            self.header = self._row(header.removeprefix(b"\xef\xbb\xbf"))
        except ValueError as error:
            raise DataError(f"{self.path} has no header of names: {error}") from error

    def parse(self, line: bytes) -> Record:
        row = self._row(line)
        if len(row) != len(self.header):
            raise ValueError(f"it has {len(row)} values for {len(self.header)} columns ({', '.join(self.header)})")
        return dict(zip(self.header, row, strict=True))

    def _row(self, line: bytes) -> list[str]:
        try:
            return next(csv.reader(io.StringIO(line.decode(), newline=""), delimiter=self.delimiter, strict=True), [])
        except csv.Error as error:
            raise ValueError(str(error)) from error


def _kept(file: LinesFile, *, skip: bool) -> Lines:
    """Returns the lines of a file: those kept on this machine for this very file, or else read and kept."""
    about = stamp(file.path)
    name = file.path if is_url(file.path) else os.path.realpath(file.path)
    key = hashlib.sha256(f"{FORMAT} {name} {about} {type(file).__name__} {skip}".encode()).hexdigest()
    path = kept.folder(kept.INDICES) / key
    try:
        found = _load(path)
        kept.used(path.with_suffix(".npy"))
        return found
    except (OSError, ValueError, KeyError):  # there is none, or it is damaged: made again
        lines = _find(file, skip=skip)
    with suppress(OSError):  # no room: the next process reads it again
        _save(path, lines)
    return lines


def _load(path: Path) -> Lines:
    about = sealed.unseal(path.with_suffix(".json").read_text())
    bounds = np.load(path.with_suffix(".npy"), mmap_mode="r", allow_pickle=False)
    return Lines(bounds, about["numbers_are_indices"], about["num_malformed"])


def _save(path: Path, lines: Lines) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.save(file, lines.bounds, allow_pickle=False)
        os.replace(temporary, path.with_suffix(".npy"))
    finally:
        temporary.unlink(missing_ok=True)
    about = {"numbers_are_indices": lines.numbers_are_indices, "num_malformed": lines.num_malformed}
    durable.write_shared(path.with_suffix(".json"), sealed.seal(about).encode(), 0o600)
    kept.tidy(path.parent)


def _find(file: LinesFile, *, skip: bool) -> Lines:
    with reading(file.path), open_binary(file.path) as opened:
        bounds, is_blank = _bounds(opened, file.path, quoted=file.quoted)
    num_lines = len(bounds) - 1
    starts = bounds[:-1][~is_blank]
    bounds = np.append(starts, bounds[-1]) if is_blank.any() else bounds
    num_malformed = 0
    if skip:
        file.begin(bounds)
        good = np.fromiter(_are_good(file, bounds), np.bool_, len(bounds) - 1)
        num_malformed = int(len(good) - good.sum())
        bounds = np.append(bounds[:-1][good], bounds[-1])
    # A newline between quotes makes a row of several lines.
    plain = len(bounds) - 1 == num_lines and not file.quoted
    return Lines(bounds, plain, num_malformed)


def _bounds(opened: Any, path: str, *, quoted: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns (int64[N + 1]: the beginning of each line, and the end of the file; bool[N]: which lines are blank)."""
    ends: list[np.ndarray] = [np.zeros(1, np.int64)]
    returns: list[np.ndarray] = []
    position = num_quotes = 0
    last = 0
    while chunk := opened.read(CHUNK_BYTES):
        data = np.frombuffer(chunk, np.uint8)
        found = np.flatnonzero(data == NEWLINE)
        if quoted:
            quotes = np.flatnonzero(data == QUOTE)
            # Between quotes their number so far is odd.
            found = found[(num_quotes + np.searchsorted(quotes, found)) % 2 == 0]
            num_quotes += len(quotes)
        before = np.where(found > 0, data[found - 1], last)
        ends.append(found + position + 1)
        returns.append(before == RETURN)
        position, last = position + len(data), int(data[-1])
    if num_quotes % 2:
        raise DataError(f"{path} has an odd number of quotes: a quote in a text is written as two, and quotes enclose the text")
    bounds = np.concatenate(ends)
    is_blank = np.diff(bounds) - np.concatenate([*returns, np.zeros(0, np.bool_)]) == 1
    if bounds[-1] < position:
        return np.append(bounds, position), np.append(is_blank, False)
    return bounds, is_blank


def _are_good(file: LinesFile, bounds: np.ndarray) -> Iterator[bool]:
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if number < file.num_header_lines:
            yield True
            continue
        try:
            file.parse(file.ranges.read(int(start), int(stop)))
            yield True
        except ValueError:
            yield False
