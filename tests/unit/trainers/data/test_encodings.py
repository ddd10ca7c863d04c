"""What the bytes of a file are: an encoding, a form of JSON. What is something else is told with file and place."""

from __future__ import annotations

import codecs
import json

import pyarrow
import pytest
from pyarrow import ipc, parquet

from gangway.errors import DataError
from tests.unit.source_files import lines_of, source
from trainers.data.sources.records import open_records

TEXT = "na\u00efve caf\u00e9"


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    """Indices are kept where nobody else keeps some."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


FILES = {"a.txt": TEXT, "a.jsonl": f'{{"text": "{TEXT}"}}\n', "a.csv": f"text\n{TEXT}\n", "a.json": f'[{{"text": "{TEXT}"}}]'}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-be", "utf-32"])
def test_a_file_of_another_encoding_is_read_as_the_configuration_says(tmp_path, name, encoding):
    contents = FILES[name].encode(encoding)
    assert list(lines_of(tmp_path / name, contents, encoding=encoding)) == [{"text": TEXT}]
    with pytest.raises(DataError, match=rf"{name}.*(it is no utf-8: byte 0x\w\w at offset \d+|it has a zero byte)"):
        list(lines_of(tmp_path / name, contents))
    for other in ("utf-8", encoding):  # the index that is kept is that of the encoding
        if other == encoding:
            assert list(open_records(source(tmp_path / name, encoding=other))) == [{"text": TEXT}]


def test_the_error_says_which_byte_it_is_and_what_to_set(tmp_path):
    with pytest.raises(DataError, match=r"a\.txt: it is no utf-8: byte 0xef at offset 2: .*; say with data\.encoding what it is"):
        list(lines_of(tmp_path / "a.txt", TEXT.encode("latin-1")))
    with pytest.raises(DataError, match=r"b\.txt: it is no utf-8: byte 0xff at offset 0: .*set data\.encoding=utf-16"):
        list(lines_of(tmp_path / "b.txt", TEXT.encode("utf-16")))
    with pytest.raises(DataError, match=r"c\.txt: it is no utf-16: .*"):
        list(lines_of(tmp_path / "c.txt", TEXT.encode("utf-16")[:-1], encoding="utf-16"))
    with pytest.raises(ValueError, match="encoding = 'base64': expected the name of an encoding of texts"):
        source("a.txt", encoding="base64")
    with pytest.raises(ValueError, match="encoding = 'utf-9': expected the name of an encoding"):
        source("a.txt", encoding="utf-9")


@pytest.mark.parametrize("name", FILES)
def test_a_mark_in_front_of_utf_8_is_no_part_of_the_text(tmp_path, name):
    assert list(lines_of(tmp_path / name, codecs.BOM_UTF8 + FILES[name].encode())) == [{"text": TEXT}]


def test_what_ends_in_json_is_a_list_of_records_one_record_or_one_in_each_line(tmp_path):
    rows = [{"text": f"{number}", "deep": {"a": [1, None]}} for number in range(3)]
    forms = {
        "list.json": json.dumps(rows),
        "pretty.json": json.dumps(rows, indent=2),
        "lines.json": "\n".join(map(json.dumps, rows)),
        "blank.json": "\n \n" + "\n\n".join(map(json.dumps, rows)) + "\n\t\n",
    }
    for name, text in forms.items():
        assert list(lines_of(tmp_path / name, text.encode())) == rows, name
    assert list(lines_of(tmp_path / "one.json", json.dumps(rows[0], indent=2).encode())) == rows[:1]
    assert list(lines_of(tmp_path / "line.json", json.dumps(rows[0]).encode())) == rows[:1]
    text = forms["list.json"]
    assert list(lines_of(tmp_path / "list.json", text.encode(), format="text")) == [{"text": text}]
    assert open_records(source(tmp_path / "pretty.json")).where(2) == f"{tmp_path}/pretty.json, record 3"
    assert open_records(source(tmp_path / "blank.json")).where(1) == f"{tmp_path}/blank.json, line 5"


def test_a_list_that_is_malformed(tmp_path):
    for text, why in {
        '[{"text": "a"}, {"text": "b"': "Expecting ',' delimiter",
        '[{"text": "a"} {"text": "b"}]': "expected a comma, or the end of the list",
        '[{"text": "a"}]\n[{"text": "b"}]': "Extra data: something follows",
        '[{"text": "a"},]': "a comma before the end of the list",
        '{\n"text": "a"\n}\n{\n"text": "b"\n}': "Extra data: something follows",
    }.items():
        with pytest.raises(DataError, match=rf"a\.json is malformed: {why}.* line .*; expected one list of records, "):
            lines_of(tmp_path / "a.json", text.encode())
    text = '[{"text": "a"}, "b", {"text": "c", "text": "d"}, {"text": "e"}]'
    records = lines_of(tmp_path / "a.json", text.encode())
    with pytest.raises(DataError, match=r"a\.json, record 2 is malformed: expected an object, .*on_malformed=skip"):
        records[1]
    with pytest.raises(DataError, match=r"a\.json, record 3 is malformed: the key 'text' is there twice"):
        records[2]
    skipped = open_records(source(tmp_path / "a.json", on_malformed="skip"))
    assert ([row["text"] for row in skipped], skipped.num_malformed, skipped.where(1)[-8:]) == (["a", "e"], 2, "record 4")


LINES = {
    '{"text": "a"} {"text": "b"}': "Extra data: something follows it",
    '{"text": "a", "text": "b"}': "the key 'text' is there twice",
    '{"text": "a", "b": {"c": 1, "c": 2}}': "the key 'c' is there twice",
    '{"text": "a", "score": NaN}': "NaN is no JSON",
    '{"text": "a", "score": -Infinity}': "-Infinity is no JSON",
    '{"text": "a", "score": 1e999}': "1e999 is more than a number can be here",
    '{"text": "a", "deep": [{"b": -2.5E+400}]}': r"-2\.5E\+400 is more than",
    '{"text": "a \\ud83d b"}': r"'text' has half of a sign of UTF-16 \('\\ud83d'\)",
    '{"text": [{"b": "\\uDE00"}]}': r"'text'\[0\]\.b has half of a sign",
    '{"\\udc00": "a"}': "a key has half of a sign",
    "[" * 100_000: "it is nested too deeply|Expecting value",
    '{"text": "a': "Unterminated string|Invalid control",
    '{"text": "a\tb"}': "Invalid control character",
    '{"text": "a\0b"}': "it has a zero byte",
}


@pytest.mark.parametrize("line", LINES, ids=lambda line: LINES[line][:20])
def test_a_line_that_json_has_not_is_reported_with_its_number(tmp_path, line):
    records = lines_of(tmp_path / "a.jsonl", f'{{"text": "good"}}\n{line}\n \t\n{{"text": "\\ud83d\\ude00"}}\n'.encode())
    assert (len(records), records[2]) == (3, {"text": "\U0001f600"})
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2 is malformed: ({LINES[line]})"):
        records[1]
    assert len(open_records(source(tmp_path / "a.jsonl", on_malformed="skip"))) == 2


def test_a_surrogate_in_the_bytes_of_a_line(tmp_path):
    records = lines_of(tmp_path / "a.jsonl", b'{"text": "\xed\xa0\x80"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 1 is malformed: it is no utf-8: byte 0xed at offset 10"):
        records[0]


def test_lines_and_rows_of_white_space_are_blank(tmp_path):
    records = lines_of(tmp_path / "a.jsonl", b' \t\r\n{"text": "a"}\n   \n{"text": "b"}\n\t')
    assert [row["text"] for row in records] == ["a", "b"]
    rows = lines_of(tmp_path / "a.csv", b"a,b\n  \n1,2\n\t\r\n3, \n \n")
    assert list(rows) == [{"a": "1", "b": "2"}, {"a": "3", "b": " "}]
    rows = lines_of(tmp_path / "a.tsv", b"a\tb\n\t\n  \n1\t2\n")
    assert list(rows) == [{"a": "", "b": ""}, {"a": "1", "b": "2"}]


def test_two_columns_of_one_name(tmp_path):
    with pytest.raises(DataError, match=r"a\.csv has two columns of one name: 'text'; expected each name once"):
        lines_of(tmp_path / "a.csv", b"text,label,text\na,b,c\n")
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(DataError, match=rf"{name} has two columns of one name: text; expected each name once"):
            open_records(source(tmp_path / name))


def test_a_value_of_a_table_that_python_has_not(tmp_path):
    bad = pyarrow.array([b"ok", b"\xff"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "a.parquet")
    records = open_records(source(tmp_path / "a.parquet"))
    assert records.where(0).endswith("row 1")
    with pytest.raises(DataError, match=r"a\.parquet, row 2 cannot be read: 'utf-8' codec"):
        records[1]
