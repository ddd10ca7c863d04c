"""The records of a source: those of its files, one after the other."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType

from gangway.errors import DataError, DataMissingError
from trainers.config import DataConfig
from trainers.config.data import SourceConfig
from trainers.data.documents import TEXT, Record
from trainers.data.sources.access import read_text
from trainers.data.sources.files import Listing, SourceFile, files_of, listing
from trainers.data.sources.json_records import JsonLines, JsonList, json_file
from trainers.data.sources.lines import Csv
from trainers.data.sources.tables import ArrayRecord, Arrow, Parquet


class TextFile:
    """A text file is one record."""

    num_malformed = 0

    def __init__(self, file: SourceFile, source: SourceConfig):
        self.path, self.encoding = file.path, source.encoding

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Record:
        return {TEXT: read_text(self.path, self.encoding)}

    def where(self, index: int) -> str:
        return self.path


FileRecords = TextFile | JsonLines | JsonList | Csv | Parquet | Arrow | ArrayRecord
"""The records of one file."""


class FilesRecords:
    """The records of several files as one sequence: `trainers.data.documents.Records`. `named`: the columns to read under
    another name (`data.columns`)."""

    def __init__(self, files: list[FileRecords], named: Mapping[str, str] = MappingProxyType({})):
        self.files, self._named = files, named
        self._starts = [0, *itertools.accumulate(len(file) for file in files)]

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(self[0])

    @property
    def num_malformed(self) -> int:
        return sum(file.num_malformed for file in self.files)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Record:
        file, within = self._find(index)
        return self._with_names(file[within], index) if self._named else file[within]

    def __iter__(self) -> Iterator[Record]:
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        file, within = self._find(index)
        return file.where(within)

    def _with_names(self, record: Record, index: int) -> Record:
        """Returns the record with the columns of `data.columns` under their other names too."""
        if missing := [f"{column!r} for {name!r}" for name, column in self._named.items() if column not in record]:
            there_are = ", ".join(record) or "none"
            raise DataError(f"{self.where(index)}: data.columns asks for the column {', '.join(missing)}: there are {there_are}")
        read = self._named.values()
        if hidden := [name for name in self._named if record.get(name) is not None and name not in read]:
            raise DataError(
                f"{self.where(index)}: data.columns reads {self._named[hidden[0]]!r} as {hidden[0]!r}, and there is a column "
                f"{hidden[0]!r} too, which nothing would read: if that is right, name it otherwise and leave it out: add other: "
                f"{hidden[0]} to data.columns, and set data.ignore_columns=[other]"
            )
        return {**record, **{name: record[column] for name, column in self._named.items()}}

    def _find(self, index: int) -> tuple[FileRecords, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        number = bisect.bisect_right(self._starts, index) - 1
        return self.files[number], index - self._starts[number]


def open_records(source: SourceConfig, files: list[SourceFile] | None = None) -> FilesRecords:
    """Returns the records of a source, whose `files` may be given if they were looked for already. Raises UsageError, DataError,
    DataUnavailableError, and DataMissingError if there are none."""
    files = files_of(source) if files is None else files
    records = FilesRecords([READERS[file.format](file, source) for file in files], source.columns)
    if len(records) == 0:
        malformed = f": all {records.num_malformed} lines are malformed" if records.num_malformed else ""
        raise DataMissingError(f"data.paths {', '.join(source.paths)}: there are no records in these files{malformed}")
    return records


def open_told(source: SourceConfig, note: Callable[[str], None]) -> FilesRecords:
    """Returns the records as `open_records` does, and notes what is left out."""
    found = listing(source)
    records = open_records(source, found.files)
    tell_left_out(source, found, records.num_malformed, note)
    return records


def tell_left_out(source: SourceConfig, found: Listing, num_malformed: int, note: Callable[[str], None]) -> None:
    """Notes which files and lines of a source are not read."""
    for line in found.left_out:
        note(line)
    if num_malformed:
        note(f"data.paths {', '.join(source.paths)}: {num_malformed} malformed lines are left out (data.on_malformed: skip)")


def ignored_of(config: DataConfig, source: SourceConfig | None = None) -> frozenset[str]:
    """Returns the columns that may stay unread: `data.ignore_columns`, and those that are read under another name. `source`: that
    of a mixture, whose columns have names of their own."""
    columns = (source or config).columns
    return frozenset({*config.ignore_columns, *({*columns.values()} - {*columns})})


READERS: dict[str, Callable[[SourceFile, SourceConfig], FileRecords]] = {
    "text": TextFile,
    "jsonl": JsonLines,
    "json": json_file,
    "csv": Csv,
    "parquet": lambda file, source: Parquet(file),
    "arrow": lambda file, source: Arrow(file),
    "arrayrecord": lambda file, source: ArrayRecord(file),
}
"""What reads the files of each format (`data.format`)."""
