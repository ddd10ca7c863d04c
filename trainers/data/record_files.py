"""Writes records to one file, lines of JSON or Parquet: whole or not at all, and with a few of them in memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gangway.errors import UsageError
from gangway.storage import durable
from trainers.data.documents import Record

if TYPE_CHECKING:  # heavy, and lines of JSON do without it
    import pyarrow

ENDINGS = (".jsonl", ".parquet")
ROWS_OF_A_GROUP = 1024
"""Of Parquet; so many records are in memory, and the next ones."""
OTHER_FORM = "bring its values into one type, or write a file .jsonl"


def write(path: Path, records: Iterable[Record], schema: pyarrow.Schema | None) -> None:
    """Writes the file, which is there under its name when all of it is. `schema` is that of `schema_of`, for Parquet. Raises
    UsageError if there is no room, if another process writes it, or if the form has no place for a value."""
    with _named(path), durable.whole(path) as file:
        if path.suffix == ".parquet":
            _write_parquet(file, records, schema)
        else:
            for number, record in enumerate(records):
                file.write(_line(record, number).encode())


def schema_of(records: Iterable[Record]) -> pyarrow.Schema:
    """Returns the types of the columns of Parquet for these records, which are all read. Raises UsageError if a column has
    values that have no type in common."""
    import pyarrow

    schema = pyarrow.schema([])
    for batch in _batches(records):
        names = dict.fromkeys(name for record in batch for name in record)
        found = pyarrow.schema([(name, _type_of(name, batch)) for name in names])
        try:
            schema = pyarrow.unify_schemas([schema, found], promote_options="permissive")
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
            raise UsageError(f"Parquet has one type for a column: {error}; {OTHER_FORM}") from error
    return schema


def _type_of(column: str, records: Iterable[Record]) -> pyarrow.DataType:
    import pyarrow

    try:
        return pyarrow.array([record.get(column) for record in records]).type
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise UsageError(f"Parquet has one type for a column, and {column!r} has several: {error}; {OTHER_FORM}") from error


def _write_parquet(file: BinaryIO, records: Iterable[Record], schema: pyarrow.Schema | None) -> None:
    import pyarrow
    from pyarrow import parquet

    with parquet.ParquetWriter(file, schema) as writer:
        for batch in _batches(records):
            writer.write_table(pyarrow.Table.from_pylist([dict(record) for record in batch], schema=schema))


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    remaining = iter(records)
    while batch := list(itertools.islice(remaining, ROWS_OF_A_GROUP)):
        yield batch


def _line(record: Record, number: int) -> str:
    try:
        return json.dumps(record, ensure_ascii=False) + "\n"
    except TypeError as error:
        kinds = {name: type(value).__name__ for name, value in record.items()}
        raise UsageError(f"record {number} has no form in JSON: {error} (it has {kinds}); write a file .parquet") from error


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except BlockingIOError as error:
        raise UsageError(f"{path} is written by another process: wait for it, or give another file") from error
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}; the file was removed: give a file in a folder that is there, "
            "is yours to write, and has room"
        ) from error
