"""Records written to a file: whole or not at all, with a few of them in memory."""

from __future__ import annotations

import datetime
import json
import resource
import tempfile
import weakref
from contextlib import contextmanager
from pathlib import Path

import datasets
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from gangway.errors import DataError, UsageError
from trainers.config import DataConfig
from trainers.data.record_files import ROWS_OF_A_GROUP, schema_of, write
from trainers.data.sources.records import open_records

RECORDS = [{"number": number, "text": "é" * (number % 5), "deep": [{"a": number}]} for number in range(3 * ROWS_OF_A_GROUP + 7)]


def written(path, records):
    write(path, iter(records), schema_of(iter(records)) if path.suffix == ".parquet" else None)
    return open_records(DataConfig(paths=(str(path),)))


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_what_is_written_is_read_again(tmp_path, ending):
    (tmp_path / f"of{ending}.tmp").write_text("what a killed process has left, longer than all of the file" * 10_000)
    assert list(written(tmp_path / f"of{ending}", RECORDS)) == RECORDS
    assert [path.name for path in tmp_path.iterdir()] == [f"of{ending}"]
    if ending == ".parquet":
        about = parquet.ParquetFile(tmp_path / "of.parquet").metadata
        assert [about.row_group(number).num_rows for number in range(about.num_row_groups)] == [*3 * [ROWS_OF_A_GROUP], 7]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_few_records_are_in_memory(tmp_path, ending):
    class Counted(dict):
        pass

    alive, most = weakref.WeakValueDictionary(), 0

    def records():
        nonlocal most
        for number, record in enumerate(RECORDS):
            alive[number] = counted = Counted(record)
            most = max(most, len(alive))
            yield counted

    write(tmp_path / f"of{ending}", records(), schema_of(RECORDS))
    assert most <= (2 if ending == ".jsonl" else 2 * ROWS_OF_A_GROUP)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_disk_without_room_is_reported_and_nothing_is_left(tmp_path, ending):
    with room(4096), pytest.raises(UsageError, match=f"of{ending} cannot be written: File too large; the file was removed"):
        write(tmp_path / f"of{ending}", RECORDS, schema_of(RECORDS))
    assert list(tmp_path.iterdir()) == []


