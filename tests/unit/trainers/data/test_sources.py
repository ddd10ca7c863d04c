"""Records of files of every format: which there are, in which order, and what is said of those that cannot be read."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import shutil
import uuid

import numpy as np
import pyarrow
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from gangway.errors import DataError, DataMissingError, DataUnavailableError, UsageError
from tests.unit.source_files import assert_same_rows, lines_of, source, write_jsonl
from tests.unit.training import arguments as of_training
from trainers.data import kept
from trainers.data.sources import access, bounds, lines, tables
from trainers.data.sources.files import files_of, listing
from trainers.data.sources.packed import packed
from trainers.data.sources.records import READERS, open_records, open_told

ROWS = [{"text": f'row {number} \u00e9 \U0001f600, "quoted"\nand more', "number": number} for number in range(20)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Indices are kept where nobody else keeps some."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    return home / ".cache" / "gangway" / "records"


def write_csv(path, delimiter=","):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "number"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path):
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=7)


def write_stream(path):
    table = pyarrow.Table.from_pylist(ROWS)
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=6)


def write_arrow_file(path):
    table = pyarrow.Table.from_pylist(ROWS)
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=6)


def write_array_record(path):
    writer = ArrayRecordWriter(str(path), "group_size:4")
    for row in ROWS:
        writer.write(json.dumps(row).encode())
    writer.close()


FORMATS = {
    "a.jsonl": (lambda path: write_jsonl(path, ROWS), "line 8"),
    "a.csv": (write_csv, "line 16"),
    "a.tsv": (lambda path: write_csv(path, "\t"), "line 16"),
    "a.parquet": (write_parquet, "row 8"),
    "stream.arrow": (write_stream, "row 8"),
    "file.arrow": (write_arrow_file, "row 8"),
    "a.arrayrecord": (write_array_record, "record 8"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_gives_its_records_by_index(tmp_path, name):
    write, place = FORMATS[name]
    write(tmp_path / name)
    records = open_records(source(tmp_path / name))
    expected = [row | {"number": str(row["number"])} for row in ROWS] if name.endswith("sv") else ROWS
    assert len(records) == 20
    assert [records[index] for index in (19, 0, 7, 8, 6)] == [expected[index] for index in (19, 0, 7, 8, 6)]
    assert list(records) == expected
    assert records.columns == ("text", "number")
    assert records.where(7) == f"{tmp_path / name}, {place}"
    with pytest.raises(IndexError):
        records[20]


def test_a_format_that_is_named_counts_more_than_the_ending(tmp_path):
    write_jsonl(tmp_path / "chats.txt", ROWS)
    assert open_records(source(tmp_path / "chats.txt", format="jsonl"))[3] == ROWS[3]
    assert open_records(source(tmp_path / "chats.txt"))[0] == {"text": (tmp_path / "chats.txt").read_text()}


def test_a_folder_that_datasets_has_saved_is_one_sequence(tmp_path):
    import datasets

    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(tmp_path / "saved", num_shards=3)
    records = open_records(source(tmp_path / "saved"))
    assert list(records) == ROWS
    assert records.where(19) == f"{tmp_path / 'saved'}, row 20"
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match=rf"splits has several splits: name one, such as {tmp_path}/splits/train"):
        open_records(source(tmp_path / "splits"))
    assert list(open_records(source(tmp_path / "splits" / "test"))) == ROWS


def test_files_are_one_sequence_in_an_order_of_their_names_alone(tmp_path):
    for folder in ("here", "there"):
        for number in range(6):
            path = tmp_path / folder / f"part{number % 2}" / f"{number}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_jsonl(path, [{"text": f"{number} {line}"} for line in range(3)])
    here, there = (list(open_records(source(tmp_path / folder, pattern="*.jsonl"))) for folder in ("here", "there"))
    assert here == there
    assert sorted(row["text"] for row in here) == [f"{number} {line}" for number in range(6) for line in range(3)]
    assert [row["text"][-1] for row in here] == ["0", "1", "2"] * 6
    globbed = open_records(source(tmp_path / "here" / "*" / "*.jsonl"))
    assert list(globbed) == here
    assert list(open_records(source(tmp_path / "**" / "[01].jsonl"))) != here


def test_a_source_at_a_url_is_read_as_from_a_disk(tmp_path):
    import fsspec

    for name in ("a.jsonl", "a.csv", "a.parquet", "stream.arrow"):
        FORMATS[name][0](tmp_path / name)
        fsspec.filesystem("memory").pipe_file(f"/bucket/{name}", (tmp_path / name).read_bytes())
        expected = list(open_records(source(tmp_path / name)))
        assert list(open_records(source(f"memory://bucket/{name}"))) == expected
    fsspec.filesystem("memory").pipe_file("/bucket/deep/a.txt", b"a text")
    assert list(open_records(source("memory://bucket", pattern="*.txt"))) == [{"text": "a text"}]
    assert len(open_records(source("memory://bucket/*.jsonl"))) == 20
    with pytest.raises(DataMissingError, match=r"memory://bucket/none\.jsonl does not exist"):
        open_records(source("memory://bucket/none.jsonl"))
    fsspec.filesystem("memory").pipe_file("/bucket/a.arrayrecord", b"")
    with pytest.raises(UsageError, match="ArrayRecord is read from a disk or a mount only"):
        open_records(source("memory://bucket/a.arrayrecord"))


def test_urls_that_cannot_be_read_here():
    with pytest.raises(UsageError, match="hf://datasets/a/b is not read over the network: download it, as with `hf download"):
        open_records(source("hf://datasets/a/b"))
    with pytest.raises(UsageError, match=r"nowhere://bucket/a cannot be read here: .*; pip install 'gangway\[cloud\]'"):
        open_records(source("nowhere://bucket/a"))


def refuse(*args, **kwargs):
    raise RuntimeError("Unable to locate credentials")


def test_a_url_without_credentials(monkeypatch):
    import fsspec

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "isdir", refuse)
    with pytest.raises(DataUnavailableError, match=r"memory://b/a cannot be read: RuntimeError: Unable .*; has this mach"):
        open_records(source("memory://b/a"))


def test_blank_lines_and_windows_endings_are_no_records(tmp_path):
    records = lines_of(tmp_path / "a.jsonl", b'\n{"a": 1}\r\n\r\n\n{"a": 2}\n{"a": 3}')
    assert list(records) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert [records.where(index).rpartition(" ")[2] for index in range(3)] == ["2", "5", "6"]
    rows = lines_of(tmp_path / "a.csv", b'\xef\xbb\xbfa,b\r\n1,"x\r\ny"\r\n\r\n"2 ""q""",z')
    assert list(rows) == [{"a": "1", "b": "x\r\ny"}, {"a": '2 "q"', "b": "z"}]


