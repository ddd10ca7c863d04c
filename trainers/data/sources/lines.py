"""Lines and rows by index: where each begins is found once on a machine, and kept there."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gangway.config.section import repeated
from gangway.errors import DataError
from gangway.storage import durable, json_text, ours
from gangway.storage.documents import is_url
from trainers.config.data import SourceConfig
from trainers.data import kept
from trainers.data.documents import Record
from trainers.data.sources import bounds
from trainers.data.sources.access import ranges_of, reading, stamp, text_of
from trainers.data.sources.files import SourceFile

FORMAT = 2
COUNTED_BYTES = 16 << 20
LEAVE_OUT = "correct it, or leave such lines out with data.on_malformed=skip"


class Lines(NamedTuple):
    """The lines of a file that are not blank."""

    places: np.ndarray
    """int64[N, 2]: the byte at which each begins, and the one behind it."""
    numbers_are_indices: bool
    """Whether line i + 1 is the one with index i."""
    num_malformed: int
    """The lines that were left out because they are malformed."""


class LinesFile:
    """What files of lines have in common."""

    num_header_lines = 0
    are_rows = False
    """Whether a record may have several lines."""

    def __init__(self, file: SourceFile, source: SourceConfig):
        self.path, self.encoding = file.path, source.encoding
        self.ranges = ranges_of(file.path, source.encoding)
        self.lines = _kept(self, skip=source.on_malformed == "skip")
        self.begin(self.lines.places)

    def bounds(self, opened: Any, *, skip: bool) -> bounds.Bounds:
        """Returns where the records of the file are, the header too. `skip`: those that are malformed will be left out."""
        return bounds.of_lines(opened)

    def begin(self, places: np.ndarray) -> None:
        """Reads the header, if there is one. Raises DataError."""

    @property
    def num_malformed(self) -> int:
        return self.lines.num_malformed

    def __len__(self) -> int:
        return max(0, len(self.lines.places) - self.num_header_lines)

    def __getitem__(self, index: int) -> Record:
        start, stop = self._place(index)
        found = self.ranges.read(start, stop)
        if len(found) < stop - start:
            raise DataError(f"{self.path} ends before the end of its record {index + 1}: it has changed since; start again")
        try:
            return self.parse(found, start)
        except ValueError as error:
            raise DataError(f"{self.where(index)} is malformed: {error}; {LEAVE_OUT}") from error

    def parse(self, line: bytes, first: int = 0) -> Record:
        """Returns the record that the bytes are. `first`: their place in the file, for errors. Raises ValueError."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        line = index + self.num_header_lines
        number = line + 1 if self.lines.numbers_are_indices else self._newlines_before(self._place(index)[0]) + 1
        return f"{self.path}, line {number}"

    def _place(self, index: int) -> tuple[int, int]:
        start, stop = self.lines.places[index + self.num_header_lines]
        return int(start), int(stop)

    def _newlines_before(self, stop: int) -> int:
        steps = range(0, stop, COUNTED_BYTES)
        return sum(self.ranges.read(start, min(start + COUNTED_BYTES, stop)).count(b"\n") for start in steps)


class Csv(LinesFile):
    """Rows as texts by column, in the form of RFC 4180: the first row has the names, a quote in a quoted text is doubled. A
    quote within a text that does not begin with one is that character."""

    num_header_lines = 1
    are_rows = True

    def __init__(self, file: SourceFile, source: SourceConfig):
        csv.field_size_limit(sys.maxsize)  # a text may be long
        self.delimiter = "\t" if file.path.lower().endswith(".tsv") else ","
        super().__init__(file, source)

    def bounds(self, opened: Any, *, skip: bool) -> bounds.Bounds:
        delimiter = self.delimiter.encode()
        found = None if skip else bounds.of_rows(opened, delimiter)
        if found is None:
            opened.seek(0)
            found = bounds.row_by_row(iter(opened), delimiter)
        return found

    def begin(self, places: np.ndarray) -> None:
        header = self.ranges.read(int(places[0][0]), int(places[0][1])) if len(places) else b""
        try:
            self.header = self._row(header) if header else []
        except ValueError as error:
            raise DataError(f"{self.path} has no header of names: {error}") from error
        if twice := sorted(map(repr, repeated(self.header))):
            raise DataError(f"{self.path} has two columns of one name: {', '.join(twice)}; expected each name once in its header")

    def parse(self, line: bytes, first: int = 0) -> Record:
        row = self._row(line, first)
        if len(row) != len(self.header):
            lines = f"; its quoted texts make it {count} lines long" if (count := line.rstrip().count(b"\n") + 1) > 1 else ""
            raise ValueError(f"it has {len(row)} values for {len(self.header)} columns ({', '.join(self.header)}){lines}")
        return dict(zip(self.header, row, strict=True))

    def _row(self, line: bytes, first: int = 0) -> list[str]:
        text = io.StringIO(text_of(line, first=first), newline="\n")
        try:
            row, *more = csv.reader(text, delimiter=self.delimiter, strict=True)
        except csv.Error as error:
            raise ValueError(str(error)) from error
        if more:
            raise ValueError(f"it is {len(more) + 1} rows")
        return row


def _kept(file: LinesFile, *, skip: bool) -> Lines:
    """Returns the lines of a file: those kept on this machine for this very file, or else read and kept."""
    about = stamp(file.path)
    name = file.path if is_url(file.path) else os.path.realpath(file.path)
    key = hashlib.sha256(f"{FORMAT} {name} {about} {type(file).__name__} {file.encoding} {skip}".encode()).hexdigest()
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
    about = json_text.unseal(path.with_suffix(".json").read_text())
    places = np.load(path.with_suffix(".npy"), mmap_mode="r", allow_pickle=False)
    return Lines(places, about["numbers_are_indices"], about["num_malformed"])


def _save(path: Path, lines: Lines) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = durable.beside(path)
    try:
        with durable.created(temporary) as file:
            np.save(file, lines.places, allow_pickle=False)
        os.replace(temporary, path.with_suffix(".npy"))
    finally:
        ours.delete(temporary, ours.TEMPORARY)
    about = {"numbers_are_indices": lines.numbers_are_indices, "num_malformed": lines.num_malformed}
    durable.write_shared(path.with_suffix(".json"), json_text.seal(about).encode(), 0o600)
    kept.tidy(path.parent)


def _find(file: LinesFile, *, skip: bool) -> Lines:
    with reading(file.path), file.ranges.open() as opened:
        found = file.bounds(opened, skip=skip)
    places = np.stack([found.starts, found.stops], 1)
    num_found = len(places)
    if skip:
        file.begin(places)
        places = places[np.fromiter(_are_good(file, places), np.bool_, len(places))]
    # A row may have several lines.
    numbers_are_indices = len(places) == found.num_lines and not file.are_rows
    return Lines(places, numbers_are_indices, num_found - len(places))


def _are_good(file: LinesFile, places: np.ndarray) -> Iterator[bool]:
    for number, (start, stop) in enumerate(places.tolist()):
        try:
            if number >= file.num_header_lines:
                file.parse(file.ranges.read(start, stop))
            yield True
        except ValueError:
            yield False