@contextmanager
def room(num_bytes):
    """No file of this process may become larger: the system refuses the write, as that of a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_raises_on_the_way_leaves_nothing(tmp_path):
    def records():
        yield from RECORDS
        raise DataError("record 9 is malformed")

    with pytest.raises(DataError, match="record 9 is malformed"):
        write(tmp_path / "of.parquet", records(), schema_of(RECORDS))
    assert list(tmp_path.iterdir()) == []


def test_of_two_processes_that_write_one_file_the_first_one_wins(tmp_path):
    def records():
        with pytest.raises(UsageError, match=r"of.jsonl is written by another process: wait for it, or give another file"):
            write(tmp_path / "of.jsonl", RECORDS, None)
        yield {"first": 1}

    write(tmp_path / "of.jsonl", records(), None)
    assert json.loads((tmp_path / "of.jsonl").read_text()) == {"first": 1}


def test_columns_that_come_late_or_have_several_types(tmp_path):
    late = [{"a": None, "b": 1}] * ROWS_OF_A_GROUP + [{"a": "text", "b": 1.5, "c": {"d": 1}}]
    found = written(tmp_path / "of.parquet", late)
    assert dict(found[0]) == {"a": None, "b": 1.0, "c": None}
    assert dict(found[ROWS_OF_A_GROUP]) == late[-1]
    with pytest.raises(UsageError, match=r"Parquet has one type for a column, and 'a' has several: .*; bring its values"):
        schema_of([{"a": 1}, {"a": "text"}])
    with pytest.raises(UsageError, match=r"Parquet has one type for a column: .*; bring its values into one type, or write"):
        schema_of([{"a": 1}] * ROWS_OF_A_GROUP + [{"a": "text"}])
    with pytest.raises(UsageError, match=r"record 1 has no form in JSON: .*'b': 'date'.*; write a file .parquet"):
        write(tmp_path / "of.jsonl", [{"b": 1}, {"b": datetime.date(2024, 1, 1)}], None)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"of.jsonl cannot be written: No such file or directory; .* give a file in a folder"):
        write(tmp_path / "none" / "of.jsonl", RECORDS, None)


# ---------------------------------------------------------------------- what `datasets` writes of its own types

NAMES = st.text('ab"\\é ', min_size=1, max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | NAMES,
    lambda each: st.lists(each, max_size=2) | st.dictionaries(NAMES, each, max_size=2),
)
CHAT = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": NAMES, "more": JSON})
ROWS = st.lists(
    st.fixed_dictionaries(
        {"mixed": JSON, "messages": st.lists(CHAT, min_size=1, max_size=2), "label": st.sampled_from([-1, 0, 1])}
    ),
    min_size=1,
    max_size=3,
)
FEATURES = datasets.Features(
    {
        "mixed": datasets.Json(),
        "messages": datasets.List(
            {"role": datasets.Value("string"), "content": datasets.Value("string"), "more": datasets.Json()}
        ),
        "label": datasets.ClassLabel(names=["World", "Sports"]),
    }
)


def of_datasets(folder, made):
    """The records of the Parquet file and of the folder that `datasets` writes."""
    made.to_parquet(str(folder / "a.parquet"))
    made.save_to_disk(str(folder / "saved"))
    return [open_records(DataConfig(paths=(str(folder / name),))) for name in ("a.parquet", "saved")]


@settings(max_examples=15)
@given(rows=ROWS)
def test_the_json_and_the_classes_of_datasets_are_read_as_they_were(rows):
    with tempfile.TemporaryDirectory() as folder:
        for records in of_datasets(Path(folder), datasets.Dataset.from_list(rows, features=FEATURES)):
            for row, record in zip(rows, records, strict=True):
                assert record["mixed"] == row["mixed"]
                assert record["label"] == {-1: None, 0: "World", 1: "Sports"}[row["label"]]
                # In lists of structures a field without a value is left out.
                said = [{name: each for name, each in message.items() if each is not None} for message in row["messages"]]
                assert record["messages"] == said


def test_lists_of_json_and_of_classes_and_structures_of_lists(tmp_path):
    label = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features(
        {
            "messages": datasets.List(datasets.Json()),
            "tags": datasets.List(label),
            "deep": {"a": {"b": label}, "c": datasets.Json()},
        }
    )
    said = [{"role": "user", "content": "q", "default": None}, {"role": "assistant", "content": 3}]
    row = {"messages": said, "tags": [1, 0], "deep": {"a": {"b": 1}, "c": [None, {"x": 1.5}]}}
    for records in of_datasets(tmp_path, datasets.Dataset.from_list([row], features=features)):
        expected = {"messages": said, "tags": ["yes", "no"], "deep": {"a": {"b": "yes"}, "c": [None, {"x": 1.5}]}}
        assert records[0] == expected


def test_a_value_that_is_none_of_its_type_names_its_row_and_column(tmp_path):
    about = {"info": {"features": {"a": {"_type": "Json"}, "b": {"names": ["x"], "_type": "ClassLabel"}}}}
    for column, value, why in (("a", '{"k": 1, "k": 2}', "the key 'k' is there twice"), ("b", 5, "index out of range")):
        table = pyarrow.table({column: [None, value]}).replace_schema_metadata({"huggingface": json.dumps(about)})
        parquet.write_table(table, tmp_path / "a.parquet")
        records = open_records(DataConfig(paths=(str(tmp_path / "a.parquet"),)))
        assert records[0] == {column: None}
        with pytest.raises(DataError, match=rf"a\.parquet, row 2 cannot be read: its column '{column}' has a value .*: .*{why}"):
            records[1]
