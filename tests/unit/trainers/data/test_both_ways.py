"""The examples are the same whether their tokens were prepared, are kept on the machine, or are made on the fly."""

from __future__ import annotations

import json

import numpy as np
import pyarrow
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import ipc, parquet

from tests.unit import chat_folders
from trainers.config import DataConfig, ModelConfig
from trainers.config.arguments import TrainingArguments
from trainers.config.data import MixtureSource
from trainers.data import preparing
from trainers.data.encoders import encoder_of
from trainers.data.preparing import Source, make
from trainers.data.sources.records import open_records
from trainers.data.sources.text import text_windows

TEXTS = [f"text {number}: caf\u00e9 {'x' * (7 * number % 13)}" for number in range(40)]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    """Tokens are kept where nobody else keeps some."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


def write_files(folder, encoding="utf-8", suffix=".txt"):
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}{suffix}").write_bytes(text.encode(encoding))
    return {"paths": (str(folder),), "pattern": f"*{suffix}", "encoding": encoding}


def write_lines(path, text):
    path.write_text(text)
    return {"paths": (str(path),)}


def write_table(path):
    table = pyarrow.Table.from_pylist([{"text": text} for text in TEXTS])
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    return {"paths": (str(path),)}


def write_array_record(path):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for text in TEXTS:
        writer.write(json.dumps({"text": text}).encode())
    writer.close()
    return {"paths": (str(path),)}


ROWS = [json.dumps({"text": text}) for text in TEXTS]
SOURCES = {
    "files of text": lambda folder: write_files(folder / "texts"),
    "files of latin-1": lambda folder: write_files(folder / "texts", "latin-1"),
    "files of UTF-16": lambda folder: write_files(folder / "texts", "utf-16"),
    "lines of JSON": lambda folder: write_lines(folder / "a.jsonl", "\n".join(ROWS)),
    "a list of JSON": lambda folder: write_lines(folder / "a.json", f"[{','.join(ROWS)}]"),
    "CSV": lambda folder: write_lines(folder / "a.csv", "text\n" + "".join(f'"{text}"\n' for text in TEXTS)),
    "some malformed": lambda folder: write_lines(folder / "a.jsonl", "\n".join(["{", *ROWS])) | {"on_malformed": "skip"},
    "Parquet": lambda folder: write_table(folder / "a.parquet"),
    "Arrow": lambda folder: write_table(folder / "a.arrow"),
    "ArrayRecord": lambda folder: write_array_record(folder / "a.arrayrecord"),
}
FORMS = {"windows": {}, "concat": {"packing": "concat"}, "fit": {"packing": "fit"}}


def arguments(data):
    shape = {"sequence_length": 64, "eval_fraction": 0.2}
    return TrainingArguments(name="t", max_num_steps=1, data=DataConfig(**shape, **data), model=ModelConfig(vocab_size=300))


def prepared(folder, data):
    made = arguments(data)
    for config in made.data.mixture or (made.data,):
        encoder = encoder_of(config, made, open_records(config).columns)
        make(Source(config, made, encoder), folder / getattr(config, "name", "data"))
    return data | {"prepared": str(folder)}


def leaves(data):
    """Returns the leaves of all examples, training and held out."""
    return [[dict(part[index]) for index in range(len(part))] for part in text_windows(arguments(data))]


def assert_equal(one, other):
    assert [len(part) for part in one] == [len(part) for part in other]
    for mine, theirs in zip(one[0] + one[1], other[0] + other[1], strict=True):
        assert mine.keys() == theirs.keys()
        for name, leaf in mine.items():
            np.testing.assert_array_equal(leaf, theirs[name], err_msg=name)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("form", FORMS)
def test_prepared_kept_and_on_the_fly_are_the_same_examples(tmp_path, kind, form, monkeypatch):
    data = SOURCES[kind](tmp_path) | FORMS[form]
    on_the_fly = leaves(data)
    assert [len(part) > 0 for part in on_the_fly] == [True, True]
    assert_equal(on_the_fly, leaves(prepared(tmp_path / "prepared", data)))
    monkeypatch.setattr(preparing, "make", None)  # what is kept is read again
    assert_equal(on_the_fly, leaves(data))


@pytest.mark.parametrize("form", FORMS)
def test_with_a_tokenizer_too(tmp_path, form):
    folder = chat_folders.write(tmp_path / "model")
    for name in ("", "tokenizer.json"):
        tokenizer = {"tokenizer": str(folder / name)}
        lines = write_lines(tmp_path / "a.jsonl", "\n".join(ROWS)) | FORMS[form] | tokenizer
        assert_equal(leaves(lines), leaves(prepared(tmp_path / f"prepared{name}", lines)))


def test_texts_in_files_and_in_records_are_the_same_text(tmp_path):
    """One file: of several, the order is that of their names."""
    (tmp_path / "a.txt").write_text(text := "\n".join(TEXTS))
    lines = write_lines(tmp_path / "a.jsonl", json.dumps({"text": text}))
    assert_equal(leaves({"paths": (str(tmp_path / "a.txt"),)}), leaves(lines))


def test_a_mixture_too(tmp_path):
    sources = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        kind = {"one": "files of latin-1", "two": "CSV"}[name]
        sources.append(MixtureSource(name=name, **SOURCES[kind](tmp_path / name)))
    data = {"mixture": tuple(sources), "packing": "fit"}
    assert_equal(leaves(data), leaves(prepared(tmp_path / "prepared", data)))
