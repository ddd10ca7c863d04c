"""Files with random defects: each is read as what it is, or refused with its name. Nothing in it is lost, changed or guessed."""

from __future__ import annotations

import csv
import io
import itertools
import json

import numpy as np
import pyarrow
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet
from safetensors.numpy import save_file

from gangway.errors import CheckpointError, DataError, DataMissingError
from gangway.storage.opening import place_of
from tests import fuzz
from tests.unit.source_files import source
from trainers.checkpoint import hugging_face
from trainers.data.images import open_image
from trainers.data.sources.classification import label_of
from trainers.data.sources.records import open_records

NUMBERS = itertools.count()
ENCODINGS = ["utf-8", "utf-8", "utf-8", "latin-1", "utf-16", "utf-16-le", "utf-32"]
TEXTS = st.text(st.sampled_from("ab1,;\t \"'\\{}[]:\n\u00e9\U0001f600"), max_size=12)
ROWS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6)
PIECES = [
    b'"',
    b'""',
    b",",
    b"\n",
    b"\r",
    b"\r\n",
    b" \n",
    b"\t",
    b"\0",
    b"\xe9",
    b"\xff",
    b"\xed\xa0\x80",
    b"\\ud800",
    b"NaN",
    b"{}",
]


def damaged(draw, content):
    """Returns the bytes with up to two defects: a piece put in, bytes left out, a byte changed, the end cut off."""
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(["put in", "leave out", "change", "cut"])):
            case "put in":
                content = content[:place] + draw(st.sampled_from(PIECES)) + content[place:]
            case "leave out":
                content = content[:place] + content[place + draw(st.integers(1, 4)) :]
            case "change":
                content = content[:place] + bytes([draw(st.integers(0, 255))]) + content[place + 1 :]
            case "cut":
                content = content[:place]
    return content


def decoded(content, encoding="utf-8"):
    """Returns the text. Raises ValueError."""
    text = content.decode(encoding).removeprefix("\ufeff")
    if "\0" in text:
        raise ValueError("a zero byte")
    text.encode()  # no lone surrogate
    return text


def once(pairs):
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("twice")
    return dict(pairs)


def no_number(name):
    raise ValueError(name)


def parsed(text):
    """Returns what strict JSON says. Raises ValueError."""
    found = json.loads(text, object_pairs_hook=once, parse_constant=no_number)
    json.dumps(found, ensure_ascii=False).encode()
    return found


def outcome(read, path, errors=DataError):
    """Returns what it reads, or None for a refusal that names the file. Any other error fails the test."""
    try:
        return read()
    except errors as error:
        if str(path) not in str(error):
            raise
        return None


def written(folder, content, ending):
    path = folder / f"{next(NUMBERS)}{ending}"
    path.write_bytes(content)
    return path


def read_all(path, **settings):
    try:
        return list(open_records(source(path, **settings)))
    except DataMissingError:  # no record at all
        return []


def expected(read):
    """Returns what a reference reads, or None."""
    try:
        return read()
    except (ValueError, csv.Error, RecursionError):
        return None


def check_text(folder, draw):
    text = draw(TEXTS)
    content = damaged(draw, text.encode(draw(st.sampled_from(ENCODINGS)), errors="replace"))
    encoding = draw(st.sampled_from(ENCODINGS))
    path = written(folder, content, ".txt")
    right = expected(lambda: [{"text": decoded(content, encoding)}])
    assert outcome(lambda: read_all(path, encoding=encoding), path) == right


def check_lines_of_json(folder, draw):
    rows = [json.dumps({"a": a, "b": [b]}, ensure_ascii=draw(st.booleans())) for a, b in draw(ROWS)]
    content = damaged(draw, draw(st.sampled_from(["\n", "\r\n", "\n \n"])).join(rows).encode())
    path = written(folder, content, ".jsonl")
    lines = [line for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip(b" \t\r")]
    right = [expected(lambda line=line: parsed(decoded(line))) for line in lines]
    right = [row if isinstance(row, dict) else None for row in right]
    if not lines:
        return
    records = open_records(source(path))
    assert [outcome(lambda index=index: records[index], path) for index in range(len(records))] == right
    good = [row for row in right if row is not None]
    assert read_all(path, on_malformed="skip") == good


def check_json(folder, draw):
    rows = [{"a": a, "b": b} for a, b in draw(ROWS)]
    content = damaged(draw, json.dumps(rows, indent=draw(st.sampled_from([None, 1]))).encode())
    path = written(folder, content, ".json")
    right = expected(lambda: parsed(decoded(content)))
    found = outcome(lambda: read_all(path), path)
    if isinstance(right, list) and all(isinstance(row, dict) for row in right):
        assert found == right
    elif isinstance(right, dict):
        assert found == [right]
    else:
        # What is no JSON as a whole may have a record in each line.
        each = expected(lambda: [parsed(line) for line in decoded(content).splitlines() if line.strip()])
        assert found is None or found == each


