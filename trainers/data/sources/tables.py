"""Rows of Parquet and Arrow, and records of ArrayRecord, by index."""

from __future__ import annotations

import bisect
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from gangway.config.section import repeated
from gangway.errors import DataError, UsageError
from gangway.storage.documents import is_url
from trainers.data.documents import Record
from trainers.data.sources.access import Stamp, open_binary, reading, stamp, unreadable
from trainers.data.sources.files import SourceFile
from trainers.data.sources.json_records import record_of, value_of

Decode = Callable[[Any], Any]
KEPT_ROW_GROUPS = 4
"""How many row groups of Parquet are in the memory of a process."""
_READING = threading.Lock()


class Parquet:
    """Reads a row group when a row of it is needed, and keeps the last ones."""

    num_malformed = 0

    def __init__(self, file: SourceFile):
        self.path, self._stamp = file.path, stamp(file.path)
        with _of_library(self.path):
            opened = _parquet(self.path)
            about = opened.metadata
            _check_names(self.path, opened.schema_arrow.names)
            self._decoders = decoders(opened.schema_arrow)
            sizes = (about.row_group(number).num_rows for number in range(about.num_row_groups))
            self._starts = [0, *itertools.accumulate(sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Record:
        number = bisect.bisect_right(self._starts, index) - 1
        # One thread reads at a time: others would read the same row group once more.
        with _READING, _of_library(self.path):
            table = _row_group(self._stamp, self.path, number)
        return _record(table, index - self._starts[number], self.where(index), self._decoders)

    def where(self, index: int) -> str:
        return f"{self.path}, row {index + 1}"


@lru_cache(maxsize=KEPT_ROW_GROUPS)
def _row_group(stamp: Stamp, path: str, number: int) -> Any:
    return _parquet(path).read_row_group(number)


def _parquet(path: str) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(open_binary(path) if is_url(path) else path)


class Arrow:
    """Record batches of Arrow files, which stay on the disk until they are used: streams, as `datasets` writes them, or files."""

    num_malformed = 0

    def __init__(self, file: SourceFile):
        self.path = file.path
        self._batches = [batch for part in file.files for batch in _batches(part) if batch.num_rows]
        self._starts = [0, *itertools.accumulate(batch.num_rows for batch in self._batches)]
        self._decoders = [decoders(batch.schema) for batch in self._batches]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Record:
        number = bisect.bisect_right(self._starts, index) - 1
        return _record(self._batches[number], index - self._starts[number], self.where(index), self._decoders[number])

    def where(self, index: int) -> str:
        return f"{self.path}, row {index + 1}"


def _batches(path: str) -> list[Any]:
    import pyarrow

    with _of_library(path):
        opened = pyarrow.PythonFile(open_binary(path), mode="r") if is_url(path) else pyarrow.memory_map(path)
        is_file = opened.read(6) == b"ARROW1"
        opened.seek(0)
        reader = pyarrow.ipc.open_file(opened) if is_file else pyarrow.ipc.open_stream(opened)
        _check_names(path, reader.schema.names)
        return reader.read_all().to_batches()


def _check_names(path: str, names: Sequence[str]) -> None:
    if twice := sorted(repeated(names)):
        raise DataError(f"data.paths: {path} has two columns of one name: {', '.join(twice)}; expected each name once")


def _record(table: Any, row: int, where: str, decoders: Mapping[str, Decode]) -> Record:
    """Returns a row as Python has it. Fields without a value in lists of structures, such as messages, are left out: there all
    rows have the fields of all. Raises DataError for values that Python has not, such as a text that is no UTF-8."""
    try:
        found = table.slice(row, 1).to_pylist()[0]
        whole = {
            name: [_without_nulls(each) for each in value] if isinstance(value, list) else value for name, value in found.items()
        }
        # Only now: a null within JSON is a value.
        return {name: _decoded(value, name, decoders.get(name)) for name, value in whole.items()}
    except (ValueError, OverflowError) as error:
        raise DataError(f"{where} cannot be read: {error}; correct it, or leave its column out of the file") from error


def _decoded(value: Any, name: str, decode: Decode | None) -> Any:
    try:
        return value if decode is None else decode(value)
    except (ValueError, IndexError) as error:
        raise ValueError(f"its column {name!r} has a value that is none of its type: {error}") from error


def decoders(schema: Any) -> dict[str, Decode]:
    """Returns what makes the values of columns whose types Arrow alone does not tell: JSON, and the classes of `datasets`, which
    are read by their names. `datasets` describes its types in the schema."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        features = {}
    found = {field.name: decoder(field.type, features.get(field.name)) for field in schema}
    return {name: decode for name, decode in found.items() if decode is not None}


def decoder(kind: Any, feature: Any) -> Decode | None:
    """Returns what makes the values of a type of Arrow, which `datasets` describes as `feature`; None: they are as they are."""
    from pyarrow import types

    feature = {"_type": "List", "feature": feature[0]} if isinstance(feature, list) else feature
    about = feature if isinstance(feature, Mapping) else {}
    is_feature = isinstance(about.get("_type"), str)
    if getattr(kind, "extension_name", "") == "arrow.json" or (is_feature and about["_type"] == "Json"):
        return _json
    if is_feature and about["_type"] == "ClassLabel" and (names := about.get("names")):
        return lambda number: names[number] if isinstance(number, int) and number >= 0 else None
    within = about.get("feature") if is_feature else None
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        item = decoder(kind.value_type, within)
        return item and (lambda items: items and [item(each) for each in items])
    if types.is_struct(kind):
        # A list of structures was once written as a structure of lists.
        of = {name: {"_type": "List", "feature": each} for name, each in within.items()} if isinstance(within, Mapping) else about
        fields = {field.name: decoder(field.type, of.get(field.name)) for field in kind}
        known = {name: decode for name, decode in fields.items() if decode is not None}
        if known:
            return lambda value: value and {name: known[name](each) if name in known else each for name, each in value.items()}
    return None


def _json(text: Any) -> Any:
    return value_of(text) if isinstance(text, str) else text


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


class ArrayRecord:
    """Records of JSON in a file of ArrayRecord."""

    num_malformed = 0

    def __init__(self, file: SourceFile):
        self.path = file.path
        if is_url(self.path):
            raise UsageError(
                f"data.paths: {self.path}: ArrayRecord is read from a disk or a mount only: copy it, or mount the bucket"
            )
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        with _of_library(self.path):
            self._records = ArrayRecordDataSource([self.path])
            self._num_records = len(self._records)

    def __len__(self) -> int:
        return self._num_records

    def __getitem__(self, index: int) -> Record:
        with _of_library(self.path):
            contents = self._records[index]
        try:
            return record_of(contents)
        except ValueError as error:
            raise DataError(f"{self.where(index)} is malformed: {error}; expected an object of JSON in each record") from error

    def where(self, index: int) -> str:
        return f"{self.path}, record {index + 1}"


@contextmanager
def _of_library(path: str) -> Iterator[None]:
    """Turns the errors of a library about a file that is damaged, or of another format, into DataError."""
    with reading(path):
        try:
            yield
        except OSError as error:
            # Arrow raises it without a number for a file that is cut.
            if error.errno is None:
                raise DataError(f"data.paths: {path} is damaged, or of another format: {error}") from error
            raise
        except (ValueError, RuntimeError) as error:
            try:
                open_binary(path).close()
            except OSError as missing:
                raise unreadable(path, missing) from error
            raise DataError(f"data.paths: {path} is damaged, or of another format: {error}") from error