@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=6), min_size=1, max_size=30),
    chunk=st.integers(1, 9),
    end=st.sampled_from(["\n", "\r\n"]),
)
@settings(max_examples=60)
def test_the_lines_do_not_depend_on_the_chunks_that_are_read(texts, chunk, end):
    jsonl = "".join(json.dumps({"t": text}) + end * (1 + len(text) % 2) for text in texts).encode()
    rows = io.StringIO(newline="")
    csv.writer(rows, lineterminator=end, quoting=csv.QUOTE_ALL).writerows([["t"], *([text] for text in texts)])
    before, bounds.CHUNK_BYTES = bounds.CHUNK_BYTES, chunk
    try:
        found = bounds.of_lines(io.BytesIO(jsonl))
        assert [json.loads(jsonl[a:b])["t"] for a, b in zip(found.starts, found.stops, strict=True)] == texts
        encoded = rows.getvalue().encode()
        assert_same_rows(bounds.of_rows(io.BytesIO(encoded), b","), bounds.row_by_row(iter(io.BytesIO(encoded)), b","))
        assert len(bounds.of_rows(io.BytesIO(encoded), b",").starts) == len(texts) + 1
    finally:
        bounds.CHUNK_BYTES = before


def test_an_index_is_made_once_for_a_file_as_it_is(tmp_path, cache, monkeypatch):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, ROWS)
    assert len(open_records(source(path))) == 20
    assert {file.suffix for file in cache.iterdir()} == {".npy", ".json"}
    monkeypatch.setattr(lines, "_find", None)  # it is not made again
    assert list(open_records(source(path))) == ROWS
    with pytest.raises(TypeError):
        open_records(source(path, on_malformed="skip"))
    os.utime(path, (1, 1))
    with pytest.raises(TypeError):
        open_records(source(path))
    monkeypatch.undo()
    os.environ["HOME"] = str(cache.parents[2])
    for file in cache.glob("*.npy"):
        file.write_bytes(file.read_bytes()[:-8])
    assert list(open_records(source(path))) == ROWS
    shutil.rmtree(cache)
    cache.write_text("no folder")
    assert list(open_records(source(path))) == ROWS
    cache.unlink()
    monkeypatch.setenv("HOME", str(cache.parents[2]))
    monkeypatch.setattr(kept, "KEPT_BYTES", 10)
    assert list(open_records(source(path))) == ROWS
    for file in cache.iterdir():
        os.utime(file, (1, 1))
    assert list(open_records(source(path, on_malformed="skip"))) == ROWS
    (stem,) = {file.stem for file in cache.iterdir()}  # what was used last, however large
    assert {file.name for file in cache.iterdir()} == {f"{stem}.npy", f"{stem}.json"}


