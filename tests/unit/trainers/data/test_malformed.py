"""Lines and rows that are malformed: told with file and line, or left out and counted. None takes another one with it."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangway.errors import DataError, DataMissingError
from tests.unit.source_files import assert_same_rows, lines_of, source, write_jsonl
from tests.unit.training import arguments
from trainers.config import ClassificationConfig
from trainers.data.sources import bounds
from trainers.data.sources.classification import labelled_texts
from trainers.data.sources.conversations import conversations
from trainers.data.sources.preference import preference_pairs
from trainers.data.sources.records import open_records


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    """Indices are kept where nobody else keeps some."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


BAD = b'{"text": "a"}\n{"text": "b"\n\n["c"]\n{"text": "d"}\n\xff\n{"text": "e"}\n'


def test_a_malformed_line_is_an_error_with_file_and_line_or_left_out_and_counted(tmp_path):
    records = lines_of(tmp_path / "a.jsonl", BAD)
    assert (len(records), records[0], records[5]) == (6, {"text": "a"}, {"text": "e"})
    with pytest.raises(DataError, match=r"a\.jsonl, line 2 is malformed: Expecting .*; correct it, or .*on_malformed=skip"):
        records[1]
    with pytest.raises(DataError, match=r"a\.jsonl, line 4 is malformed: expected an object, \{\.\.\.\}, and found list"):
        records[2]
    with pytest.raises(DataError, match=r"a\.jsonl, line 6 is malformed: it is no utf-8: byte 0xff at offset 48"):
        records[4]
    for _ in range(2):  # made, and kept
        skipped = open_records(source(tmp_path / "a.jsonl", on_malformed="skip"))
        assert (list(skipped), skipped.num_malformed) == ([{"text": "a"}, {"text": "d"}, {"text": "e"}], 3)
        assert skipped.where(1) == f"{tmp_path}/a.jsonl, line 5"
    for empty in (b"", b"a,b\n"):
        with pytest.raises(DataMissingError, match="no records in these files"):
            lines_of(tmp_path / "empty.csv", empty)
    with pytest.raises(DataMissingError, match=r"no records in these files: all 1 lines are malformed"):
        lines_of(tmp_path / "b.jsonl", b"x\n", on_malformed="skip")


def test_a_malformed_row(tmp_path):
    text = b'a,b\n1,2\n3\n4,5,6\n7,8\n9,"1"0\n'
    records = lines_of(tmp_path / "a.csv", text)
    with pytest.raises(DataError, match=r"a\.csv, line 3 is malformed: it has 1 values for 2 columns \(a, b\)"):
        records[1]
    with pytest.raises(DataError, match=r"a\.csv, line 6 is malformed: ',' expected after '\"'"):
        records[4]
    skipped = open_records(source(tmp_path / "a.csv", on_malformed="skip"))
    assert (list(skipped), skipped.num_malformed) == ([{"a": "1", "b": "2"}, {"a": "7", "b": "8"}], 3)


STRAY = {
    # name: (contents, the rows, by None a malformed one, the line of each malformed one)
    "two_in_texts.csv": (b'a,b\n1,5" disk\n2,x\n3,6" disk\n4,y\n', ['5" disk', "x", '6" disk', "y"], []),
    "one_in_a_text.csv": (b'a,b\n1,5" disk\n2,x\n', ['5" disk', "x"], []),
    "two_that_begin_texts.csv": (b'a,b\n1,"5 disk\n2,x\n3,"6 disk\n4,y\n', [None, "x", None, "y"], [2, 4]),
    "one_that_begins_a_text.tsv": (b'a\tb\n1\t"five\n2\tx\n3\ty\n', [None, "x", "y"], [2]),
    "behind_a_quoted_text.tsv": (b'a\tb\n1\t"five" x\n2\tx\n3\t"six" y\n', [None, "x", None], [2, 4]),
    "escaped_then_stray.csv": (b'a,b\n1,"a ""b"" c"\n2,"d""\n3,x\n', ['a "b" c', None, "x"], [3]),
    "a_text_of_several_lines.csv": (b'a,b\n1,"five\n\n""6"", 7"\n2,x\n', ['five\n\n"6", 7', "x"], []),
}


