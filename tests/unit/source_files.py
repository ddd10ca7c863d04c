"""Files of records for tests."""

from __future__ import annotations

import json

from trainers.config import DataConfig
from trainers.data.sources.records import open_records


def source(*paths, **changes):
    return DataConfig(paths=tuple(map(str, paths)), **changes)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def lines_of(path, contents, **changes):
    """Returns the records of a file with these bytes."""
    path.write_bytes(contents)
    return open_records(source(path, **changes))


def assert_same_rows(one, other):
    assert (one.starts.tolist(), one.stops.tolist()) == (other.starts.tolist(), other.stops.tolist())