def test_what_is_not_there(tmp_path):
    with pytest.raises(DataMissingError, match=r"no file matches '.*/\*\.jsonl' \(looked in /"):
        open_records(source(tmp_path / "*.jsonl"))
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(DataMissingError, match=r"a\.jsonl: there are no records in these files$"):
        open_records(source(tmp_path / "a.jsonl"))
    with pytest.raises(DataMissingError, match=r"matches data\.pattern '\*\.py'; .*; it has files that end in \.jsonl$"):
        open_records(source(tmp_path, pattern="*.py"))
    (tmp_path / "a.jsonl").rename(tmp_path / ".a.jsonl")
    with pytest.raises(DataMissingError, match=r"no file in '.*' is not hidden; it has files that end in \.jsonl$"):
        open_records(source(tmp_path))


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_of_a_folder_all_is_read_that_is_not_hidden_and_what_is_left_out_is_counted(tmp_path, place):
    import fsspec

    for name in ("a.txt", "b.md", "deep/c", ".hidden", ".git/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    path = str(tmp_path)
    if place == "bucket":
        path = f"memory://left_out_{tmp_path.name}"
        fsspec.filesystem("memory").put(str(tmp_path), path, recursive=True)

    def read(**settings):
        told = []
        return {record["text"] for record in open_told(source(path, **settings), told.append)}, told

    assert read() == ({"a.txt", "b.md", "deep/c"}, [f"data.paths {path}: 2 of 5 files are hidden and are left out"])
    by_pattern = [f"data.paths {path}: 3 of 5 files do not match data.pattern '*.txt' and are left out"]
    assert read(pattern="*.txt") == ({"a.txt", ".git/d.txt"}, by_pattern)
    assert read(pattern="*")[1] == []
    if place == "disk":
        path = str(tmp_path / "b.md")
        assert read(pattern="*.txt") == ({"b.md"}, [])


@pytest.mark.parametrize("place", ["disk", "bucket"])
@pytest.mark.parametrize(("end", "settings"), [("", {}), ("", {"pattern": "*"}), ("/**", {}), ("/**/*.*", {})])
def test_what_python_writes_while_it_runs_is_no_data(tmp_path, place, end, settings):
    """A folder with the code of the run is other data once that was imported, else."""
    import fsspec

    (tmp_path / "code" / "__pycache__").mkdir(parents=True)
    (tmp_path / "code" / "a.py").write_text("a = 1")
    (tmp_path / "code" / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"\xa7\x0d")
    path = str(tmp_path)
    if place == "bucket":
        path = f"memory://caches_{uuid.uuid4().hex}"
        fsspec.filesystem("memory").put(str(tmp_path), path, recursive=True)
    found = listing(source(path + end, **settings))
    assert ([file.name for file in found.files], found.left_out) == (["code/a.py"], [])
    (asked_for,) = listing(source(f"{path}/code/__pycache__/*")).files
    assert asked_for.name == "a.cpython-311.pyc"


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_has_vanished(tmp_path, name):
    FORMATS[name][0](tmp_path / name)
    (file,) = files_of(source(tmp_path / name))
    (tmp_path / name).unlink()
    with pytest.raises(DataMissingError, match=rf"{name} cannot be read: No such file.*is it there"):
        READERS[file.format](file, source(tmp_path / name))


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow", "a.arrayrecord"])
def test_a_file_that_is_cut(tmp_path, name):
    FORMATS[name][0](tmp_path / name)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:700])
    with pytest.raises(DataError, match=rf"{name} is damaged, or of another format"):
        open_records(source(tmp_path / name))


def test_a_file_that_no_reader_knows(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"files that end in \.gz are not read; expected text, or \.jsonl, .*; unpack it"):
        open_records(source(tmp_path / "a.jsonl.gz"))


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["a.json.1"], r"a\.json\.1: is it json, though it ends in \.1, or one text\? Say with data\.format"),
        (["a.jsonl.bak"], r"is it jsonl, though it ends in \.bak"),
        (
            ["README.md", "data/train-0.parquet"],
            r"has files of records \(data/train-0\.parquet\), and others .* \(README\.md\): .*'\*\.pa",
        ),
        (
            ["train-0.jsonl", "train-1.jsonl", "test-0.jsonl"],
            r"has the splits test, train \(test-0\.jsonl, train-0\.jsonl\): say with data",
        ),
        (["train.csv", "Validation.csv"], "has the splits train, validation"),
    ],
)
def test_a_folder_with_more_than_one_set_of_data_asks_which_one(tmp_path, names, error):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=error):
        listing(source(tmp_path))
    assert files_of(source(tmp_path, pattern="*", format="jsonl"))  # whoever says so means it