@pytest.mark.parametrize("name", STRAY)
def test_a_stray_quote_swallows_no_row(tmp_path, name):
    contents, expected, malformed = STRAY[name]
    records = lines_of(tmp_path / name, contents)
    # As `skip` sees them, one by one: without it a quick look is enough where all quotes are right.
    skipped = open_records(source(tmp_path / name, on_malformed="skip"))
    assert [row["b"] for row in skipped] == [text for text in expected if text is not None]
    assert skipped.num_malformed == len(malformed)
    for line in malformed:
        with pytest.raises(DataError, match=rf"{name}, line {line} is malformed: .*on_malformed=skip"):
            list(records) if line == malformed[0] else records[expected.index(None, expected.index(None) + 1)]
    if not malformed:
        assert [row["b"] for row in records] == expected


def test_a_closed_text_of_several_lines_with_too_many_values_beside_it_is_reported_with_its_length(tmp_path):
    records = lines_of(tmp_path / "a.csv", b'a,b\n1,"x\n2,y\n3,z",w\n4,v\n')
    with pytest.raises(DataError, match=r"line 2 is malformed: it has 3 values for 2 columns \(a, b\); .* 3 lines long"):
        records[0]
    assert records[1] == {"a": "4", "b": "v"}
    rows = open_records(source(tmp_path / "a.csv", on_malformed="skip"))
    assert ([row["b"] for row in rows], rows.num_malformed) == (["y", "v"], 2)


@pytest.mark.parametrize("dataset", [conversations, preference_pairs, labelled_texts])
def test_lines_that_are_left_out_are_counted_also_where_rows_are_made_when_they_are_read(tmp_path, events, dataset):
    columns = {
        conversations: {"prompt": "a", "completion": "b"},
        preference_pairs: {"prompt": "a", "chosen": "b", "rejected": "c"},
        labelled_texts: {"text": "d", "label": "x"},
    }
    write_jsonl(tmp_path / "a.jsonl", [columns[dataset]] * 4)
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write("{\n")
    data = source(tmp_path / "a.jsonl", on_malformed="skip", eval_fraction=0.25)
    labels = ClassificationConfig(labels=("x", "y"))
    train, held_out = dataset(arguments(tmp_path, data=data, classification=labels))
    assert (len(train), len(held_out)) == (3, 1)
    assert [event["message"] for event in events if event["ev"] == "note"] == [
        f"data.paths {tmp_path}/a.jsonl: 1 malformed lines are left out (data.on_malformed: skip)"
    ]


def test_a_row_that_the_reader_has_not_used_up_is_malformed(tmp_path, monkeypatch):
    records = lines_of(tmp_path / "a.csv", b"a,b\n1,2\n3,4\n")
    records.files[0].lines.places[1, 1] += 4
    with pytest.raises(DataError, match="line 2 is malformed: it is 2 rows"):
        records[0]


@given(
    text=st.text(st.sampled_from('ab,"\r\n \t'), max_size=40), chunk=st.integers(1, 9), delimiter=st.sampled_from([b",", b"\t"])
)
@settings(max_examples=150)
def test_rows_of_rightly_placed_quotes_are_those_of_the_reader_of_csv(text, chunk, delimiter):
    """`of_rows` sees quotes and their neighbours alone. It says None where it cannot tell."""
    before, bounds.CHUNK_BYTES = bounds.CHUNK_BYTES, chunk
    try:
        found = bounds.of_rows(io.BytesIO(text.encode()), delimiter)
    finally:
        bounds.CHUNK_BYTES = before
    exact = bounds.row_by_row(iter(io.BytesIO(text.encode())), delimiter)
    covered = b"".join(text.encode()[a:b] for a, b in zip(exact.starts, exact.stops, strict=True))
    assert covered.translate(None, b" \t\r\n") == text.encode().translate(None, b" \t\r\n")
    rows = list(csv.reader(io.StringIO(text, newline="\n"), delimiter=delimiter.decode())) if "\r" not in text else []
    same_width = len({len(row) for row in rows if row}) <= 1
    if found is not None and rows and same_width:
        assert_same_rows(found, exact)