def check_csv(folder, draw):
    delimiter, rows = draw(st.sampled_from(",\t")), draw(ROWS)
    file = io.StringIO(newline="")
    quoting = draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]))
    writer = csv.writer(file, delimiter=delimiter, quoting=quoting, lineterminator=draw(st.sampled_from(["\n", "\r\n"])))
    writer.writerows([("a", "b"), *rows])
    content = damaged(draw, file.getvalue().encode())
    path = written(folder, content, ".tsv" if delimiter == "\t" else ".csv")
    blank = " \t".replace(delimiter, "")

    def reference():
        lines = io.StringIO(decoded(content), newline="\n")
        header, *found = [
            row for row in csv.reader(lines, delimiter=delimiter, strict=True) if row and (len(row) > 1 or row[0].strip(blank))
        ]
        if any(len(row) != len(header) for row in found) or len(set(header)) < len(header):
            raise ValueError("of another length")
        return [dict(zip(header, row, strict=True)) for row in found]

    found, right = outcome(lambda: read_all(path), path), expected(reference)
    if right is not None and len(next(iter(right), "ab")) > 1:  # of one column, a white text and a blank line look alike
        assert found == right
    elif right is None:
        assert not found
    kept = outcome(lambda: open_records(source(path, on_malformed="skip")), path, (DataError, DataMissingError))
    if kept is not None and expected(lambda: decoded(content)) is not None:
        # No line is lost: it is in a record, or it is counted. The first one is the header. (A row of several lines with a byte
        # that is no text is counted as one.)
        lines = [line for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip(blank.encode() + b"\r")]
        in_records = sum(1 + sum(value.count("\n") for value in row.values()) for row in kept)
        assert in_records + kept.num_malformed + 1 + sum(name.count("\n") for name in kept.columns) >= len(lines)


def check_parquet(folder, draw):
    rows = [{"a": a, "b": b} for a, b in draw(ROWS)]
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    content = file.getvalue()[: draw(st.sampled_from([None, 0, 3, 4, 40, -1, -4, -9]))]
    path = written(folder, content, ".parquet")
    found = outcome(lambda: read_all(path), path)
    assert found == (rows if content == file.getvalue() else None)


SHADES = np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5


def check_image(folder, draw):
    file = io.BytesIO()
    Image.fromarray(SHADES).save(file, draw(st.sampled_from(["PNG", "BMP"])))
    content = file.getvalue()
    for _ in range(draw(st.integers(0, 2))):
        content = content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else damaged(draw, content)
    path = written(folder, content, ".png")
    found = outcome(lambda: open_image(path), path)
    if content == file.getvalue():
        np.testing.assert_array_equal(np.asarray(found), SHADES)
    elif found is not None and content[:1] == b"\x89":
        assert found.mode in ("L", "RGB")  # each part of a PNG has a checksum; what is left is whole
        np.testing.assert_array_equal(np.asarray(found), SHADES)


def check_label(folder, draw):
    names = ["0", "1", "2", "-1", "true", "false", "True", "yes", "a", "b"]
    labels = draw(st.lists(st.sampled_from(names), min_size=2, max_size=4, unique=True))
    value = draw(st.sampled_from([0, 1, 2, 3, -1, True, False, 1.0, None, *names]))
    numbered = any(label.lstrip("-").isdigit() for label in labels)
    if isinstance(value, bool):
        fits = [place for place, label in enumerate(labels) if label.lower() == str(value).lower()]
        right = fits[0] if len(fits) == 1 else None
    elif isinstance(value, int) and not numbered:
        right = value if 0 <= value < len(labels) else None
    else:
        name = value if isinstance(value, str) else str(value) if isinstance(value, int) else None
        right = labels.index(name) if name in labels else None
    found = outcome(lambda: int(label_of(value, labels)), repr(value))
    assert found == right


def check_index(folder, draw):
    names, files = ["a", "b", "c"], ["x.safetensors", "y.safetensors"]
    where = {file: draw(st.lists(st.sampled_from(names), unique=True)) for file in files}
    index = {name: draw(st.sampled_from([*files, None])) for name in names}
    index = {name: file for name, file in index.items() if file is not None}
    place = folder / str(next(NUMBERS))
    place.mkdir()
    for number, (file, held) in enumerate(where.items()):
        if draw(st.integers(0, 4)):
            save_file({name: np.full(1 + number, number, np.float32) for name in held}, place / file)
    (place / hugging_face.INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    used = set(index.values())
    is_right = (
        bool(used)
        and all((place / file).is_file() for file in used)
        and all(name in where[file] for name, file in index.items())
        and not any(name not in index and used == {*files} and all(name in where[file] for file in files) for name in names)
    )
    found = outcome(lambda: hugging_face._tensors(place_of(place)), place, CheckpointError)
    assert (found is not None) == is_right
    if found is not None:
        assert {name: found[0][name].name for name in index} == index
        assert all(shape == (1 + files.index(found[0][name].name),) for name, (_, shape) in found[1].items())


CHECKS = [
    *(check_text, check_lines_of_json, check_json, check_csv, check_csv),
    *(check_parquet, check_image, check_label, check_index),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture(autouse=True)
def _nothing_is_kept(folder, monkeypatch):
    """A home that is no folder: indices are not written, which would take most of the time."""
    (folder / "home").touch()
    monkeypatch.setenv("HOME", str(folder / "home"))


QUIET = {"suppress_health_check": list(HealthCheck)}
QUIET["phases"] = [Phase.explicit, Phase.generate]  # to make a failure smaller takes minutes


@pytest.mark.parametrize("check", dict.fromkeys(CHECKS), ids=lambda check: check.__name__)
def test_a_few_files_with_random_defects(folder, check):
    @seed(23)
    @settings(max_examples=7, **QUIET)
    @given(st.data())
    def one(data):
        check(folder, data.draw)

    one()


@pytest.mark.slow("reads many files; `make fuzz KIND=files` reads more")
@seed(fuzz.seed(23))
@settings(max_examples=fuzz.count(200), **QUIET)
@given(data=st.data(), check=st.sampled_from(CHECKS))
def test_many_files_with_random_defects(folder, data, check):
    check(folder, data.draw)