def test_other_endings_of_lines_of_json(tmp_path):
    for ending in ("jsonl", "ndjson", "jsonlines", "ldjson"):
        write_jsonl(tmp_path / f"a.{ending}", [{"text": "a"}, {"text": "b"}])
    assert len(open_records(source(tmp_path))) == 8


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.arrow", "a.csv"])
def test_a_pointer_of_git_lfs_is_not_the_file(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(DataError, match=rf"{name} is a pointer of git-lfs, and not the file itself: fetch it by `git lfs pull`"):
        open_records(source(tmp_path / name, on_malformed="skip"))


@pytest.mark.parametrize(("content", "kind"), [(gzip.compress(b"text"), "compressed by gzip"), (b"%PDF-1.7\n\xe2\xe3", "a PDF")])
def test_what_is_no_text_in_any_encoding_is_not_taken_for_another_one(tmp_path, content, kind):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.txt: it is {kind}, and no text$"):
        open_records(source(tmp_path / "a.txt"))[0]


def test_more_files_than_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr(access, "MAX_OPEN_FILES", 2)
    for number in range(5):
        write_jsonl(tmp_path / f"{number}.jsonl", [{"text": str(number)}])
    records = open_records(source(tmp_path, pattern="*.jsonl"))
    for _ in range(2):
        assert sorted(row["text"] for row in records) == ["0", "1", "2", "3", "4"]
    assert len([file for file in records.files if file.ranges._file]) <= 2


def test_row_groups_are_read_once_while_they_are_kept(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet")
    records = open_records(source(tmp_path / "a.parquet"))
    tables._row_group.cache_clear()
    assert [records[index]["number"] for index in (0, 1, 8, 2, 15, 9)] == [0, 1, 8, 2, 15, 9]
    assert tables._row_group.cache_info().misses == 3


@pytest.mark.parametrize(
    "names", [["a.jsonl", "*.jsonl"], [".", "b.jsonl"], ["link.jsonl", "."], ["a.jsonl", "a.jsonl"], ["deep", "."]]
)
def test_a_file_that_is_named_twice_is_read_once_and_that_is_told(tmp_path, names):
    (tmp_path / "data").mkdir()
    for name in "ab":
        write_jsonl(tmp_path / "data" / f"{name}.jsonl", [{"text": f"{name}{number}"} for number in range(3)])
    os.symlink(tmp_path / "data" / "a.jsonl", tmp_path / "data" / "link.jsonl")
    os.symlink(tmp_path / "data", tmp_path / "data" / "deep")
    told = []
    records = open_told(source(*(tmp_path / "data" / name for name in names)), told.append)
    texts = [record["text"] for record in records]
    assert len(texts) == len({*texts})
    assert {*texts} >= {"a0", "a1", "a2"}
    assert any("are named more than once, such as" in line and "data.mixture can have a weight" in line for line in told)


def test_the_parts_of_a_saved_dataset_are_its_files_too(tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    part = min((tmp_path / "saved").glob("*.arrow"))
    with pytest.raises(DataError, match=rf"some parts of {tmp_path}/saved are named by themselves too: name each once"):
        listing(source(part, tmp_path / "saved"))
    assert len(open_records(source(tmp_path / "saved", part))) == len(ROWS)


def test_two_sources_of_a_mixture_share_no_file_of_which_a_part_is_held_out(tmp_path):
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name}{number}"} for number in range(30)])
    os.link(tmp_path / "a.jsonl", tmp_path / "other.jsonl")
    for second in ("a.jsonl", "*.jsonl", "other.jsonl"):
        mixture = [{"name": name, "paths": [str(tmp_path / paths)]} for name, paths in (("one", "a.jsonl"), ("two", second))]
        made = of_training(tmp_path, data={"mixture": mixture, "eval_fraction": 0.2, "sequence_length": 8})
        with pytest.raises(DataError, match=r"data\.mixture: the sources of the paths .* share .*jsonl: what is held out of one"):
            packed(made)
        packed(of_training(tmp_path, data={"mixture": mixture, "eval_fraction": 0.0, "sequence_length": 8}))
    mixture[1]["paths"] = [str(tmp_path / "b.jsonl")]
    packed(of_training(tmp_path, data={"mixture": mixture, "eval_fraction": 0.2, "sequence_length": 8}))


def test_files_of_one_name_in_two_folders_keep_the_order_of_the_paths(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "x.jsonl", [{"text": folder}])
    paths = [tmp_path / folder / "x.jsonl" for folder in "ba"]
    assert [file.path for file in files_of(source(*paths))] == [str(path) for path in paths]
    assert np.array_equal([row["text"] for row in open_records(source(*paths))], ["b", "a"])
